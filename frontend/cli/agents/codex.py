"""Codex: it asks OpenAI's /v1/responses at a provider, which arguments describe as config.toml would."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ....ipc.spec.config.engine_config import API_KEY_VARIABLE
from .agent import PATIENCE_MS, Agent, Place, SetUp

PROVIDER = "tokenloom"
COMPACT_AT = 0.8  # of the context: the agent then shortens the conversation


def set_up(place: Place) -> SetUp:
    provider: dict[str, str | int] = {"name": PROVIDER, "base_url": f"{place.url}/v1", "wire_api": "responses"}
    provider["stream_idle_timeout_ms"] = PATIENCE_MS
    variables: dict[str, str] = {}
    if place.api_key is not None:
        provider["env_key"] = API_KEY_VARIABLE
        variables[API_KEY_VARIABLE] = place.api_key
    settings = {
        "model_provider": json.dumps(PROVIDER),
        f"model_providers.{PROVIDER}": _table(provider),
        "model": json.dumps(place.model),
        "model_context_window": str(place.max_model_len),
        "model_auto_compact_token_limit": str(int(place.max_model_len * COMPACT_AT)),
    }
    arguments = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    return SetUp(variables=variables, arguments=arguments)


def _table(fields: Mapping[str, str | int]) -> str:
    """Return a table of TOML in one line."""
    return "{" + ", ".join(f"{name} = {json.dumps(value)}" for name, value in fields.items()) + "}"


CODEX = Agent(
    name="Codex",
    program="codex",
    package="@openai/codex",
    num_tokens=9_177,
    measured="0.171.0",
    set_up=set_up,
)

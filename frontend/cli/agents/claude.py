"""Claude Code: it asks Anthropic's API, with names of several of Anthropic's models, and is told all by variables."""

from __future__ import annotations

from .agent import PATIENCE_MS, Agent, Place, SetUp

# The model of the conversation, and those of each class for which the agent has uses of its own.
MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",  # the older name of the last class
)
MAX_ANSWER = 32_000  # tokens, if the context is long
ANSWER_SHARE = 4  # an answer may have a quarter of the context


def set_up(place: Place) -> SetUp:
    limits = {
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(place.max_model_len),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(min(MAX_ANSWER, place.max_model_len // ANSWER_SHARE)),
    }
    return SetUp(
        variables={
            "ANTHROPIC_BASE_URL": place.url,
            "ANTHROPIC_AUTH_TOKEN": place.api_key or "none",
            **dict.fromkeys(MODELS, place.model),
            **limits,
            "API_TIMEOUT_MS": str(PATIENCE_MS),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # nothing goes to Anthropic
        },
        removed=["ANTHROPIC_API_KEY"],  # it wins over the token
    )


CLAUDE = Agent(
    name="Claude Code",
    program="claude",
    package="@anthropic-ai/claude-code",
    num_tokens=12_343,
    measured="2.1.332",
    set_up=set_up,
)

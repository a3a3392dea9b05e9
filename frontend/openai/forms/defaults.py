"""Fill in the operator's defaults for fields that a request leaves out."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ....ipc.config.engine_spec import EngineSpec
from .schema import Generation, StreamOptions

BodyT = TypeVar("BodyT", bound=msgspec.Struct)
_LENGTHS = ("max_completion_tokens", "max_output_tokens", "max_tokens")  # the name depends on the endpoint


def with_defaults(body: BodyT, spec: EngineSpec) -> BodyT:
    """Return `body` with the model's sampling defaults, and the fields that flags turn on, in place of null fields."""
    if not isinstance(body, Generation):
        return body
    defaults: dict[str, Any] = dict(spec.default_sampling_params)
    lengths = [name for name in _LENGTHS if name in body.__struct_fields__]
    longest = defaults.pop("max_tokens", None)
    if all(getattr(body, name) is None for name in lengths):
        defaults[lengths[0]] = longest
    if spec.config.return_tokens_as_token_ids:
        defaults["return_tokens_as_token_ids"] = True
    given = {name: value for name, value in defaults.items() if getattr(body, name) is None}
    if spec.config.enable_force_include_usage and body.stream:
        given["stream_options"] = StreamOptions(include_usage=True, continuous_usage_stats=True)
    return msgspec.structs.replace(body, **given) if given else body

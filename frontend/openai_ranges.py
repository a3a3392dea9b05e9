"""What /openapi.json says of the values of fields beside their types. Decoding does not look at it: the ranges are
checked where they matter, by SamplingParams, the endpoints and the input processor, whose messages name the mend.

That both say the same is shown by schemathesis (`tests/system/test_http_tools.py`), in both directions.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

TOKEN_ID = "token id"  # title of integers whose maximum the loaded model gives

LOGPROBS = "number of logprobs"  # of those whose maximum the operator sets


def within(low: float | None = None, high: float | None = None, above: float | None = None) -> Meta:
    """A number in [low, high], or (above, high]."""
    limits = {"minimum": low, "maximum": high, "exclusiveMinimum": above}
    return Meta(extra_json_schema={name: limit for name, limit in limits.items() if limit is not None})


def items(least: int = 0, most: int | None = None) -> Meta:
    return Meta(extra_json_schema={"minItems": least} | ({} if most is None else {"maxItems": most}))


def matching(pattern: str) -> Meta:
    return Meta(extra_json_schema={"pattern": pattern})


def only(*values: object) -> Meta:
    """Of a field that is not served: null and what else asks for nothing."""
    return Meta(extra_json_schema={"enum": [None, *values]})


MOST = 2**31 - 1
Count: TypeAlias = Annotated[int, within(1, MOST)]
Natural: TypeAlias = Annotated[int, within(0, MOST)]
TokenId: TypeAlias = Annotated[int, within(0, MOST), Meta(title=TOKEN_ID)]
Seed: TypeAlias = Annotated[int, within(-(2**63), 2**64 - 1)]
Priority: TypeAlias = Annotated[int, within(-(2**31), MOST)]
LogprobCount: TypeAlias = Annotated[int, within(0, MOST), Meta(title=LOGPROBS)]
Truncation: TypeAlias = Annotated[
    int, Meta(extra_json_schema={"anyOf": [{"const": -1}, {"minimum": 1, "maximum": MOST}]})
]
TopK: TypeAlias = Annotated[int, within(-1, MOST)]
Temperature: TypeAlias = Annotated[float, within(0, 100)]
TopP: TypeAlias = Annotated[float, within(above=0, high=1)]
MinP: TypeAlias = Annotated[float, within(0, 1)]
Penalty: TypeAlias = Annotated[float, within(-2, 2)]
Repetition: TypeAlias = Annotated[float, within(above=0, high=100)]
Seconds: TypeAlias = Annotated[float, within(above=0, high=1e9)]
Text: TypeAlias = Annotated[str, Meta(extra_json_schema={"minLength": 1})]
Word: TypeAlias = Annotated[str, matching(r"\S")]
RequestId: TypeAlias = Annotated[str, matching(r"^[ -.0-~]{1,200}$")]
Salt: TypeAlias = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": 1024})]
Bias: TypeAlias = dict[Annotated[str, matching("^[0-9]+$")], Annotated[float, within(-100, 100)]]

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MOST, "title": TOKEN_ID}}
_PROMPTS = {"type": "array", "minItems": 1, "maxItems": 2048, "items": {"anyOf": [_TEXT, _IDS]}}
Prompts: TypeAlias = Annotated[  # one prompt as text or ids, or a list of prompts
    str | list[str | int | list[int]], Meta(extra_json_schema={"allOf": [{"anyOf": [_TEXT, _IDS, _PROMPTS]}]})
]

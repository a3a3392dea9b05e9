"""Bodies are read whatever harmless marks their writers put before them."""

from __future__ import annotations

from codecs import BOM_UTF8

import pytest

from tokenloom.frontend.intake.body_parser import parse_body
from tokenloom.frontend.openai.forms.schema import CompletionRequest
from tokenloom.frontend.text.prompt_limits import PromptLimits
from tokenloom.ipc.errors import RequestError

LIMITS = PromptLimits(max_model_len=100, max_answers=1, max_tokens=1000)


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("body", [b'{"prompt": "x"}', b' {"prompt": "x", "unknown": 1}'])
def test_a_byte_order_mark_is_no_part_of_a_body(body: bytes, kind: type[bytes]) -> None:
    plain, marked = (parse_body(kind(raw), CompletionRequest, LIMITS) for raw in (body, BOM_UTF8 + body))
    assert marked == plain and marked.body.prompt == "x"


def test_a_mark_within_a_body_is_refused() -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        parse_body(b'{"prompt": ' + BOM_UTF8 + b'"x"}', CompletionRequest, LIMITS)

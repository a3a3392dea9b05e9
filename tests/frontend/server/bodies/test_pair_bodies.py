"""An error about the texts of pairs names the field that the caller has sent."""

from __future__ import annotations

import json

import pytest

from tokenloom.frontend.forms.openai.params import prompt_errors_about
from tokenloom.frontend.forms.pooling.pooling_body import PAIRS, ScoreRequest
from tokenloom.frontend.forms.pooling.rerank_body import RerankRequest
from tokenloom.frontend.forms.prompt_limits import PromptLimits
from tokenloom.frontend.server.bodies.body_parser import parse_body
from tokenloom.ipc.errors import RequestError

LIMITS = PromptLimits(max_model_len=8, max_answers=1000, max_tokens=10_000)
BODIES = [(ScoreRequest, {first: "a capital"}, second) for first, second in PAIRS]
BODIES += [(RerankRequest, {"query": "a capital"}, name) for name in ("documents", "texts")]


@pytest.mark.parametrize(("body_type", "given", "field"), BODIES)
def test_an_error_about_texts_names_their_field(
    body_type: type[ScoreRequest | RerankRequest], given: dict[str, str], field: str
) -> None:
    for texts in ([], ["Oslo"] * 5000):
        raw = json.dumps(given | {field: texts}).encode()
        with pytest.raises(RequestError) as caught, prompt_errors_about("documents"):
            parse_body(raw, body_type, LIMITS)
        assert str(caught.value).startswith(field), str(caught.value)
    parsed = parse_body(json.dumps(given | {field: ["Oslo"]}).encode(), body_type, LIMITS)
    assert parsed.body.seconds_field == field and [each.text for each in parsed.inputs] == ["Oslo"]

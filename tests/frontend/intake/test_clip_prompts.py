"""Prompts of a model with cross attention begin with their clip, as texts without the tokens that a tokenizer puts
around them; what such a prompt cannot have is refused."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tokenloom.frontend.intake.input_processor import InputProcessor
from tokenloom.frontend.intake.prompt import Prompt
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import Submit
from tokenloom.ipc.messages.core import EngineCoreRequest
from tokenloom.ipc.messages.intake import ReadPrompt
from tokenloom.ipc.messages.media import MediaSpan
from tokenloom.ipc.models.model_config import CrossConfig
from tokenloom.ipc.pooling_params import PoolingParams
from tokenloom.ipc.sampling_params import SamplingParams
from tokenloom.tests.frontend.text.samples import new_tokenizer
from tokenloom.tests.support.engine_specs import new_spec

CLIP = MediaSpan(kind="audio", digest=bytes(32), start=0, length=32, num_embeds=30, grid=(1, 1, 9600))


def new_inputs() -> InputProcessor:
    spec = new_spec(max_model_len=100)
    model = replace(spec.model, cross=CrossConfig(num_rows=30, num_tokens=32))
    return InputProcessor(replace(spec, model=model), new_tokenizer("byte_fallback"), None)


def process(params: SamplingParams, num_behind: int = 3, *, has_clip: bool = True, **fields: Any) -> EngineCoreRequest:
    spans = [CLIP] if has_clip else []
    prompt = Prompt(encode_ids([7] * (32 * has_clip + num_behind)), None, spans)
    return new_inputs().process(Submit(request_id="r", params=params, **fields), prompt, now=1.0).core


def test_a_text_behind_a_clip_is_tokenized_as_it_is() -> None:
    prompt = new_inputs().tokenize(ReadPrompt(prompt="The", add_special_tokens=True))
    assert decode_ids(prompt.token_ids).tolist() == [296]


def test_max_tokens_is_the_room_behind_clip_and_prompt() -> None:
    core = process(SamplingParams(max_tokens=None))
    assert core.max_tokens == 100 - 32 - 3
    assert core.media == [CLIP]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"has_clip": False}, "this model answers to audio: give a clip"),
        ({"num_behind": 0}, "no tokens behind its clip"),
        ({"params": SamplingParams(prompt_logprobs=1)}, "prompt_logprobs are not there"),
        ({"pooling": PoolingParams()}, "gives no embeddings"),
    ],
)
def test_a_prompt_that_a_clip_does_not_allow_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        process(**{"params": SamplingParams(), **fields})

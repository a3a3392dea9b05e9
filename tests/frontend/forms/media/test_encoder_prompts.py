"""vLLM's pair of an encoder's and a decoder's prompt is the decoder's prompt with the encoder's media."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenloom.frontend.forms.prompts import new_submit
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import Submit
from tokenloom.ipc.params.sampling_params import SamplingParams

DATA = {"multi_modal_data": {"image": b"\x89PNG"}, "multi_modal_uuids": {"image": "name"}}


def submit_of(prompt: Any) -> Submit:
    return msgspec.structs.replace(new_submit("r", prompt, SamplingParams()), request_id="")


@pytest.mark.parametrize(
    ("decoder", "own"),
    [
        ("<|start|>", {"prompt": "<|start|>"}),
        ([1, 2], {"prompt_token_ids": [1, 2]}),
        ({"prompt": "a"}, {"prompt": "a"}),
        ({"prompt_token_ids": [3]}, {"prompt_token_ids": [3]}),
        ({"prompt": "a", "cache_salt": "s"}, {"prompt": "a", "cache_salt": "s"}),
    ],
)
def test_a_pair_is_the_decoders_prompt_with_the_encoders_media(decoder: Any, own: dict[str, Any]) -> None:
    pair = {"encoder_prompt": {"prompt": "", **DATA}, "decoder_prompt": decoder}
    assert submit_of(pair) == submit_of({**own, **DATA})
    assert submit_of({**pair, "cache_salt": "t"}) == submit_of({**own, **DATA, "cache_salt": "t"})


@pytest.mark.parametrize(
    "prompt",
    [
        {"encoder_prompt": {"prompt": "text", **DATA}, "decoder_prompt": "a"},
        {"encoder_prompt": {"prompt_token_ids": [1], **DATA}, "decoder_prompt": "a"},
        {"encoder_prompt": "text", "decoder_prompt": "a"},
        {"encoder_prompt": DATA, "decoder_prompt": {"prompt": "a", **DATA}},
        {"encoder_prompt": DATA, "decoder_prompt": "a", "prompt": "b"},
    ],
)
def test_a_pair_that_a_model_with_an_encoder_of_media_cannot_take_is_refused(prompt: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="encoder_prompt must be"):
        submit_of(prompt)


def test_a_pair_without_a_decoders_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="a prompt is"):
        submit_of({"encoder_prompt": DATA})

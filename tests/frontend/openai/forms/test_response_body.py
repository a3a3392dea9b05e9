"""Input items of /v1/responses become messages of a chat."""

from __future__ import annotations

import msgspec
import pytest

from tokenloom.frontend.openai.forms.messages import ChatInput
from tokenloom.frontend.openai.forms.messages import chat_input as input_of
from tokenloom.frontend.openai.forms.response_body import ResponsesRequest, chat_request
from tokenloom.frontend.openai.forms.schema import ChatRequest, TokenizeRequest
from tokenloom.frontend.text.media_limits import MediaLimits
from tokenloom.ipc.errors import RequestError
from tokenloom.tests.support.engine_specs import new_spec


def chat_input(body: ChatRequest | TokenizeRequest) -> ChatInput:
    return input_of(body, MediaLimits.of(new_spec()))


def contents(*items: object) -> list[str]:
    body = msgspec.convert({"input": items}, ResponsesRequest)
    return [turn.text for turn in chat_input(chat_request(body)).turns]


def test_a_function_output_may_have_parts() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "two\nparts"}
    in_parts = output | {"output": [{"type": "input_text", "text": text} for text in ("two", "parts")]}
    assert contents(call, output) == contents(call, in_parts) == ["", "two\nparts"]
    image = output | {"output": [{"type": "input_image", "image_url": "data:x"}]}
    with pytest.raises(RequestError, match=r"^input\[0\].output\[0\]: the model 'sample' does not see images"):
        contents(image)

"""TextEvents encodes the same events as `event`."""

from __future__ import annotations

import pytest

from tokenloom.frontend.openai.events import TextEvents, event


@pytest.mark.parametrize("text", ["", "a", 'a "quoted" \\ line\n', "\0text\0", "漢字 😀", "\u2028 \x7f </script>"])
def test_a_text_event_equals_the_encoded_body(text: str) -> None:
    def body(text: str) -> object:
        return {"id": "cmpl-1", "choices": [{"index": 0, "text": text, "logprobs": None}], "usage": None}

    assert TextEvents(body).event(text) == event(body(text))

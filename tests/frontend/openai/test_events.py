"""Events made from a head that was encoded once are those that are encoded whole."""

from __future__ import annotations

import pytest

from tokenloom.frontend.openai.events import TextEvents, event


@pytest.mark.parametrize("text", ["", "a", 'a "quoted" \\ line\n', "\0text\0", "漢字 😀", "\u2028 \x7f </script>"])
def test_an_event_of_a_text_is_the_whole_body_encoded(text: str) -> None:
    def body(text: str) -> object:
        return {"id": "cmpl-1", "choices": [{"index": 0, "text": text, "logprobs": None}], "usage": None}

    assert TextEvents(body).event(text) == event(body(text))

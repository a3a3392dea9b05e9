"""Third-party client libraries, unpatched, send images to an engine with the demo vision model.

Each must get the caption of each of two pictures, whatever the form of its image; the captions are those that the
pictures were drawn with, so that an image that was left out or mixed up is seen. openai is installed with the
tests, the others at first use (client_environments.py).
"""

from __future__ import annotations

import base64
import io
import random
from pathlib import Path
from typing import Any

import openai
import pytest

from tokenloom.scripts.train.demo_pictures import CAPTION_QUESTIONS, draw_picture
from tokenloom.tests.system.client_environments import CLIENTS, python_of
from tokenloom.tests.system.launched import served
from tokenloom.tests.system.test_client_libraries import seen_by

DEMO = Path(__file__).parents[2] / "demo" / "vision"
MODEL = {"model": "tokenloom-demo", "temperature": 0}
NUM_EMBEDS = 36  # of an image
INSTALLED = {"anthropic": "anthropic", "langchain": "langchain-openai", "litellm": "litellm"}

engine = served("--model", str(DEMO), "--served-model-name", "tokenloom-demo", "--http", "0")


def url_of(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()


@pytest.fixture
def drawn() -> dict[bytes, str]:
    """Return two PNG files with their captions."""
    rng, found = random.Random(7), dict[bytes, str]()
    for _ in range(2):
        picture, buffer = draw_picture(rng), io.BytesIO()
        picture.image.save(buffer, "PNG")
        found[buffer.getvalue()] = picture.caption
    assert len(set(found.values())) == 2
    return found


def test_openai_sends_images(client: openai.OpenAI, drawn: dict[bytes, str]) -> None:
    def chat(*pictures: bytes, detail: str = "auto", **more: object) -> Any:
        images = [{"type": "image_url", "image_url": {"url": url_of(each), "detail": detail}} for each in pictures]
        messages: Any = [{"role": "user", "content": [*images, {"type": "text", "text": CAPTION_QUESTIONS[0]}]}]
        return client.chat.completions.create(messages=messages, max_tokens=16, **MODEL, **more)  # type: ignore[call-overload]

    (one, caption), (other, _) = drawn.items()
    assert [chat(each).choices[0].message.content for each in drawn] == [*drawn.values()]
    for detail in ("low", "high"):
        assert chat(one, detail=detail).choices[0].message.content == caption
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat(one, stream=True)) == caption
    tokens = [chat(*pictures).usage.prompt_tokens for pictures in ((), (one,), (one, other))]
    assert [tokens[1] - tokens[0], tokens[2] - tokens[1]] == [NUM_EMBEDS + 1] * 2  # with the line's end after it
    image = {"type": "input_image", "image_url": url_of(one), "detail": "auto"}
    given: Any = [{"role": "user", "content": [image, {"type": "input_text", "text": CAPTION_QUESTIONS[0]}]}]
    asked: dict[str, Any] = {"input": given, "max_output_tokens": 16} | MODEL
    assert client.responses.create(**asked).output_text == caption
    with client.responses.stream(**asked) as stream:
        assert [*stream] and stream.get_final_response().output_text == caption
    with pytest.raises(openai.BadRequestError, match="no image of a known format"):
        chat(b"no picture")


@pytest.mark.nightly
@pytest.mark.timeout(900)  # includes the installation
@pytest.mark.parametrize("library", INSTALLED)
def test_other_libraries_send_images(url: str, drawn: dict[bytes, str], library: str, tmp_path: Path) -> None:
    paths = [tmp_path / "one.png", tmp_path / "other.png"]
    for path, picture in zip(paths, drawn, strict=True):
        path.write_bytes(picture)
    one, other = drawn.values()
    script, python = str(CLIENTS / "image_client.py"), python_of(INSTALLED[library])
    seen = seen_by(url, python, script, library, *map(str, paths), CAPTION_QUESTIONS[0])
    more: dict[str, dict[str, object]] = {
        "anthropic": {"tokens": [NUM_EMBEDS + 1, NUM_EMBEDS + 1]},
        "langchain": {"block": one, "response": one},
        "litellm": {"openai": one},
    }
    assert seen == {"one": one, "other": other, "streamed": one} | more[library]

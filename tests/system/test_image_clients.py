"""Third-party client libraries, unpatched, send images to an engine with the demo vision model.

Each library must get the caption of each of two pictures, whatever the form of its image; the captions are those that
the pictures were drawn with, so that an image that was left out or mixed up is seen. openai is installed with the
tests, the others at first use (client_environments.py).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom.scripts.demo_pictures import CAPTION_QUESTIONS, draw_picture
from tokenloom.tests.system.client_environments import CLIENTS, python_of
from tokenloom.tests.system.launched import LaunchedEngine
from tokenloom.tests.system.test_client_libraries import seen_by

DEMO = Path(__file__).parents[2] / "demo" / "vision"
NUM_EMBEDS = 36  # of an image
INSTALLED = {"anthropic": "anthropic", "langchain": "langchain-openai", "litellm": "litellm"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ("--model", str(DEMO), "--served-model-name", "tokenloom-demo", "--http", "0")
    with LaunchedEngine(tmp_path_factory.mktemp("libraries"), *options) as engine:
        yield engine.wait_http()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """Return two files with their captions."""
    folder, rng = tmp_path_factory.mktemp("pictures"), random.Random(7)
    drawn = [draw_picture(rng) for _ in range(2)]
    assert drawn[0].caption != drawn[1].caption
    found = {folder / f"{index}.png": each.caption for index, each in enumerate(drawn)}
    for path, each in zip(found, drawn, strict=True):
        each.image.save(path)
    return found


def seen_with(library: str, python: str, url: str, pictures: dict[Path, str]) -> dict[str, object]:
    script = str(CLIENTS / "image_client.py")
    return seen_by(url, python, script, library, *map(str, pictures), CAPTION_QUESTIONS[0])


def test_openai_sends_images(url: str, pictures: dict[Path, str]) -> None:
    one, other = pictures.values()
    assert seen_with("openai", sys.executable, url, pictures) == {
        "one": one,
        "other": other,
        "details": [one, one],
        "streamed": one,
        "tokens": [NUM_EMBEDS + 1, NUM_EMBEDS + 1],  # with the line's end after it
        "response": one,
        "response_streamed": one,
        "refused": True,
    }


@pytest.mark.nightly
@pytest.mark.timeout(900)  # includes the installation
@pytest.mark.parametrize("library", INSTALLED)
def test_other_libraries_send_images(url: str, pictures: dict[Path, str], library: str) -> None:
    one, other = pictures.values()
    seen = seen_with(library, python_of(INSTALLED[library]), url, pictures)
    more = {
        "anthropic": {"tokens": [NUM_EMBEDS + 1, NUM_EMBEDS + 1]},
        "langchain": {"block": one, "response": one},
        "litellm": {"openai": one},
    }
    assert seen == {"one": one, "other": other, "streamed": one} | more[library]

"""Media that do not fit a model or their prompt are refused."""

from __future__ import annotations

import pytest

from tokenloom.ipc.errors import RequestError
from tokenloom.tests.support.audio_configs import AUDIO_MODELS
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.encoders.audio.audio_items import random_item
from tokenloom.tests.workers.encoders.media_case import WHISPER, WHISPER_ROWS, WINDOW, Cases


@pytest.mark.parametrize("name", some(["llava", "mistral3", "internvl", "qwen2_vl"], 2))
def test_media_of_other_sizes_than_the_models_are_refused(case_of: Cases, name: str) -> None:
    case = case_of(name)
    item = case.items[-1]
    tiles, height, width, channels = item.shape
    with pytest.raises(RequestError, match="its prompt says"):
        case.encoder.begin(item, (1, 1, 77))
    for shape in ((tiles, height - 1, width, channels), (0, height, width, channels), (tiles, 0, width, channels)):
        with pytest.raises(RequestError, match="does not fit the model"):
            case.encoder.begin(item._replace(shape=shape), item.grid)


@pytest.mark.parametrize("name", some(list(AUDIO_MODELS), 1))
def test_media_that_are_no_audio_of_the_models_are_refused(case_of: Cases, name: str) -> None:
    case = case_of(name)
    item = random_item(case.config, 1, 16_000)
    with pytest.raises(RequestError, match="its prompt says"):
        case.encoder.begin(item, (1, 1, 77))
    for shape in ((1, 1, 15_999, 4), (16_000, 1, 1, 4), (1, 1, 16_000, 3), (1, 1, 0, 4)):
        with pytest.raises(RequestError, match="no audio that fits the model"):
            case.encoder.begin(item._replace(shape=shape), item.grid)
    wrong = item._replace(grid=(2, 1, 16_000))
    with pytest.raises(RequestError, match="no audio that fits the model"):
        case.encoder.begin(wrong, wrong.grid)


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [
        ("qwen2_audio", 320, "no audio that fits the model"),
        ("qwen2_audio", WINDOW + 1, "has 2 windows, the model takes 1: send a shorter one"),
        (WHISPER, WHISPER_ROWS * 320 + 1, "has 2 windows, the model takes 1"),
    ],
)
def test_an_audio_with_no_embedding_or_with_too_many_windows_is_refused(
    case_of: Cases, name: str, count: int, message: str
) -> None:
    case = case_of(name)
    item = random_item(case.config, 1, count)
    with pytest.raises(RequestError, match=message):
        case.encoder.begin(item, item.grid)

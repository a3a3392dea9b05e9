"""The tiny checkpoints that see or hear are fit to test the engine: media and their order decide the tokens.
These tests know nothing of the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenloom.tests.support.audio_oracle import random_clip
from tokenloom.tests.support.today import some
from tokenloom.tests.support.vision_oracle import random_image
from tokenloom.tests.system.media_families import FAMILIES, WHISPER, make_models

IMAGES = (random_image(1, 60, 80), random_image(2, 100, 40), random_image(3, 33, 33))
CLIPS = (random_clip(2, 17_000), random_clip(4, 17_000), random_clip(3, 31_000))


@pytest.mark.parametrize("name", some([name for name in FAMILIES if name != WHISPER], num_today=2))
def test_other_media_or_another_order_of_them_give_other_tokens(name: str, tmp_path: Path) -> None:
    models = make_models(tmp_path, name)
    oracle: Any = models.oracle
    one, two, three = IMAGES if models.kind == "image" else CLIPS
    answers = {
        tuple(oracle.generate(f"{models.marker}\nWhat is this?", [each], max_tokens=6)) for each in (one, two, three)
    }
    assert len(answers) >= 2  # random weights may answer two of them alike
    pair = f"{models.marker} and {models.marker}: which is larger? The"
    first, second = (oracle.generate(pair, media) for media in ([one, two], [two, one]))
    assert first != second
    oracle.check(pair, [one, two], first)
    with pytest.raises(AssertionError, match="misses by"):
        oracle.check(pair, [two, one], first)

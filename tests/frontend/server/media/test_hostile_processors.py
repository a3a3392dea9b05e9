"""A processor's file with a hostile value in one field is read or refused by the field's name, by the frontend and by
the workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.ipc.spec.processors.audio_processor_config import load_audio_processor
from tokenloom.ipc.spec.processors.image_processor_config import load_image_processor
from tokenloom.tests.support.audio_configs import AUDIO_MODELS
from tokenloom.tests.support.hostile_fields import Hostile, faults, hostile_changes
from tokenloom.tests.support.today import some
from tokenloom.tests.support.vision_configs import VISION_MODELS
from tokenloom.workers.encoders.audio.log_mel import LogMel
from tokenloom.workers.encoders.images.pixels import PixelScale

CPU = torch.device("cpu")
IMAGES = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_resize": True, "resample": 2}


def config_of(model: Any) -> dict[str, Any]:
    """Return the model's config with ids in place of its marker tokens."""
    ids = {token: number for number, token in enumerate(sorted(model.markers.values()), 2050)}
    return {name: ids.get(value, value) if isinstance(value, str) else value for name, value in model.config.items()}


@pytest.mark.parametrize("family", some([*VISION_MODELS], 2))
def test_hostile_image_processors_are_refused_by_their_fields(family: str, tmp_path: Path) -> None:
    model = VISION_MODELS[family]
    (tmp_path / "config.json").write_text(json.dumps(config_of(model)))
    vision = load_model_config(tmp_path).vision
    assert vision is not None
    given = json.loads(json.dumps({**IMAGES, **model.preprocessor}))  # without shared lists

    def read(change: Hostile) -> None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(change.of(given)))
        load_image_processor(tmp_path, vision).digest()
        PixelScale.load(tmp_path, vision.family, torch.float32, CPU)

    found = faults(hostile_changes(given), read)
    assert not found, found


@pytest.mark.parametrize("family", some([*AUDIO_MODELS], 1))
def test_hostile_feature_extractors_are_refused_by_their_fields(family: str, tmp_path: Path) -> None:
    model = AUDIO_MODELS[family]
    (tmp_path / "config.json").write_text(json.dumps(config_of(model)))
    audio = load_model_config(tmp_path).audio
    assert audio is not None
    given = model.preprocessor or model.processor["feature_extractor"]

    def read(change: Hostile) -> None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(change.of(given)))
        load_audio_processor(tmp_path, audio, 30.0)
        LogMel.load(tmp_path, audio, CPU)

    found = faults(hostile_changes(given), read)
    assert not found, found

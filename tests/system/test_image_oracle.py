"""The tiny vision checkpoints are fit to test the engine: pixels and their order decide the tokens, and placeholders
stand where the families' own processors put them. These tests know nothing of the engine.
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("PIL")

import transformers

from tokenloom.tests.support.today import some
from tokenloom.tests.support.vision_checkpoints import vision_checkpoint
from tokenloom.tests.support.vision_configs import VISION_MODELS
from tokenloom.tests.support.vision_oracle import VisionOracle, random_image

IMAGES = [random_image(1, 60, 80), random_image(2, 100, 40), random_image(3, 33, 33)]
PROCESSORS = {"llava": "LlavaProcessor", "idefics3": "Idefics3Processor", "gemma3": "Gemma3Processor"}


@pytest.mark.parametrize("name", some(list(VISION_MODELS), num_today=2))
def test_other_pixels_or_another_order_of_images_give_other_tokens(name: str, tmp_path: Path) -> None:
    oracle = VisionOracle(vision_checkpoint(tmp_path, name))
    marker = VISION_MODELS[name].image
    prompt = f"{marker}\nWhat is this?"
    answers = [oracle.generate(prompt, [image], max_tokens=6) for image in IMAGES]
    assert len(set(map(tuple, answers))) == len(IMAGES), answers
    pair = f"{marker} and {marker}: which is larger? The"
    answers = [oracle.generate(pair, images, max_tokens=12) for images in (IMAGES[:2], IMAGES[1::-1])]
    assert answers[0] != answers[1]
    oracle.check(pair, IMAGES[:2], answers[0])
    with pytest.raises(AssertionError, match="misses by"):
        oracle.check(pair, IMAGES[1::-1], answers[0])


@pytest.mark.parametrize("name", some(list(PROCESSORS), num_today=1))
def test_the_expansion_is_that_of_the_familys_processor(name: str, tmp_path: Path) -> None:
    oracle = VisionOracle(vision_checkpoint(tmp_path, name))
    settings = json.loads((tmp_path / "processor_config.json").read_text(encoding="utf-8"))
    settings.pop("processor_class")
    processor = getattr(transformers, PROCESSORS[name])(
        image_processor=oracle.image_processor, tokenizer=oracle.tokenizer, **settings
    )
    prompt = "Look: {0}\n{0} What?".format(VISION_MODELS[name].image)
    theirs = processor(text=[prompt], images=[IMAGES[:2]])["input_ids"][0]
    assert oracle.expand(prompt, IMAGES[:2]).token_ids == list(theirs)

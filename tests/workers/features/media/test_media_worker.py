"""A worker answers prompts with images with transformers' tokens, however steps and encodes are cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.messages.base import Holding
from tokenloom.tests.support.today import some
from tokenloom.tests.support.vision_checkpoints import vision_checkpoint
from tokenloom.tests.support.vision_configs import VISION_MODELS
from tokenloom.tests.workers.encoders.images.image_items import qwen_patches, random_item
from tokenloom.tests.workers.features.media.media_engine import (
    NUM_OUTPUTS,
    Engine,
    Prompt,
    answers,
    check_two_processes,
)
from tokenloom.tests.workers.random_schedule import frame, message
from tokenloom.workers.encoders.encoder import Encoder
from tokenloom.workers.encoders.images.pixels import PixelScale


def make_prompt(engine: Engine, sizes: list[tuple[int, int, int]], seed: int) -> Prompt:
    """A prompt with images of several sizes between text."""
    rng, vision = random.Random(seed), engine.spec.model.vision
    assert vision is not None
    return Prompt(engine, (random_item(vision, rng.randrange(100), *size) for size in sizes), rng)


@torch.inference_mode()
def their_tokens(folder: Path, engine: Engine, prompt: Prompt) -> list[int]:
    """Greedy tokens of transformers, by whole forward passes."""
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    vision, ids = engine.spec.model.vision, list(prompt.token_ids)
    assert vision is not None
    scale = PixelScale.load(folder, vision.family, torch.float32, torch.device("cpu"))
    images = [torch.frombuffer(bytearray(item.data), dtype=torch.uint8).view(item.shape) for item in prompt.items]
    pixels = [scale.scale(image) for image in images]
    inputs: dict[str, Any] = {}
    if vision.family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        inputs["pixel_values"] = torch.cat(
            [qwen_patches(each, vision.patch_size, vision.merge_size) for each in pixels]
        )
        inputs["image_grid_thw"] = torch.tensor([item.grid for item in prompt.items])
    elif vision.family == "pixtral":
        height, width = (max(each.shape[axis] for each in pixels) for axis in (2, 3))
        pad = torch.nn.functional.pad
        inputs["pixel_values"] = torch.cat([pad(x, (0, width - x.shape[3], 0, height - x.shape[2])) for x in pixels])
        inputs["image_sizes"] = torch.tensor([each.shape[2:] for each in pixels])
    else:
        inputs["pixel_values"] = torch.cat(pixels)[None] if vision.family == "idefics3" else torch.cat(pixels)
    for _ in range(NUM_OUTPUTS):
        given = torch.tensor([ids])
        is_image = (given == vision.image_token_id).int()
        types = {"gemma3": "token_type_ids", "qwen2_vl": "mm_token_type_ids"}
        name = types.get("qwen2_vl" if vision.family.startswith("qwen") else vision.family)
        more = {name: is_image} if name else {}
        ids.append(int(model(input_ids=given, **inputs, **more).logits[0, -1].argmax()))
    return ids[len(prompt.token_ids) :]


@pytest.mark.parametrize("name", some(list(VISION_MODELS), 1))
def test_tokens_with_images_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = vision_checkpoint(tmp_path / "model", name)
    engine = Engine(folder, tmp_path / "run")
    assert engine.phases == ["load weights", "load encoder"]
    prompt = make_prompt(engine, [(1, 3, 4), (2, 4, 2)], seed=5)
    expected = their_tokens(folder, engine, prompt)
    for seed in range(3):
        assert answers(engine, prompt, seed) == expected
    other = make_prompt(engine, [(1, 3, 4), (2, 4, 2)], seed=6)
    other.token_ids = prompt.token_ids
    assert answers(engine, other, 0) != expected


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = vision_checkpoint(tmp_path_factory.mktemp("model") / "qwen2_vl", "qwen2_vl")
    return Engine(folder, tmp_path_factory.mktemp("run"))


def test_a_missing_image_is_reported_and_other_rows_go_on(engine: Engine) -> None:
    prompt = make_prompt(engine, [(1, 3, 4), (1, 2, 2)], seed=1)
    expected = answers(engine, prompt, 0)
    lost = msgspec.structs.replace(prompt.orders[0], entry=9, digest=bytes(32))
    step = msgspec.structs.replace(message(), encodes=[lost, *prompt.orders])
    result = engine.execute(step)
    assert [each.entry for each in result.failed_entries] == [9]
    assert "send it again" in result.failed_entries[0].error
    engine.execute(msgspec.structs.replace(message(), freed_entries=frame(1, 2)))
    assert answers(engine, prompt, 1) == expected


def test_a_new_core_finds_an_empty_encoder_cache(engine: Engine) -> None:
    prompt = make_prompt(engine, [(1, 2, 3)], seed=2)
    expected = answers(engine, prompt, 0)
    for _ in range(2):
        engine.execute(msgspec.structs.replace(message(new_rows=[prompt.new_row(1)]), encodes=prompt.orders))
        engine.worker.reset()
    assert answers(engine, prompt, 1) == expected


def test_weights_that_are_read_again_include_the_encoder(engine: Engine) -> None:
    prompt = make_prompt(engine, [(1, 2, 3)], seed=3)
    expected = answers(engine, prompt, 0)
    engine.execute(msgspec.structs.replace(message(), encodes=prompt.orders))
    engine.worker.hold(Holding(asleep=["weights"]))
    assert engine.worker._media is None
    engine.worker.hold(Holding())
    assert answers(engine, prompt, 1) == expected
    engine.worker.hold(Holding(model_folder=engine.spec.model_folder))
    assert answers(engine, prompt, 2) == expected


def test_bindings_must_be_triples(engine: Engine) -> None:
    with pytest.raises(ProtocolError, match="make no triples"):
        engine.execute(msgspec.structs.replace(message(), span_entries=frame(1, 2)))


def test_dummy_weights_include_the_encoder(engine: Engine, tmp_path: Path) -> None:
    dummy = Engine(Path(engine.spec.model_folder), tmp_path, load_format="dummy")
    prompt = make_prompt(dummy, [(1, 2, 3)], seed=3)
    assert len(answers(dummy, prompt, 0)) == NUM_OUTPUTS
    assert isinstance(dummy.worker._media.encoder, Encoder)  # type: ignore[union-attr]


@pytest.mark.nightly
def test_two_ranks_in_processes_give_the_tokens_of_one(engine: Engine, tmp_path: Path) -> None:
    check_two_processes(engine, make_prompt(engine, [(1, 3, 4), (1, 2, 2)], seed=1), tmp_path)

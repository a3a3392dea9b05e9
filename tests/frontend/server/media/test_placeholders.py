"""Prompts with images have the tokens that transformers' processors give them."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.frontend.server.media.images.image_processor import process_image
from tokenloom.frontend.server.media.placeholders import Placeholders
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.errors import ConfigError, RequestError
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.ipc.spec.models.vision_config import VisionConfig
from tokenloom.ipc.spec.processors.image_processor_config import load_image_processor
from tokenloom.tests.frontend.server.media.images.image_files import new_pixels
from tokenloom.tests.support.vision_checkpoints import write_tokenizer
from tokenloom.tests.support.vision_configs import VISION_MODELS

DIGEST = bytes(32)


class Item(NamedTuple):
    digest: bytes
    grid: tuple[int, int, int]


class Model(NamedTuple):
    """A checkpoint without weights: our placeholders, and transformers' tokenizer, processors and their rule."""

    placeholders: Placeholders
    tokenizer: Any
    image_processor: Any
    rule: Any  # replace_image_token of the family's processor
    image: str  # in a prompt


@cache
def model_of(name: str) -> Model:
    folder, model = Path(mkdtemp()), VISION_MODELS[name]
    tokenizer = write_tokenizer(folder, model)
    ids = tokenizer.get_added_vocab()
    config = json.loads(json.dumps(model.config))
    for part in (config, config.get("text_config", {})):
        part |= {key: ids[value] for key, value in part.items() if isinstance(value, str) and value in ids}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(model.preprocessor))
    (folder / "processor_config.json").write_text(json.dumps(model.processor))
    vision = load_model_config(folder).vision
    assert vision is not None
    ours = Tokenizer.load(folder)
    assert ours is not None
    placeholders = Placeholders.load(load_image_processor(folder, vision), vision, ours)
    fields = dict(model.preprocessor)
    kind = fields.pop("image_processor_type").removesuffix("Fast")
    image_processor = getattr(transformers, f"{kind}Pil")(**fields)
    family = model.processor["processor_class"]
    end = model.markers.get("eoi_token")
    state = {"spatial_merge_size": 1, "num_additional_image_tokens": 0, **model.processor, **model.markers}
    state |= {"image_processor": image_processor, "global_image_tag": "<global-img>"}
    state |= {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
    if name == "internvl":
        state["image_token"] = state["context_image_token"]
    if name == "gemma3":
        soft = state["image_token"] * state["image_seq_length"]
        state["full_image_sequence"] = f"\n\n{state['boi_token']}{soft}{end}\n\n"
    is_pixtral = family == "PixtralProcessor"  # transformers does not import it without torchvision
    rule = pixtral_rule if is_pixtral else getattr(transformers, family).replace_image_token
    return Model(
        placeholders, tokenizer, image_processor, lambda *each: rule(SimpleNamespace(**state), *each), model.image
    )


def pixtral_rule(state: Any, inputs: Any, index: int) -> str:
    """Repeat PixtralProcessor.replace_image_token of transformers."""
    side = state.patch_size * state.spatial_merge_size
    height, width = inputs["image_sizes"][index]
    rows = [[state.image_token] * (width // side) + [state.image_break_token]] * (height // side)
    tokens = [token for row in rows for token in row]
    tokens[-1] = state.image_end_token
    return "".join(tokens)


def expected_ids(model: Model, text: str, sizes: list[tuple[int, int]]) -> list[int]:
    """Tokenize a rendered prompt with transformers, with noise images of these (width, height)."""
    images = [new_pixels(*size) for size in sizes]
    config = model.placeholders.config
    extra: dict[str, Any] = {"return_tensors": "np"}
    if config.family == "pixtral":
        extra["patch_size"] = config.factor
    if config.family == "idefics3":
        extra["return_row_col_info"] = True
    replacements = []
    for image in images:  # one by one, as none is padded to the size of another
        inputs = model.image_processor([[image]] if config.family == "idefics3" else [image], **extra)
        replacements.append(model.rule(inputs, 0))
    marker = re.escape(model.placeholders.marker.text)
    found = iter(replacements)
    ids: list[int] = model.tokenizer(re.sub(marker, lambda _: next(found), text))["input_ids"]
    return ids


def our_ids(model: Model, text: str, sizes: list[tuple[int, int]]) -> list[int]:
    ours = model.placeholders
    items = [Item(DIGEST, process_image(new_pixels(*size), ours.config).grid) for size in sizes]
    ids, spans = ours.expand(ours.tokenizer.encode(ours.before_tokenization(text)), items)
    covered = np.zeros(len(ids), bool)
    for span, item in zip(spans, items, strict=True):
        tokens = ids[span.start : span.start + span.length]
        assert tokens[0] == tokens[-1] == ours.placeholder_id
        assert tokens.count(ours.placeholder_id) == span.num_embeds == ours.config.num_embeds(item.grid)
        assert span.num_embeds <= ours.config.max_embeds
        assert not covered[span.start : span.start + span.length].any()
        covered[span.start : span.start + span.length] = True
    assert all(covered[place] for place, token in enumerate(ids) if token == ours.placeholder_id)
    return ids


sizes = st.tuples(st.integers(8, 300), st.integers(8, 300))
texts = st.text(st.sampled_from("ab C1.\n \té漢🙂<>|"), max_size=12)


@pytest.mark.parametrize("name", VISION_MODELS)
@settings(max_examples=10, deadline=None)
@given(first=texts, parts=st.lists(st.tuples(sizes, texts), max_size=4))
def test_expanded_prompts_are_those_of_transformers(
    name: str, first: str, parts: list[tuple[tuple[int, int], str]]
) -> None:
    model = model_of(name)
    text = first + "".join(f"{model.image}{after}" for _, after in parts)
    wanted = [size for size, _ in parts]
    assert our_ids(model, text, wanted) == expected_ids(model, text, wanted)


@pytest.mark.parametrize("name", ["llava", "idefics3", "gemma3"])
def test_rule_of_the_oracle_is_that_of_the_whole_processor(name: str) -> None:
    model, tiny = model_of(name), VISION_MODELS[name]
    family = getattr(transformers, tiny.processor["processor_class"])
    options = {key: value for key, value in tiny.processor.items() if key != "processor_class"}
    processor = family(image_processor=model.image_processor, tokenizer=model.tokenizer, **options)
    text, size = f"What\n{model.image}\n\nis this?", (90, 41)
    found = processor(text=[text], images=[[new_pixels(*size)]], return_tensors="np")["input_ids"]
    assert list(found[0]) == expected_ids(model, text, [size]) == our_ids(model, text, [size])


@pytest.mark.parametrize("name", VISION_MODELS)
def test_prompt_of_tokens_with_one_marker_an_image_is_expanded_too(name: str) -> None:
    ours = model_of(name).placeholders
    item = Item(DIGEST, process_image(new_pixels(60, 50), ours.config).grid)
    ids, (span,) = ours.expand([5, ours.marker_id, 6], [item])
    assert ids[0] == 5 and ids[-1] == 6
    assert ids[span.start : span.start + span.length].count(ours.placeholder_id) == span.num_embeds
    if name == "gemma3":
        lines = ours.tokenizer.encode("\n\n", add_special_tokens=False)
        assert ids[1 : 1 + len(lines)] == lines == ids[-1 - len(lines) : -1]


@pytest.mark.parametrize("name", VISION_MODELS)
def test_number_of_placeholders_must_be_that_of_the_images(name: str) -> None:
    ours = model_of(name).placeholders
    item = Item(DIGEST, (1, 0, 0) if ours.config.family == "idefics3" else (1, 4, 4))
    marker = re.escape(ours.marker.text)
    for num_markers, num_items in ((0, 1), (2, 1), (1, 0), (1, 3)):
        words = rf"has {num_markers} placeholders? of images \({marker}\) for {num_items} images?: write one for each"
        with pytest.raises(RequestError, match=words):
            ours.expand([5] + [ours.marker_id, 7] * num_markers, [item] * num_items)
    assert ours.expand([5, 6], []) == ([5, 6], [])


def test_placeholder_that_follows_no_marker_is_refused() -> None:
    ours = model_of("gemma3").placeholders
    with pytest.raises(RequestError, match=r"has 2 placeholders .* for 1 image:"):
        ours.expand([5, ours.marker_id, 6, ours.placeholder_id], [Item(DIGEST, (1, 8, 8))])
    with pytest.raises(RequestError, match=r"has 1 placeholder .* for 0 images:"):
        ours.expand([5, ours.placeholder_id], [])


@pytest.mark.parametrize("name", VISION_MODELS)
def test_an_image_that_no_template_shows_has_the_frame_of_its_family(name: str) -> None:
    assert model_of(name).placeholders.marker.framed == VISION_MODELS[name].image


def test_tokenizer_without_the_tokens_of_images_is_refused() -> None:
    ours, other = model_of("internvl").placeholders, model_of("llava").placeholders
    vision = VisionConfig(
        family="internvl", image_token_id=other.placeholder_id, hidden_size=8, num_layers=1, patch_size=7
    )
    with pytest.raises(ConfigError, match="the tokenizer has no token <img> for images"):
        Placeholders.load(ours.config, vision, other.tokenizer)

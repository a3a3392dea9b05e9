"""Given embeddings for images or audio, logits of each family equal those of transformers, under any schedule."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

from tokenloom.ipc.spec.models.audio_families import AUDIO_FAMILIES
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.kernels.select import Ops
from tokenloom.tests.support.checkpoints import ENCODER_DECODERS, tiny_checkpoint
from tokenloom.tests.support.families import CONFIGS, HEARING, MEDIUM_ID
from tokenloom.tests.support.family_checkpoints import reference_model
from tokenloom.tests.support.today import some, some_pairs
from tokenloom.tests.workers.models.test_decoder import schedule
from tokenloom.tests.workers.paged_run import CPU, GivenMedia, PagedRun, load
from tokenloom.tests.workers.threaded_group import run_ranks
from tokenloom.workers.machine.parallel import ParallelGroup

MROPE = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
FAMILIES = ["gemma3", "idefics3", "internvl", "llava", "mistral3", "pixtral", "smolvlm", *MROPE]
OPS = {"C": None, "torch": ReferenceOps()}
TOLERANCE = 1e-5  # of the largest logit
Grids: TypeAlias = list[tuple[int, int]]  # rows and columns of images
CLIPS: dict[str, Grids] = {"a": [(1, 6), (1, 25)], "b": [(1, 40)], "c": [], "d": [(1, 1), (1, 13), (1, 2)]}
GRIDS: dict[str, Grids] = {"a": [(2, 3), (1, 5)], "b": [(4, 4)], "c": [], "d": [(3, 2), (5, 7), (1, 1)]}


class Prompt(NamedTuple):
    """A prompt with images."""

    tokens: list[int]
    media: GivenMedia
    spans: list[range]  # of placeholders


def prompt_of(grids: Grids, family: str, hidden_size: int, num_features: int, seed: int) -> Prompt:
    """Make a prompt of random text and images of these rows and columns."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens, spans, embeds = [draw.randrange(200) for _ in range(draw.randrange(1, 9))], [], {}
    columns = [torch.arange(len(tokens)).expand(3, -1)]
    for rows, width in grids:
        start, origin = len(tokens), int(columns[-1].max()) + 1
        spans.append(range(start, start + rows * width))
        tokens += [MEDIUM_ID] * (rows * width)
        scale = 1.0 if family == "gemma3" else 0.4  # about that of the text's embeddings
        drawn = scale * torch.randn(rows * width, (1 + num_features) * hidden_size, generator=generator)
        embeds |= dict(zip(spans[-1], drawn, strict=True))
        place = torch.arange(rows * width)
        columns.append(origin + torch.stack((0 * place, place // width, place % width)))
        text = [draw.randrange(200) for _ in range(draw.randrange(1, 20))]
        columns.append(int(columns[-1].max()) + 1 + torch.arange(len(text)).expand(3, -1))
        tokens += text
    positions = torch.cat(columns, dim=1) if family in MROPE else None
    see_until = None
    if family == "gemma3":
        see_until = torch.arange(len(tokens), dtype=torch.int32)
        for span in spans:
            see_until[span.start : span.stop] = span.stop - 1
    return Prompt(tokens, GivenMedia(embeds, positions, see_until), spans)


@torch.inference_mode()
def reference_logits(model: Any, prompt: Prompt, num_features: int) -> Tensor:
    """Compute the logits by transformers' language model, [length, vocab]."""
    inner = model.model.text_model if hasattr(model.model, "text_model") else model.model.language_model
    embeds = inner.embed_tokens(torch.tensor([prompt.tokens]))
    places = torch.tensor(sorted(prompt.media.embeds), dtype=torch.int64)
    options: dict[str, Any] = {"position_ids": torch.arange(len(prompt.tokens))[None]}
    if len(places):
        given = torch.stack([prompt.media.embeds[int(place)] for place in places]).chunk(1 + num_features, dim=1)
        embeds[0, places] = given[0]
        if num_features:
            is_image = torch.zeros(1, len(prompt.tokens), dtype=torch.bool).index_fill_(1, places, True)
            options |= {"visual_pos_masks": is_image, "deepstack_visual_embeds": list(given[1:])}
    if prompt.media.positions is not None:
        options["position_ids"] = prompt.media.positions[:, None]
    if prompt.media.see_until is not None:
        blocks = torch.full((1, len(prompt.tokens)), -1)
        for number, span in enumerate(prompt.spans):
            blocks[0, span.start : span.stop] = number
        positions = options["position_ids"]
        masks = create_masks_for_vision_model(inner.config, embeds, None, None, positions, blocks)
        options["attention_mask"] = masks
    hidden = inner(inputs_embeds=embeds, use_cache=False, **options).last_hidden_state
    logits: Tensor = model.lm_head(hidden)[0]
    return logits


def steps_of(prompts: dict[str, Prompt], seed: int) -> list[dict[str, range]]:
    """Return steps of random chunks. The chunk that begins a span of a bidirectional image goes to its end."""
    done, steps = dict.fromkeys(prompts, 0), []
    for step in schedule({name: len(prompt.tokens) for name, prompt in prompts.items()}, seed):
        chunks = {}
        for name, count in step.items():
            prompt, stop = prompts[name], min(done[name] + count, len(prompts[name].tokens))
            if prompt.media.see_until is not None and stop:
                stop = max(stop, int(prompt.media.see_until[:stop].max()) + 1)
            if stop > done[name]:
                chunks[name] = range(done[name], stop)
                done[name] = stop
        if chunks:
            steps.append(chunks)
    return steps


def check(
    family: str,
    folder: Path,
    ops: Ops | None,
    seed: int,
    group: ParallelGroup | None = None,
    grids: Mapping[str, Grids] = GRIDS,
    device: torch.device = CPU,
    tolerance: float = TOLERANCE,
) -> None:
    """Compare the logits of prompts with transformers', up to `tolerance` of the largest."""
    config = load_model_config(folder)
    assert config.encoder is not None
    num_features = config.encoder.num_deepstack
    prompts = {
        name: prompt_of(images, family, config.hidden_size, num_features, seed + number)
        for number, (name, images) in enumerate(grids.items())
    }
    run = PagedRun(load(folder, ops=ops, group=group, device=device), 8, device=device)
    run.media, run.num_features = {name: prompt.media for name, prompt in prompts.items()}, num_features
    found: dict[str, list[Tensor]] = {name: [] for name in prompts}
    for step in steps_of(prompts, seed):
        results = run.step({name: prompts[name].tokens[chunk.start : chunk.stop] for name, chunk in step.items()})
        for name, logits in results.items():
            found[name].append(logits)
    if group is not None and group.rank:
        return
    model = reference_model(folder)
    for name, prompt in prompts.items():
        expected = reference_logits(model, prompt, num_features)
        bound = tolerance * expected.abs().max().item()
        torch.testing.assert_close(torch.cat(found[name]).cpu(), expected, atol=bound, rtol=0)


@pytest.mark.parametrize(("family", "ops"), some_pairs([*FAMILIES, *HEARING], OPS, every=4))
def test_logits_with_media_equal_those_of_transformers(family: str, ops: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family, seed=1)
    for seed in range(2):
        check(family, folder, OPS[ops], seed, grids=CLIPS if family in HEARING else GRIDS)


@pytest.mark.parametrize("family", some(["gemma3", "qwen3_vl", "qwen3_asr"], 1))
def test_two_ranks_give_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    """Embeddings of media are whole on each rank: they are put in place behind the sum over ranks."""
    folder = tiny_checkpoint(tmp_path, family, seed=1)
    run_ranks(2, lambda group: check(family, folder, None, 0, group, CLIPS if family in HEARING else GRIDS))


OF_AUDIO = {  # prefixes of tensors' names in older and in newer files
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "audio_tower.": "model.audio_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
LAYOUTS: dict[str, dict[str, str]] = {
    "llava": {"language_model.model.": "model.language_model.", "language_model.": "", "vision": "model.vision"},
    "qwen2_5_vl": {"model.": "model.language_model.", "visual.": "model.visual."},
    **dict.fromkeys(HEARING, OF_AUDIO),
}


@pytest.mark.parametrize("family", LAYOUTS)
def test_both_layouts_of_names_load(family: str, tmp_path: Path) -> None:
    folder, moves = tiny_checkpoint(tmp_path, family), LAYOUTS[family]
    before = PagedRun(load(folder), 8).step({"a": [3, 1, 4]})["a"]
    tensors = load_file(folder / "model.safetensors")
    if not any(name.startswith(tuple(moves)) for name in tensors if "lm_head" not in name):  # these are the newer ones
        moves = {new: old for old, new in moves.items()}
    moved = {
        next((new + name.removeprefix(old) for old, new in moves.items() if name.startswith(old)), name): tensor
        for name, tensor in tensors.items()
    }
    assert len(moved.keys() & tensors.keys()) < len(tensors) / 4
    save_file(moved, folder / "model.safetensors")
    assert torch.equal(PagedRun(load(folder), 8).step({"a": [3, 1, 4]})["a"], before)


def test_these_are_all_families_with_media() -> None:
    assert {family for family, config in CONFIGS.items() if "vision_config" in config} == {*FAMILIES, "gemma4_vision"}
    hearing = {family for family, config in CONFIGS.items() if config["architectures"][0] in AUDIO_FAMILIES}
    assert hearing == set(HEARING)
    assert len(hearing) + len(ENCODER_DECODERS) == len(AUDIO_FAMILIES)

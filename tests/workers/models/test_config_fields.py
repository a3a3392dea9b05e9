"""A field of config.json that changes transformers' logits changes ours alike, or is refused by its name; others change
nothing.

Every field of every native family is changed, in the spelling of published files and in the one that transformers
saves. Both models have the same random weights, of the changed shapes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.select import select_ops
from tokenloom.scripts.bench.inputs.make_checkpoint import BOS_ID, EOS_ID
from tokenloom.tests.support.checkpoints import NATIVES, tiny_config
from tokenloom.tests.support.families import Config
from tokenloom.tests.support.family_checkpoints import randomize
from tokenloom.tests.support.recurrent_families import HYBRIDS, config_of
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.models.config_changes import MISSING, Change, aliases, changed, changes, left_out
from tokenloom.tests.workers.paged_run import CPU, PagedRun
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.load import load_model

TOLERANCE = 3e-5  # of the largest logit; half of all changes have errors below 1e-6
SAME = 1e-6
MAX_WEIGHTS = 20_000_000
TOKENS = torch.randint(3, 250, (1, 44), generator=torch.Generator().manual_seed(0))
OPS = select_ops(CPU, torch.float32)


class Pair:
    """transformers' model of a config, and ours, from one folder with the same weights."""

    def __init__(self, folder: Path, config: Config, *, is_saved: bool) -> None:
        """Write the config as it is or, with `is_saved`, as transformers saves it. Raises transformers' errors."""
        self.folder, self._config = folder, folder / "config.json"
        text = json.dumps(config)
        self._config.write_text(text)
        shape = transformers.AutoConfig.from_pretrained(folder)
        make = getattr(transformers, config["architectures"][0])
        with torch.device("meta"):
            if sum(each.numel() for each in make(shape).parameters()) > MAX_WEIGHTS:
                raise ValueError("too large to compare")
        model = make._from_config(shape, attn_implementation="eager").eval()
        randomize(model, 1)
        with torch.inference_mode():
            self.expected: Tensor = model(TOKENS).logits[0].float()
        model.save_pretrained(folder)
        if not is_saved:
            self._config.write_text(text)

    def logits(self) -> Tensor:
        """Compute our logits; ConfigError if the native family refuses the config."""
        config = load_model_config(self.folder, implementation="native", with_encoder=False)
        model = load_model(self.folder, config, TOKENS.shape[1], torch.float32, CPU, OPS, ParallelGroup())
        return PagedRun(model, 8).step({"a": TOKENS[0].tolist()})["a"]

    def error(self) -> float:
        """Return the largest difference, in parts of the largest logit."""
        actual = self.logits()
        assert actual.shape == self.expected.shape
        return difference(actual, self.expected)


def difference(actual: Tensor, expected: Tensor) -> float:
    if torch.equal(actual.isnan(), expected.isnan()):
        actual, expected = actual.nan_to_num(), expected.nan_to_num()
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-9)).item()


# transformers saves OLMo-hybrid's convolutions as three equal tensors, whatever their sizes
FAMILIES = [*NATIVES, *(family for family in HYBRIDS if family != "olmo_hybrid")]


def start_of(family: str) -> Config:
    config: Config = dict(config_of(family) if family in HYBRIDS else tiny_config(family))
    return {**config, "dtype": "float32", "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": 0}


def saved_config(folder: Path, config: Config) -> Config:
    """Return all fields of transformers' class, as it spells them."""
    (folder / "config.json").write_text(json.dumps(config))
    full: Config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    return {**full, "architectures": config["architectures"], "dtype": "float32"}


def verdict(pair: Pair, change: Change, base: Tensor | None) -> str:
    """Return equal, idle (equal, and equal to the unchanged model), refused, or the fault."""
    try:
        error = pair.error()
    except ConfigError as refusal:
        words = re.findall(r"\w+_\w+", str(refusal))  # a message about sliding_window names use_sliding_window, too
        is_named = any(name in str(refusal) for name in change.path[-2:]) or any(
            each in change.path[-1] for each in words
        )
        is_named |= isinstance(change.value, dict)
        return "refused" if is_named else f"refused without the field's name: {refusal}"
    if not error <= TOLERANCE:
        return f"differs by {error:.1e}"
    is_idle = base is not None and base.shape == pair.expected.shape and difference(pair.expected, base) <= SAME
    return "idle" if is_idle else "equal"


def sweep(folder: Path, config: Config, todo: Iterator[Change], *, is_saved: bool) -> Counter[str]:
    """Compare after each change; print and return the verdicts. Those that transformers refuses do not count."""
    base = Pair(folder, config, is_saved=is_saved).expected
    found: Counter[str] = Counter()
    for change in todo:
        for old in folder.glob("*.safetensors*"):
            old.unlink()
        try:
            pair = Pair(folder, changed(config, change), is_saved=is_saved)
        except Exception as refusal:  # transformers raises whatever its arithmetic runs into
            print(f"{change}: not in transformers ({type(refusal).__name__})")
            continue
        result = verdict(pair, change, base)
        print(f"{change}: {result}")
        found[result if result in ("equal", "idle", "refused") else f"{change}: {result}"] += 1
    return found


@pytest.mark.parametrize("family", some(FAMILIES, 6))
def test_the_config_that_transformers_saves_gives_its_logits(family: str, tmp_path: Path) -> None:
    assert Pair(tmp_path, start_of(family), is_saved=True).error() <= TOLERANCE


FOUND: list[tuple[str, Change]] = [  # changes that once acted in transformers alone, or here alone
    ("llama", Change(("rope_parameters", "partial_rotary_factor"), 0.5)),
    ("mixtral", Change(("hidden_act",), "gelu")),
    ("qwen3_moe", Change(("hidden_act",), "relu")),
    ("gemma", Change(("hidden_act",), "silu")),
    ("gemma3_text", Change(("use_bidirectional_attention",), True)),
    ("gemma3", Change(("text_config", "final_logit_softcapping"), 0.5)),
    ("solar_open", Change(("num_experts_per_tok",), 6)),
    ("exaone4", Change(("sliding_window",), MISSING)),
    ("gpt2", Change(("n_positions",), MISSING)),
    ("gpt_oss", Change(("rope_scaling",), MISSING)),
    ("ministral3", Change(("rope_parameters",), MISSING)),
    ("ernie4_5_moe", Change(("moe_k",), MISSING)),
    ("gemma4_vision", Change(("text_config", "tie_word_embeddings"), False)),
    ("olmo3", Change(("rope_theta",), 250000.0)),
    ("phi", Change(("num_attention_heads",), 5)),
    ("minimax_m2", Change(("rotary_dim",), 9)),
    ("hunyuan_v1_dense", Change(("rope_scaling", "partial_rotary_factor"), 0.5)),
    ("qwen3_5_moe", Change(("layer_types",), MISSING)),
    ("lfm2", Change(("block_auto_adjust_ff_dim",), True)),
    ("falcon_h1_scaled", Change(("mamba_rms_norm",), False)),
    ("nemotron_h", Change(("tie_word_embeddings",), True)),
    ("lfm2", Change(("conv_L_cache",), 1)),
]


@pytest.mark.parametrize(("family", "change"), some(FOUND, 5))
def test_a_field_acts_as_in_transformers_or_is_refused_by_its_name(family: str, change: Change, tmp_path: Path) -> None:
    pair = Pair(tmp_path, changed(start_of(family), change), is_saved=False)
    assert verdict(pair, change, None) in ("equal", "refused")


@pytest.mark.nightly
@pytest.mark.parametrize("spelling", ["saved", "published", "left out"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_acts_as_in_transformers(family: str, spelling: str, tmp_path: Path) -> None:
    """As transformers saves it, as published files spell it, and by its default where it is left out."""
    config = start_of(family)
    if spelling == "saved":
        config = saved_config(tmp_path, config)
    todo = left_out(config) if spelling == "left out" else changes(config)
    found = sweep(tmp_path, config, todo, is_saved=spelling == "saved")
    assert found.keys() <= {"equal", "idle", "refused"}, found
    assert found["equal"] > 10 or spelling == "left out", found


@pytest.mark.parametrize("family", some(FAMILIES, 6))
def test_the_other_name_of_a_field_acts_as_in_transformers(family: str, tmp_path: Path) -> None:
    config = start_of(family)
    names: dict[str, Any] = transformers.AutoConfig.for_model(config["model_type"]).attribute_map
    for renamed in aliases(config, names):
        assert Pair(tmp_path, renamed, is_saved=False).error() <= TOLERANCE, sorted(renamed)

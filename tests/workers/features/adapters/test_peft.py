"""Logits with adapters equal those of peft, in float32, beside the weights and merged into them.

Every case fails, too, if its adapter leaves the base's tokens as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.kernels.select import Ops, select_ops
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.peft_adapters import KINDS, peft_logits, save_adapter
from tokenloom.tests.support.recurrent_families import recurrent_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.features.adapters.adapted_model import fill, load_adaptable
from tokenloom.tests.workers.models.test_decoder import prompts_of, run_schedule
from tokenloom.tests.workers.paged_run import CPU, PagedRun
from tokenloom.tests.workers.threaded_group import run_ranks

TOLERANCE = 1e-4  # of the largest logit
VOCABULARY = "embedding and head"
DENSE = [kind for kind in KINDS if not kind.startswith("experts")]
SPARSE = ["r8", VOCABULARY, "experts", "experts and router"]
REORDERED = ("glm", "falcon", "falcon_40b", "gpt_neox", "gemma4", "cohere", "olmo", "phi4_mini")  # rows, or shared keys
TABLE = {  # family: kinds
    **dict.fromkeys(("llama", "qwen2", "gemma3_text", "phi4", "gpt2"), DENSE),
    **dict.fromkeys(("mixtral", "qwen3_moe"), SPARSE),
    **{family: ["dora", "patterns"] for family in REORDERED},
    **{family: ["r8", "experts"] for family in ("gpt_oss", "gemma4_moe", "qwen2_moe")},
}
QUICK = [
    ("llama", "patterns"),
    ("gemma3_text", VOCABULARY),
    ("phi4", "dora"),
    ("gpt2", "rslora"),
    ("mixtral", SPARSE[-1]),
    ("gpt_oss", "experts"),
]
ECHOING = ("gemma3_text", "gemma4", "gemma4_moe")  # with a tied head they repeat their input
OPS: dict[str, Callable[[], Ops]] = {"plain": ReferenceOps, "C": lambda: select_ops(CPU, torch.float32)}
REST = [(family, kind) for family, kinds in TABLE.items() for kind in kinds if (family, kind) not in QUICK]


def check(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())


def check_moved(adapted: Tensor, base: Tensor) -> None:
    assert (adapted.argmax(-1) != base.argmax(-1)).any(), "the adapter is too weak to show anything"


@pytest.mark.parametrize(("family", "kind"), [*some(QUICK, 3), *some(REST, 0)])
def test_logits_equal_pefts(family: str, kind: str, tmp_path: Path) -> None:
    fields = {"tie_word_embeddings": False} if family in ECHOING and kind != VOCABULARY else {}
    checkpoint = tiny_checkpoint(tmp_path / "model", family, **fields)
    adapter = save_adapter(tmp_path / "adapter", checkpoint, KINDS[kind], 1)
    config = load_model_config(checkpoint)
    tokens = prompts_of({"a": 41}, config.vocab_size, seed=2)
    expected = peft_logits(checkpoint, adapter, tokens)["a"]
    check_moved(expected, peft_logits(checkpoint, None, tokens)["a"])
    if kind != VOCABULARY or not config.tie_word_embeddings:  # merging would change the other of the two, too
        check(peft_logits(checkpoint, adapter, tokens, is_merged=True)["a"], expected)
    for make_ops in OPS.values():
        model, filler = load_adaptable(checkpoint, make_ops())
        fill(filler, 2, adapter)
        run = PagedRun(model, 8)
        run.slots["a"] = 2
        check(run_schedule(run, tokens, [{"a": 30}, *[{"a": 1}] * 11])["a"], expected)


@pytest.mark.parametrize(
    "family", some(["qwen3_5", "qwen3_next", "falcon_h1_scaled", "granite4_dense", "nemotron_h_moe"], 1)
)
def test_logits_of_hybrids_equal_pefts(family: str, tmp_path: Path) -> None:
    """Adapters update attention, with gates or without, and MLPs."""
    checkpoint = recurrent_checkpoint(tmp_path / "model", family)
    names = [*("q_proj", "k_proj", "v_proj", "o_proj"), *("gate_proj", "up_proj", "down_proj")]
    updated = {"target_modules": names, "r": 6, "lora_alpha": 12, "use_dora": family == "qwen3_5"}
    adapter = save_adapter(tmp_path / "adapter", checkpoint, updated, 1)
    tokens = prompts_of({"a": 41}, 271, seed=2)
    expected = peft_logits(checkpoint, adapter, tokens)["a"]
    check_moved(expected, peft_logits(checkpoint, None, tokens)["a"])
    model, filler = load_adaptable(checkpoint)
    fill(filler, 2, adapter)
    run = PagedRun(model, 8)
    run.slots["a"] = 2
    check(run_schedule(run, tokens, [{"a": 30}, *[{"a": 1}] * 11])["a"], expected)


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A checkpoint, and adapters of five kinds."""
    folder = tmp_path_factory.mktemp("five")
    checkpoint = tiny_checkpoint(folder / "model", "llama", num_attention_heads=6, num_key_value_heads=2)
    kinds = ["r16 all linears", "dora", "patterns", "one layer", VOCABULARY]
    return checkpoint, [save_adapter(folder / kind, checkpoint, KINDS[kind], seed) for seed, kind in enumerate(kinds)]


def test_a_slot_that_is_filled_again_keeps_nothing(five: tuple[Path, list[Path]]) -> None:
    checkpoint, adapters = five
    model, filler = load_adaptable(checkpoint)
    tokens = prompts_of({"a": 20}, load_model_config(checkpoint).vocab_size, seed=3)
    for adapter in (*adapters, adapters[0]):
        fill(filler, 1, adapter)
        run = PagedRun(model, 8)
        run.slots["a"] = 1
        check(run.step(tokens)["a"], peft_logits(checkpoint, adapter, tokens)["a"])
    filler.empty(1)
    run = PagedRun(model, 8)
    run.slots["a"] = 1
    assert torch.equal(run.step(tokens)["a"], PagedRun(model, 8).step(tokens)["a"])


SHARDED = {  # family and fields that divide by the ranks; KV heads of 1 are on every rank, the vocabulary is padded
    "llama": (2, {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 90}),
    "llama, replicated KV heads": (3, {"num_attention_heads": 6, "num_key_value_heads": 1, "intermediate_size": 90}),
    "phi4": (2, {"num_key_value_heads": 1}),
    "gpt2": (2, {}),
    "mixtral": (2, {}),
}


@pytest.mark.parametrize(
    ("case", "kind"),
    some(
        [
            ("llama", "dora"),
            ("llama", "patterns"),
            ("llama, replicated KV heads", "dora"),
            ("llama, replicated KV heads", VOCABULARY),
            ("phi4", "patterns"),
            ("phi4", "dora"),
            ("phi4", VOCABULARY),
            ("gpt2", "dora"),
            ("mixtral", "experts and router"),
        ],
        2,
    ),
)
def test_ranks_cut_an_adapter_as_the_base(case: str, kind: str, tmp_path: Path) -> None:
    size, fields = SHARDED[case]
    checkpoint = tiny_checkpoint(tmp_path / "model", case.partition(",")[0], **fields)
    adapter = save_adapter(tmp_path / "adapter", checkpoint, KINDS[kind], 1)
    tokens = prompts_of({"a": 30, "none": 11}, load_model_config(checkpoint).vocab_size, seed=2)

    def work(group: Any) -> dict[str, Tensor]:
        model, filler = load_adaptable(checkpoint, group=group)
        fill(filler, 1, adapter)
        run = PagedRun(model, 8)
        run.slots["a"] = 1
        run.step({"a": tokens["a"][:17]})
        return run.step({"a": tokens["a"][17:], "none": tokens["none"]})

    first = run_ranks(size, work)[0]
    expected = peft_logits(checkpoint, adapter, tokens)["a"]
    base = peft_logits(checkpoint, None, tokens)
    check_moved(expected, base["a"])
    check(first["a"], expected[17:])
    check(first["none"], base["none"])

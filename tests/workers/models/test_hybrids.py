"""Logits of layers with a state equal those of transformers, however the tokens are scheduled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenloom.ipc.spec.kv.kv_groups import kv_groups
from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.select import Ops, select_ops
from tokenloom.tests.support.exact_logits import exact_logits
from tokenloom.tests.support.recurrent_families import HYBRIDS, recurrent_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.models.test_decoder import prompts_of, run_schedule, schedule
from tokenloom.tests.workers.models.test_families import TOLERANCE, reference_logits, reference_model
from tokenloom.tests.workers.paged_run import CPU, PagedRun
from tokenloom.tests.workers.threaded_group import run_ranks
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.decoder import DecoderModel
from tokenloom.workers.models.load import load_model
from tokenloom.workers.step.state_cache import StateSpec

LENGTHS = {"a": 97, "b": 1, "c": 33, "d": 2}
LOOSER = {"olmo_hybrid": 2.5e-5}  # its states do not fade: transformers' own error in float32 is 3.4e-5
SHORT = {"a": 21, "b": 2, "c": 9}
MAX_MODEL_LEN = 128
WIDE = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "vocab_size": 270,
}


def load(folder: Path, config: ModelConfig, group: ParallelGroup | None = None, ops: Ops | None = None) -> DecoderModel:
    groups = kv_groups(config, MAX_MODEL_LEN, is_grouped=True)
    ops = ops or select_ops(CPU, torch.float32)
    group = group or ParallelGroup()
    return load_model(folder, config, MAX_MODEL_LEN, torch.float32, CPU, ops, group, groups=groups)


def in_chunks(lengths: dict[str, int], size: int) -> list[dict[str, int]]:
    """Return steps of `size` tokens of each request side by side."""
    return [
        {name: min(size, count - at) for name, count in lengths.items() if count > at}
        for at in range(0, max(lengths.values()), size)
    ]


class Case:
    """A checkpoint of a family, prompts and the logits of transformers."""

    def __init__(self, folder: Path, family: str, lengths: dict[str, int] = LENGTHS, **fields: Any) -> None:
        self.folder = recurrent_checkpoint(folder, family, seed=1, **fields)
        self.config, self.lengths = load_model_config(self.folder), lengths
        self.tokens = prompts_of(lengths, self.config.vocab_size, seed=2)
        self.expected = reference_logits(self.folder, self.tokens)

    @property
    def last(self) -> dict[str, list[int]]:
        return {name: ids[-1:] for name, ids in self.tokens.items()}

    def error(self, steps: list[dict[str, int]], model: DecoderModel) -> float:
        """Return the largest difference, in parts of the request's largest logit."""
        return self.error_of(run_schedule(PagedRun(model, 8), self.tokens, steps))

    def use_exact(self) -> None:
        """Compare with logits in double precision from now on."""
        self.expected = exact_logits(self.folder, self.tokens)
        assert {logits.dtype for logits in self.expected.values()} == {torch.float64}

    def error_of(self, actual: dict[str, Tensor]) -> float:
        """Return the same for logits of the last tokens of requests."""
        errors = []
        for name, logits in actual.items():
            expected = self.expected[name][-len(logits) :]
            errors.append((logits - expected).abs().max() / expected.abs().max())
        return torch.stack(errors).nan_to_num(9.0).max().item()


@pytest.mark.parametrize("family", HYBRIDS)
def test_logits_equal_transformers_under_any_schedule(family: str, tmp_path: Path) -> None:
    case = Case(tmp_path, family)
    case.use_exact()
    model = load(case.folder, case.config)
    for steps in (schedule(LENGTHS, seed=3), in_chunks(LENGTHS, 7), in_chunks(LENGTHS, 1)):
        assert case.error(steps, model) <= LOOSER.get(family, TOLERANCE)


@pytest.mark.parametrize("family", LOOSER)
@torch.inference_mode()
def test_errors_of_float32_are_no_larger_than_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Neither of whole prompts nor of single tokens."""
    case = Case(tmp_path, family)
    whole = case.expected
    case.use_exact()
    theirs = [case.error_of(whole), case.error_of(token_by_token(case.folder, case.tokens))]
    model = load(case.folder, case.config)
    ours = [case.error(steps, model) for steps in ([LENGTHS], in_chunks(LENGTHS, 1))]
    assert all(mine <= their for mine, their in zip(ours, theirs, strict=True)), (ours, theirs)


def token_by_token(folder: Path, tokens: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return transformers' logits in float32, computed from one token at a time and its cache."""
    model, found = reference_model(folder), dict[str, Tensor]()
    for name, ids in tokens.items():
        logits, cache = list[Tensor](), None
        for token in ids:
            output = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits[0])
        found[name] = torch.cat(logits)
    return found


@pytest.mark.parametrize("family", some(HYBRIDS, 4))
def test_bits_of_deterministic_kernels_do_not_depend_on_chunks(family: str, tmp_path: Path) -> None:
    case = Case(tmp_path, family, SHORT)
    model = load(case.folder, case.config, ops=select_ops(CPU, torch.float32, is_batch_invariant=True))
    whole, *others = (
        run_schedule(PagedRun(model, 8), case.tokens, steps)
        for steps in (schedule(SHORT, seed=5), in_chunks(SHORT, 7), in_chunks(SHORT, 1))
    )
    assert all(torch.equal(each[name], whole[name]) for each in others for name in whole)


RANKS = [
    *(("qwen3_next", 2), ("qwen3_5", 3), ("lfm2", 2), ("lfm2_moe", 2)),
    *(("granite4", 2), ("bamba", 2), ("falcon_h1_scaled", 2), ("nemotron_h", 2), ("nemotron_h_moe", 2)),
]


@pytest.mark.parametrize(("family", "size"), RANKS)
def test_ranks_share_the_heads(family: str, size: int, tmp_path: Path) -> None:
    """Of three ranks each has four value heads, and a copy of the key head that each reads: 0 0 0 1, 1 1 2 2 and
    2 3 3 3."""
    case = Case(tmp_path, family, SHORT, **(WIDE if size == 3 else {}))

    def run(group: ParallelGroup) -> tuple[dict[str, Tensor], StateSpec | None]:
        model = load(case.folder, case.config, group)
        paged = PagedRun(model, 8)
        paged.step({name: ids[:-1] for name, ids in case.tokens.items()})
        return paged.step(case.last), model.state_spec

    found, specs = zip(*run_ranks(size, run), strict=True)
    assert found[1:] == ({},) * (size - 1)
    assert len(set(specs)) == 1, "blocks of states have the same bytes on all ranks"
    assert case.error_of(found[0]) <= TOLERANCE

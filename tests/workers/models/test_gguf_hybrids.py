"""A GGUF file of each architecture with states has the logits of the checkpoint that it was made of, and each of its
keys acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from tokenloom.frontend.checkpoint.gguf.folder import checkpoint_folder
from tokenloom.frontend.checkpoint.gguf.hybrid_architectures import HYBRID_ARCHITECTURES
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.served_model import served_model, with_floats
from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.scripts.bench.inputs.adapter_requests import linked_cache
from tokenloom.tests.support.hybrid_conversions import HYBRID_CONVERSIONS, convert_hybrid
from tokenloom.tests.support.recurrent_families import recurrent_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.models.test_decoder import prompts_of, run_schedule, schedule
from tokenloom.tests.workers.models.test_families import TOLERANCE, reference_logits
from tokenloom.tests.workers.models.test_hybrid_weights import load as quantized_load
from tokenloom.tests.workers.models.test_hybrids import SHORT, load
from tokenloom.tests.workers.models.test_integer_products import needs_products
from tokenloom.tests.workers.paged_run import PagedRun
from tokenloom.tests.workers.threaded_group import run_ranks
from tokenloom.workers.machine.parallel import ParallelGroup

LENGTHS = {"a": 97, "b": 1, "c": 33}
VISIBLE = 1e-4  # of the largest logit
MOST_OF_CODES = 3.5  # times the error of bf16: 1.3 to 2.8 in all cases
NO_LIMITS = {"time_step_limit": [0.0, float("inf")]}  # of Mamba2's steps, of which files say nothing
UNGATED = {"mamba_norm_before_gate": False}
NEMOTRON = {"time_step_min": 1e-9, "layer_norm_epsilon": 0.02}
DENSE_TOO = {"layers_block_type": ["mamba", "moe", "mlp", "attention", "moe"]}
DEFAULT_EXPERTS = {  # which transformers 5 writes for a model without experts
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
UNEQUAL = {"linear_num_value_heads": 8, "linear_value_head_dim": 32}
CASES: dict[
    str, tuple[str, dict[str, Any], dict[str, Any]]
] = {  # architecture: family, its fields, and the file's form
    "falcon-h1": ("falcon_h1", UNGATED, {}),
    "falcon-h1, scales and norms": ("falcon_h1_scaled", UNGATED, {}),
    "granitehybrid": ("granite4", NO_LIMITS, {}),
    "granitehybrid, no experts": ("granite4_dense", {**NO_LIMITS, "position_embedding_type": None}, {}),
    "granitehybrid, Bamba": ("bamba", {}, {}),
    "lfm2": ("lfm2", {"norm_eps": 0.02}, {}),
    "lfm2moe": ("lfm2_moe", {}, {}),
    "nemotron_h": ("nemotron_h", NEMOTRON, {}),
    "nemotron_h_moe": ("nemotron_h_moe", NEMOTRON, {}),
    "nemotron_h_moe, dense and further layers": ("nemotron_h_moe", {**NEMOTRON, **DENSE_TOO}, {"num_further": 1}),
    "nemotron_h_moe, dense alone": ("nemotron_h", NEMOTRON, DEFAULT_EXPERTS),
    "qwen3next": ("qwen3_next", UNEQUAL, {}),
    "qwen3next, a file of the first form": ("qwen3_next", {}, {"is_legacy": True}),
    "qwen35": ("qwen3_5", UNEQUAL, {}),
    "qwen35, further tokens, no list of layers": ("qwen3_5", {}, {"num_further": 1, "has_no_list": True}),
    "qwen35moe": ("qwen3_5_moe", {}, {}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(linked_cache(tmp_path / "cache")))


class File:
    """A GGUF file made of a checkpoint of a case, prompts and the logits of transformers."""

    def __init__(self, folder: Path, case: str, lengths: dict[str, int] = LENGTHS, form: str = "F32") -> None:
        family, fields, more = CASES[case]
        self.path, self.lengths = folder / "model.gguf", lengths
        checkpoint = recurrent_checkpoint(folder / "model", family, seed=1, **fields)
        convert_hybrid(checkpoint, self.path, form, **more)
        self.tokens = prompts_of(lengths, 256, seed=2)
        self.expected = reference_logits(checkpoint, self.tokens)

    def config(self, path: Path | None = None) -> tuple[Path, ModelConfig]:
        made = checkpoint_folder(path or self.path)
        return made, with_floats(served_model(EngineConfig(), made))

    def error(self, path: Path | None = None) -> float:
        """Return the largest difference of the file's logits, in parts of the request's largest logit."""
        run = PagedRun(load(*self.config(path)), 8)
        return self.error_of(run_schedule(run, self.tokens, schedule(self.lengths, seed=3)))

    def error_of(self, actual: dict[str, Tensor]) -> float:
        """Return the same for logits of the last tokens of requests."""
        errors = [
            (logits - self.expected[name][-len(logits) :]).abs().max() / self.expected[name].abs().max()
            for name, logits in actual.items()
        ]
        return torch.stack(errors).nan_to_num(9.0).max().item()


def test_all_conversions_are_tested() -> None:
    assert {case.partition(",")[0] for case in CASES} == set(HYBRID_ARCHITECTURES)
    assert {each.architecture for each in HYBRID_CONVERSIONS.values()} == set(HYBRID_ARCHITECTURES)
    assert OTHER_KEYS.keys() == set(HYBRID_ARCHITECTURES)


@pytest.mark.parametrize("case", some(list(CASES), 4))
def test_logits_are_those_of_the_original(case: str, tmp_path: Path) -> None:
    assert File(tmp_path, case).error() < TOLERANCE


@pytest.mark.parametrize("case", ["qwen35", "qwen3next"])
def test_ranks_together_have_the_logits_of_one(case: str, tmp_path: Path) -> None:
    """Qwen3.5's value heads of one rank read all key heads."""
    file = File(tmp_path, case, {"a": 21, "b": 2})
    made, config = file.config()

    def run(group: ParallelGroup) -> dict[str, Tensor]:
        paged = PagedRun(load(made, config, group), 8)
        paged.step({name: ids[:-1] for name, ids in file.tokens.items()})
        return paged.step({name: ids[-1:] for name, ids in file.tokens.items()})

    assert file.error_of(run_ranks(2, run)[0]) < TOLERANCE


@needs_products
@pytest.mark.parametrize("case", some(list(CASES), 2))
@pytest.mark.parametrize(("form", "share"), [("Q8_0", 0.9), ("Q4_0", 0.8)])
def test_codes_stay_codes(form: str, share: float, case: str, tmp_path: Path) -> None:
    """Matrices of mixers are kept as the file has them; beside the same file with its codes as floats. Integer products
    round their inputs to 8 bits, which costs a little more than bf16 does."""
    made, config = File(tmp_path, case, SHORT, form).config()
    tokens = {name: list(range(7, 7 + count)) for name, count in SHORT.items()}
    exact = run_schedule(PagedRun(load(made, config), 8), tokens, [SHORT])
    sizes, errors = [], []
    for served, isa in ((config, "avx2"), (served_model(EngineConfig(), made), "auto")):  # AMX's floats are codes, too
        model = quantized_load(made, served, isa)
        found = run_schedule(PagedRun(model, 8, dtype=torch.bfloat16), tokens, [SHORT])
        sizes.append(model.weight_bytes)
        errors.append(relative_error(found, exact))
    of_floats, of_codes = errors
    assert of_floats < of_codes < MOST_OF_CODES * of_floats
    assert sizes[1] < share * sizes[0]


def relative_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the error of a token's logits, relative to their spread: that of the token at a tenth of all, in ascending
    order. Others go to another expert if two have nearly the same score."""
    errors = [(found[name] - exact[name]).std(dim=-1) / exact[name].std(dim=-1) for name in exact]
    return float(torch.cat(errors).quantile(0.1))


OTHER_KEYS: dict[str, dict[str, Any]] = {  # of each architecture: another value of each of its keys that acts
    "falcon-h1": {"rope.freq_base": 100.0, "attention.head_count_kv": 1, "attention.key_length": 32},
    "granitehybrid": {
        "attention.head_count_kv": [2, 0, 0],
        "attention.scale": 0.1,
        "embedding_scale": 1.0,
        "residual_scale": 1.0,
        "logit_scale": 1.0,
        "expert_used_count": 1,
        "expert_count": 3,
        "expert_shared_feed_forward_length": 16,
        "feed_forward_length": 32,
        "rope.scaling.finetuned": True,
    },
    "lfm2": {"attention.head_count_kv": [2, 0, 0], "shortconv.l_cache": 4, "feed_forward_length": 32},
    "lfm2moe": {
        "expert_used_count": 1,
        "expert_feed_forward_length": 16,
        "leading_dense_block_count": 2,
        "expert_weights_scale": 2.0,
    },
    "nemotron_h": {"attention.head_count_kv": [0, 0, 0, 2], "feed_forward_length": [48, 0, 0, 0]},
    "nemotron_h_moe": {
        "attention.head_count_kv": [0, 2, 0, 0],
        "expert_count": 4,
        "expert_feed_forward_length": 16,
        "expert_group_count": 2,
        "expert_group_used_count": 1,
        "expert_shared_feed_forward_length": 16,
        "expert_used_count": 1,
        "expert_weights_norm": False,
        "expert_weights_scale": 1.0,
        "moe_latent_size": 32,
        "nextn_predict_layers": 1,
    },
    "qwen3next": {"expert_shared_feed_forward_length": 16, "expert_used_count": 1},
    "qwen35": {
        "attention.recurrent_layers": [True, True, False, True],
        "rope.dimension_count": 8,
        "rope.freq_base": 100.0,
        "nextn_predict_layers": 1,
        "attention.key_length": 32,
    },
    "qwen35moe": {"expert_feed_forward_length": 16},
}
OF_SSM = {"conv_kernel": 3, "state_size": 24, "group_count": 4, "time_step_rank": 2, "inner_size": 32}


def other_keys(architecture: str) -> dict[str, Any]:
    own = OTHER_KEYS[architecture] | {"block_count": 1, "attention.layer_norm_rms_epsilon": 1.0}
    scan = {} if architecture.startswith("lfm2") else {f"ssm.{name}": value for name, value in OF_SSM.items()}
    return own | scan


def with_key(path: Path, copy: Path, key: str, value: Any) -> Path:
    """Write a copy of a GGUF file with another value of a key, or with the key."""
    stored = gguf.GGUFReader(path)
    architecture = stored.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(copy, architecture)
    fields = {name: each for name, each in stored.fields.items() if not name.startswith("GGUF.")}
    for name, each in fields.items():
        if name not in ("general.architecture", key):
            kind, *of = each.types
            writer.add_key_value(name, each.contents(), kind, of[0] if of else None)
    add: dict[type, Any] = {
        bool: writer.add_bool,
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    add[type(value)](key, value)
    for tensor in stored.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return copy


@pytest.mark.parametrize("architecture", some(list(OTHER_KEYS), 2))
def test_each_key_of_a_file_acts(architecture: str, tmp_path: Path) -> None:
    file = File(tmp_path, architecture, {"a": 21, "b": 2})
    unseen = []
    for number, (name, value) in enumerate(other_keys(architecture).items()):
        changed = with_key(file.path, tmp_path / f"{number}.gguf", f"{architecture}.{name}", value)
        try:
            is_seen = file.error(changed) > VISIBLE
        except (ConfigError, AssertionError, RuntimeError, ArithmeticError, LookupError):
            is_seen = True
        unseen += [] if is_seen else [name]
    assert unseen == []
    same = with_key(file.path, tmp_path / "same.gguf", "general.name", "the same")
    assert file.error(same) < TOLERANCE

"""The memory that a start asks for is what a worker holds, and a refusal names all parts and the options that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tokenloom.frontend.checkpoint import memory_check
from tokenloom.frontend.checkpoint.gguf.folder import checkpoint_folder
from tokenloom.frontend.checkpoint.memory_check import ENGINE_BYTES, NUM_TOKENS, check_memory, need_of
from tokenloom.frontend.checkpoint.resolve import as_served
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.process.machine_memory import gib
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.served_model import served_model
from tokenloom.ipc.spec.config.weight_files import StoredTensor, stored_tensors
from tokenloom.kernels.cpu.processor import instruction_levels
from tokenloom.kernels.select import select_ops
from tokenloom.scripts.bench.inputs.write_gguf import convert
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.model_loader import load_model

SHAPE = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "dtype": "bfloat16",
}
CPU = torch.device("cpu")
GIB = 1 << 30

pytestmark = pytest.mark.skipif(not instruction_levels(), reason="the processor has no AVX2")


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A checkpoint of safetensors, or of a GGUF file in a form, with or without a head of its own."""
    form, is_tied = request.param
    made = tiny_checkpoint(tmp_path / "m", "llama", tie_word_embeddings=is_tied, **SHAPE)
    if not form:
        return made
    convert(made, tmp_path / "m.gguf", form)
    return checkpoint_folder(tmp_path / "m.gguf", tmp_path / "linked")


def config_of(**options: Any) -> EngineConfig:
    return EngineConfig(**({"device": "cpu"} | options))


def held_bytes(folder: Path, config: EngineConfig) -> int:
    served = as_served(config, served_model(config, folder))
    dtype = getattr(torch, served.dtype)
    ops = select_ops(CPU, dtype, has_integer_products=served.has_integer_products)
    return load_model(folder, served.model, 64, dtype, CPU, ops, ParallelGroup()).weight_bytes


@pytest.mark.parametrize("folder", [(form, tied) for form in ("Q4_1", "") for tied in (True, False)], indirect=True)
def test_the_estimate_is_what_a_worker_holds(folder: Path) -> None:
    """But for norms, tables of positions and the padding of small matrices."""
    for options in (
        {},
        {"quantized_products": "floats"},
        {"dtype": "float32"},
        {"quantization": "int4"},
        {"quantization": "int8", "quantized_products": "floats"},
    ):
        config = config_of(**options)
        need = need_of(stored_tensors(folder), as_served(config, served_model(config, folder)), config, 1)
        assert need.weights == pytest.approx(held_bytes(folder, config), rel=0.03), options


@pytest.mark.parametrize("folder", [("Q4_1", True)], indirect=True, ids=str)
def test_the_need_counts_what_options_say_of_the_kv_cache(folder: Path) -> None:
    def need(num_local: int = 1, **options: Any) -> memory_check.Need:
        config = config_of(**options)
        return need_of(stored_tensors(folder), as_served(config, served_model(config, folder)), config, num_local)

    token = 2 * 2 * 8 * 32 * 2  # layers, keys and values, heads, their elements, bytes
    assert need().kv_cache == token * NUM_TOKENS and need().what == "2048 tokens"
    assert need(max_model_len=64).kv_cache == 64 * token == need(max_model_len=64, num_kv_blocks=None).kv_cache
    assert need(num_kv_blocks=10, block_size=32).kv_cache == 320 * token
    assert need(num_kv_blocks=10, block_size=32, kv_cache_dtype="fp8").kv_cache == 320 * 2 * 2 * 8 * (32 + 4)
    assert need(kv_cache_memory_bytes=1 << 20).kv_cache == 1 << 20
    assert need(2, kv_cache_memory_bytes=1 << 20).kv_cache == 2 << 20
    assert need(2, data_parallel_size=2).weights == 2 * need().weights
    assert need(2, tensor_parallel_size=2).weights == need().weights
    assert need().num_bytes == need().weights + need().kv_cache + ENGINE_BYTES


class Huge:
    """A folder of a small model, of which the headers say that it is large."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, free_gib: float) -> None:
        self.folder = folder

        def larger(folder: Path) -> dict[str, StoredTensor]:
            return {name: StoredTensor(t.dtype, t.num_elements << 14, t.num_bytes << 14) for name, t in stored.items()}

        stored = stored_tensors(folder)
        monkeypatch.setattr(memory_check, "stored_tensors", larger)
        monkeypatch.setattr(memory_check, "available_bytes", lambda: int(free_gib * GIB))
        monkeypatch.setattr(memory_check, "swap_bytes", lambda: 0)

    def refusal(self, **options: Any) -> str:
        def serve(config: EngineConfig) -> memory_check.Served:
            return as_served(config, served_model(config, self.folder))

        with pytest.raises(ConfigError) as caught:
            check_memory(self.folder, config_of(**options), serve, 1, "my model")
        return str(caught.value)


@pytest.mark.parametrize("folder", [("Q4_1", True)], indirect=True, ids=str)
def test_a_refusal_says_what_integers_would_take(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has 1.3 M weights in Q4_1, 0.26 M of them in the embedding, as Q8_0; 16384 times of them."""
    message = Huge(folder, monkeypatch, 20.0).refusal(quantized_products="floats", cpu_isa="avx2")
    matrices, norms, kv_cache = 2 * (4 * 256**2 + 3 * 256 * 512), 5 * 256, 4 << 20
    weights = 2 * ((1 << 18) + matrices + norms) << 14
    assert message.startswith(f"my model needs {gib(weights + kv_cache + ENGINE_BYTES)} of memory (weights ")
    assert (
        f"KV cache of 2048 tokens {gib(kv_cache)}, engine {gib(ENGINE_BYTES)}), {gib(20 * GIB)} can be had" in message
    )
    taken = 16384 * ((1 << 18) * 8.5 / 8 + matrices * 5 / 8 + 2 * norms)
    assert f"here: leaving out --quantized-products floats takes {gib(int(taken) + kv_cache + ENGINE_BYTES)}" in message
    assert message.endswith(", or free memory or raise the limit of its cgroup")


@pytest.mark.parametrize("folder", [("", True)], indirect=True, ids=str)
def test_a_refusal_names_only_options_that_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert " can be had here: --quantization int4 takes " in Huge(folder, monkeypatch, 17.0).refusal()
    both = Huge(folder, monkeypatch, 25.0).refusal()
    assert "--quantization int8 takes" in both and " or --quantization int4 takes" in both
    assert "here: choose a smaller model, or free" in Huge(folder, monkeypatch, 5.0).refusal()
    assert "here: choose a smaller model, or free" in Huge(folder, monkeypatch, 20.0).refusal(quantization="int8")
    long = Huge(folder, monkeypatch, 50.0).refusal(kv_cache_memory_bytes=10 * GIB)
    assert "a smaller KV cache takes" in long and "KV cache of --kv-cache-memory-bytes 10.00 GiB" in long

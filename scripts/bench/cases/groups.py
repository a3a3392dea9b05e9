"""Measure the memory of KV groups: the core's real scheduler, block tables and slabs, without weights and a worker
that answers at once.

    engine-launch bench groups

Shapes of real models, with keys and values in bfloat16 and blocks of 16 tokens. "bytes", for models with windows: one
request of 32k tokens, its blocks' bytes beside those of one group for all layers: the most while its prompt is computed
in chunks, and those while it decodes. "pool": requests of random lengths are added one by one, each once all others
decode, until one does not fit, or a running one gives way; the share of the pool's bytes in use then, its mean and
least over the draws, beside a fixed division of the pool between the groups, for rows of 8k tokens, over the same
requests.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenloom.core.engine import EngineCore
from tokenloom.core.features.grammar.local_helper import LocalGrammarHelper
from tokenloom.core.features.new import Surroundings
from tokenloom.core.request import State
from tokenloom.frontend.checkpoint.weight_memory import state_bytes
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.core import CoreChild, EngineCoreRequest
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.ipc.spec.kv.kv_groups import KVGroup, kv_groups
from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.scripts.bench.engine_steps import Executor, new_spec
from tokenloom.scripts.bench.null_worker import NullWorker
from tokenloom.scripts.bench.report import Report
from tokenloom.scripts.bench.runner import Case, Setup

BLOCK_SIZE, ELEMENT_BYTES = 16, 2
LENGTH = 32768  # tokens of the longest request
DECODED = 64  # tokens of its answer, half of which are decoded
SPLIT_LENGTH = 8192  # tokens of the rows that the fixed division is made for


class Meta(NamedTuple):
    """A model's config.json, without its weights, and the bytes of the pool."""

    config: dict[str, Any]
    pool_bytes: int


def _text(architecture: str, **fields: object) -> dict[str, Any]:
    return {"architectures": [architecture], "vocab_size": 1024, "max_position_embeddings": 131072, **fields}


SHAPES = {
    "Gemma-3-27B": Meta(
        _text(
            "Gemma3ForCausalLM",
            num_hidden_layers=62,
            hidden_size=5376,
            intermediate_size=21504,
            num_attention_heads=32,
            num_key_value_heads=16,
            head_dim=128,
            sliding_window=1024,
            layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(62)],
            query_pre_attn_scalar=168,
        ),
        18 << 30,
    ),
    "gpt-oss-20b": Meta(
        _text(
            "GptOssForCausalLM",
            num_hidden_layers=24,
            hidden_size=2880,
            intermediate_size=2880,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            sliding_window=128,
            layer_types=["full_attention" if layer % 2 else "sliding_attention" for layer in range(24)],
            num_local_experts=32,
            num_experts_per_tok=4,
            swiglu_limit=7.0,
        ),
        6 << 30,
    ),
    "Qwen3-Next-80B-A3B": Meta(
        _text(
            "Qwen3NextForCausalLM",
            num_hidden_layers=48,
            hidden_size=2048,
            intermediate_size=5120,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=256,
            layer_types=["linear_attention" if layer % 4 < 3 else "full_attention" for layer in range(48)],
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
            num_experts=512,
            num_experts_per_tok=10,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        ),
        20 << 30,
    ),
}
MIXES = {  # the fewest and the most tokens of a prompt, by mix; a request is of each range with equal chance
    "short": [(100, 2000)],
    "long": [(16384, 31000)],
    "mixed": [(100, 2000), (16384, 31000)],
}


def block_bytes(model: ModelConfig, group: KVGroup) -> int:
    if group.is_state and model.state is not None:
        return len(group.layers) * state_bytes(model.state, ELEMENT_BYTES)
    return len(group.layers) * 2 * group.num_kv_heads * group.head_dim * BLOCK_SIZE * ELEMENT_BYTES


class Core:
    """A core with a pool. Its requests get a token in each step."""

    def __init__(self, spec: EngineSpec, pool: PoolShape) -> None:
        self.executor, self.worker, self.num_added = Executor(), NullWorker(spec), 0
        self.engine = EngineCore(spec, pool, self.executor, Surroundings(LocalGrammarHelper(spec)))
        self._pools = self.engine.scheduler.kv_cache.pools
        self._sizes = pool.block_bytes

    def add(self, num_tokens: int) -> None:
        """Add a request with a prompt of so many random tokens, and an answer that does not end."""
        draw, key = random.Random(self.num_added), self.num_added
        self.engine.add_request(
            0,
            EngineCoreRequest(
                children=[CoreChild(key=key, seed=key)],
                prompt_token_ids=encode_ids([draw.randrange(1024) for _ in range(num_tokens)]),
                params=SamplingParams(max_tokens=LENGTH - num_tokens, ignore_eos=True),
                max_tokens=LENGTH - num_tokens,
                stop_token_ids=[],
                arrival_time=time.time(),
            ),
        )
        self.num_added += 1

    def step(self) -> None:
        before = self.executor.step
        self.engine.step()
        step = self.executor.step
        assert step is not None and step is not before, "rows are left"
        self.engine.on_result(self.worker.execute(step))
        self.engine.take_outputs()

    @property
    def is_refused(self) -> bool:
        """Whether a request waits: the newest, or one that was preempted for it."""
        return any(request.state is State.WAITING for request in self.engine.open_requests)

    @property
    def is_prompted(self) -> bool:
        """Whether all requests have computed their prompts."""
        rows = self.engine.scheduler.rows
        return all(
            request.state is State.RUNNING and rows.first_token(request.row) >= request.num_prompt_tokens
            for request in self.engine.open_requests
        )

    @property
    def used_bytes(self) -> int:
        """The bytes of blocks that requests hold."""
        return sum(pool.num_used * size for pool, size in zip(self._pools, self._sizes, strict=True))


def spec_of(shape: Meta, folder: Path, chunk: int, num_rows: int) -> EngineSpec:
    """Return the specification of an engine for the shape, which is never started."""
    (folder / "config.json").write_text(json.dumps(shape.config), encoding="utf-8")
    config = EngineConfig(
        model="demo",
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=chunk,
        long_prefill_token_threshold=0,
        max_num_seqs=num_rows,
        steps_in_flight=1,
    )
    return msgspec.structs.replace(new_spec(config), model=load_model_config(folder), max_model_len=LENGTH)


def measure_bytes(name: str, spec: EngineSpec, report: Report) -> None:
    (all_layers,) = kv_groups(spec.model, LENGTH, is_grouped=False)
    whole = LENGTH // BLOCK_SIZE * block_bytes(spec.model, all_layers)
    core = Core(spec, PoolShape.of(2 * whole, [block_bytes(spec.model, group) for group in spec.kv_groups]))
    core.add(LENGTH - DECODED)
    peak = 0
    while not core.is_prompted:
        core.step()
        peak = max(peak, core.used_bytes)
    for _ in range(DECODED // 2):
        core.step()
    chunk = spec.max_num_batched_tokens
    report.add(what="bytes", shape=name, chunk=chunk, peak=peak / whole, decoding=core.used_bytes / whole)


def lengths(mix: str, seed: int) -> Iterator[int]:
    draw = random.Random(seed)
    while True:
        yield draw.randint(*draw.choice(MIXES[mix]))


def used_when_full(spec: EngineSpec, pool: PoolShape, mix: str, seed: int) -> float:
    """Return the share of the pool's bytes in use before the step for which a request does not fit: a new one, or one
    that runs and gives way to others."""
    core = Core(spec, pool)
    for length in lengths(mix, seed):
        core.add(length)
        while not core.is_prompted:
            used = core.used_bytes
            core.step()
            if core.is_refused:
                return used / pool.num_bytes
    raise AssertionError("lengths do not end")


def used_by_split(spec: EngineSpec, pool: PoolShape, mix: str, seed: int) -> float:
    """Return the same of a fixed division among the groups."""
    of_row = spec.num_held(SPLIT_LENGTH)
    unit = sum(count * size for count, size in zip(of_row, pool.block_bytes, strict=True))
    room = [count * pool.num_bytes // unit for count in of_row]
    used = [0] * len(room)
    for length in lengths(mix, seed):
        held = spec.num_held(length)
        if any(one + more > most for one, more, most in zip(used, held, room, strict=True)):
            break
        num_blocks = -(-length // BLOCK_SIZE)
        kept = [group.num_needed(num_blocks, BLOCK_SIZE) + (not group.is_full) for group in spec.kv_groups]
        used = [one + min(more, num_blocks) for one, more in zip(used, kept, strict=True)]
    return sum(count * size for count, size in zip(used, pool.block_bytes, strict=True)) / pool.num_bytes


def measure(setup: Setup) -> None:
    asked, report = setup.arguments, setup.report
    folder = Path(setup.stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenloom-groups-")))
    for name, shape in SHAPES.items():
        spec = spec_of(shape, folder, asked.chunks[0], 1024)
        if any(group.window is not None for group in spec.kv_groups):
            for chunk in asked.chunks:
                measure_bytes(name, spec_of(shape, folder, chunk, 1), report)
        pool = PoolShape.of(shape.pool_bytes, [block_bytes(spec.model, group) for group in spec.kv_groups])
        for mix in MIXES:
            shares = [used_when_full(spec, pool, mix, seed) for seed in range(asked.draws)]
            split = [used_by_split(spec, pool, mix, seed) for seed in range(asked.draws)]
            report.add(what="pool", shape=name, mix=mix, in_use=mean(shares), least=min(shares), split=mean(split))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


OPTIONS = {
    "--chunks": ([1024, 2048], "tokens of a step"),
    "--draws": (10, "of the requests of a mix"),
}
CASE = Case("KV groups", measure, OPTIONS, model="", rounds=0)

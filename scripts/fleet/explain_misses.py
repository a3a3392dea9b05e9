"""Replay a trace through the core's scheduler and pool, without a model, and check why prompts miss the prefix cache.

    python scripts/fleet/explain_misses.py TRACE [--requests N] [--blocks N] [--open N]

TRACE: as in traces.py; each of its hash_ids becomes one block. The oracle knows no keys and no pool: it compares the
prompt of each request, as it is admitted, with those of all requests admitted before. Each block that one of them had,
and that was not found, has to be reported: as evicted if that request had computed it by then, else as concurrent; and
no other block may be reported. Exit code 1 if a report differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenloom.core.engine import EngineCore
from tokenloom.core.features.grammar.local_helper import LocalGrammarHelper
from tokenloom.core.features.new import Surroundings
from tokenloom.core.request import Request
from tokenloom.core.scheduling.step_feature import StepFeature
from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.base import MissReason
from tokenloom.ipc.messages.core import CoreChild, EngineCoreRequest
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.scripts.bench.engine_steps import Executor, new_spec
from tokenloom.scripts.bench.null_worker import NullWorker

BLOCK_SIZE = 4
MAX_TOKENS = 3


class Oracle(StepFeature):
    """Finder of the blocks of each prompt that an earlier prompt has had, and that were not found. The blocks of all
    prompts are nodes of a tree: two prompts share a node as far as they are equal."""

    def __init__(self, core: EngineCore) -> None:
        self._rows = core.scheduler.rows
        self._child: dict[tuple[int, bytes], int] = {}  # by node and the tokens of the block after it
        self._newest: dict[int, tuple[Request, int]] = {}  # by node: the last request that computes it, its index
        self.expected: dict[int, Counter[MissReason]] = {}  # by the request's key
        self.num_cached_tokens = self.num_preempted = 0

    def admit(self, request: Request, num_computed: int) -> None:
        self.num_preempted += request.num_preemptions
        expected, node = Counter[MissReason](), 0
        is_known = True
        for index in range((request.num_prompt_tokens - 1) // BLOCK_SIZE):
            tokens = request.tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE].tobytes()
            is_known = is_known and (node, tokens) in self._child
            node = self._child.setdefault((node, tokens), len(self._child) + 1)
            if index >= num_computed // BLOCK_SIZE:
                is_concurrent = is_known and not self._is_computed(*self._newest[node])
                if is_known:
                    expected["concurrent" if is_concurrent else "evicted"] += BLOCK_SIZE
                if not is_concurrent:
                    self._newest[node] = request, index
        self.expected[request.key] = expected
        self.num_cached_tokens += num_computed

    def _is_computed(self, request: Request, index: int) -> bool:
        return request.row < 0 or int(self._rows.num_scheduled[request.row]) >= (index + 1) * BLOCK_SIZE


class Replayed(NamedTuple):
    """Result of a replay. wrong: reports that differ from the oracle."""

    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_missed: Counter[MissReason]
    wrong: list[str]
    core_s: float


class ModellessCore:
    """A core with a worker that computes nothing. `missed` and `cached` are by the request's key."""

    def __init__(self, num_blocks: int, num_open: int) -> None:
        config = EngineConfig(
            model=str(DEMO_FOLDER), block_size=BLOCK_SIZE, max_num_seqs=num_open, speculation="off", steps_in_flight=1
        )
        config = msgspec.structs.replace(config, max_num_batched_tokens=256, long_prefill_token_threshold=64)
        self._spec = msgspec.structs.replace(new_spec(config), max_model_len=8192)
        self._worker, self._executor = NullWorker(self._spec), Executor()
        pool, around = PoolShape(num_blocks, 1, (1,)), Surroundings(LocalGrammarHelper(self._spec))
        self.core = EngineCore(self._spec, pool, self._executor, around)
        self.missed: dict[int, dict[MissReason, int]] = {}
        self.cached: dict[int, int] = {}

    def add(self, key: int, prompt: Sequence[int]) -> None:
        self.core.add_request(0, _request(key, prompt))

    def turn(self) -> list[int]:
        """Compute a step; return the keys of the requests that have ended."""
        self.core.step()
        assert self._executor.step is not None
        self.core.on_result(self._worker.execute(self._executor.step))
        ended = []
        for _, outputs in self.core.take_outputs():
            self.missed |= {each.key: each.misses.num_tokens for each in outputs.missed}
            self.cached |= {each.key: each.num_cached_tokens for each in outputs.started}
            assert all(finished.reason == "length" for finished in outputs.finished)
            ended += [finished.key for finished in outputs.finished]
        return ended

    def run(self) -> None:
        while self.core.num_requests:
            self.turn()

    def lose_workers(self) -> None:
        self.core.lose_workers("a test")
        self._worker = NullWorker(self._spec)
        self.core.gain_workers(self._executor, 1)


def replay(prompts: Sequence[Sequence[int]], num_blocks: int, num_open: int) -> Replayed:
    """Run requests with these prompts in order, `num_open` at once, in a pool of `num_blocks` blocks."""
    modelless = ModellessCore(num_blocks, num_open)
    core = modelless.core
    oracle = Oracle(core)
    core.scheduler.features.use([*core.scheduler.features.in_order, oracle])
    waiting, missed, wrong = deque(enumerate(prompts)), Counter[MissReason](), list[str]()
    begun_at = time.perf_counter()
    while waiting or core.num_requests:
        while waiting and core.num_requests < num_open:
            modelless.add(*waiting.popleft())
        for key in modelless.turn():
            found, expected = modelless.missed.pop(key, {}), oracle.expected.pop(key)
            missed.update(found)
            if found != expected:
                wrong.append(f"request {key}: {found}, the oracle has {dict(expected)}")
    assert not oracle.num_preempted, "more blocks are needed for so many open requests"
    num_tokens = sum(map(len, prompts))
    core_s = time.perf_counter() - begun_at
    return Replayed(len(prompts), num_tokens, oracle.num_cached_tokens, missed, wrong, core_s)


def _request(key: int, prompt: Sequence[int]) -> EngineCoreRequest:
    return EngineCoreRequest(
        children=[CoreChild(key=key, seed=key)],
        prompt_token_ids=encode_ids(prompt),
        params=SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
        max_tokens=MAX_TOKENS,
        stop_token_ids=[],
        arrival_time=float(key),
    )


def prompt_of(hash_ids: Iterable[int]) -> list[int]:
    """Return a prompt with one block for each id, and a token after them."""
    return [*(number >> 7 * place & 127 for number in hash_ids for place in range(BLOCK_SIZE)), 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, help="the first N of the trace; otherwise all")
    parser.add_argument("--blocks", type=int, default=20_000, help="of the pool")
    parser.add_argument("--open", type=int, default=16, help="requests that run at once")
    arguments = parser.parse_args()
    with arguments.trace.open(encoding="utf-8") as lines:
        prompts = [prompt_of(json.loads(line)["hash_ids"]) for line in lines][: arguments.requests]
    done = replay(prompts, arguments.blocks, arguments.open)
    share = 100 / done.num_prompt_tokens
    print(f"{done.num_requests} requests, {done.num_prompt_tokens} prompt tokens, {done.core_s:.1f} s in the core")
    print(f"{'found':18} {done.num_cached_tokens * share:6.2f} %")
    for reason, count in done.num_missed.most_common():
        print(f"{reason:18} {count * share:6.2f} %")
    num_new = done.num_prompt_tokens - done.num_cached_tokens - done.num_missed.total()
    print(f"{'new':18} {num_new * share:6.2f} %")
    print(f"reports that differ from the oracle: {len(done.wrong)}", *done.wrong[:5], sep="\n")
    return int(bool(done.wrong))


if __name__ == "__main__":
    sys.exit(main())

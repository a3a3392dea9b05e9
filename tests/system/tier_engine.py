"""Engines with KV tiers for tests, the files of their disks, and the comparison of answers.

A request loads blocks only if that is faster than computing them, and a test's model computes faster than most disks
answer. So `TierEngine.teach` lets one step of a prompt last long; later requests then load everything that is found.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tokenloom import Client, RequestOutput, SamplingParams
from tokenloom.core.kv.block_hash import KEY_BYTES
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.waiting import wait_until

DEADLINE_S = 60.0
BLOCK_SIZE = 16
CHUNK = 128  # tokens of a lesson: it fits in one step of each engine here
VOCAB_SIZE = 512
SLOT_KEYS_START = 8 + KEY_BYTES  # of a BlockRecord, behind generation and namespace
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
OPTIONS = (
    *("--device", "cpu", "--num-threads", "1", "--dtype", "float32", "--max-model-len", "1024"),
    *("--step-timeout-s", "60"),
)
SMALL_POOL = ("--num-kv-blocks", "65")  # a pool for two prompts of 500 tokens, so that others go to slots
OVER_HOSTS = (
    *("--tp", "2", "--hosts", "2", "--max-model-len", "1000", "--dtype", "float32", "--step-timeout-s", "60"),
    *SMALL_POOL,
)
EQUAL_OVER_HOSTS = 1e-4  # of logprobs: two ranks add up in another order than one


class TierEngine(Engine):
    """An engine in a run folder of its own. `kv` is the folder of its disk; None: it has none."""

    def __init__(self, root: Path, kv: Path | None, *options: str) -> None:
        self.kv = kv
        runtime = root / f"run{len(list(root.glob('run*')))}"
        runtime.mkdir(parents=True)
        disk = [] if kv is None else ["--kv-disk", str(kv)]
        super().__init__(runtime, [*OPTIONS, "--num-kv-blocks", "600", *disk, *options])
        self._rng = random.Random(str(runtime))

    def wait_open(self, count: int = 1) -> None:
        """Wait until the tiers have been opened `count` times, so that blocks have the names of the weights."""
        self.wait_ready() if not self.address else None
        self.wait_log("blocks of this model", count)

    def teach(self, client: Client, seconds: float = 2.0) -> None:
        """Let a step of CHUNK prompt tokens last `seconds`, so that the engine prefers loads to computing."""
        (self.faults / "worker.forward.0").write_text(f"delay {seconds:g}")
        prompt = [self._rng.randrange(VOCAB_SIZE) for _ in range(CHUNK)]
        (output,) = client.generate([prompt], GREEDY.replace(max_tokens=1, cache_salt="lesson"), use_tqdm=False)
        assert output.num_cached_tokens == 0

    def wait_written(self, num_blocks: int) -> None:
        """Wait until the disk holds this many blocks."""
        assert self.kv is not None
        wait_written([self.kv], num_blocks)

    def slot_keys(self) -> set[bytes]:
        """Return the keys of the blocks in slots, where a core in the place of a lost one finds them."""
        (record,) = self.runtime.rglob("slots")
        keys = record.read_bytes()[SLOT_KEYS_START:]
        return {keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)} - {bytes(KEY_BYTES)}

    def wait_slots_released(self, others: set[bytes]) -> None:
        """Wait until slots hold no block but `others`: without a host tier the core forgets a block in a slot once it
        knows that the disk has it."""
        wait_until(lambda: self.slot_keys() <= others, lambda: f"slots still hold blocks:\n{self.log()}", DEADLINE_S)

    def kill_all(self) -> None:
        """Kill all processes of the engine at once."""
        processes = self.processes()
        for process in processes:
            process.kill()
        self.process.wait()
        psutil.wait_procs(processes, timeout=DEADLINE_S)


@contextmanager
def opened(root: Path, kv: Path | None, *options: str) -> Iterator[tuple[TierEngine, Client]]:
    """Start an engine, yield it with a client once its tiers are open, and stop it."""
    with TierEngine(root, kv, *options) as engine:
        engine.wait_ready() if kv is None else engine.wait_open()
        with Client(engine.address) as client:
            yield engine, client
        engine.end()


def calm_answers(root: Path, prompts: Sequence[list[int]]) -> list[RequestOutput]:
    """Return the answers of one process without tiers."""
    with opened(root, None, *SMALL_POOL) as (_, client):
        return ask(client, prompts)


def wait_parts(disks: Sequence[Path], prompts: Sequence[list[int]]) -> None:
    """Wait until the disk of each host has its part of all blocks of the prompts."""
    wait_written(disks, sum(map(num_readable, prompts)) // BLOCK_SIZE)


def wait_written(disks: Sequence[Path], num_blocks: int) -> None:
    """Wait until each disk has so many blocks."""

    def counts() -> list[int]:
        return [len(objects(disk)) for disk in disks]

    wait_until(lambda: min(counts()) >= num_blocks, lambda: f"{counts()} of {num_blocks} blocks", DEADLINE_S)


def objects(kv: Path) -> list[Path]:
    """Return the files of blocks in a disk's folder, in a fixed order."""
    return sorted(path for path in kv.glob("*/??/*") if path.parent.parent.name != "tmp")


def new_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for _ in range(count)]


def num_readable(prompt: Sequence[int]) -> int:
    """Return how many tokens of a prompt may come from a cache: whole blocks, but not the last token."""
    return (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def ask(client: Client, prompts: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    """Run the prompts one after the other."""
    return [client.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]


def load(client: Client, prompts: Sequence[list[int]]) -> list[RequestOutput]:
    """Fetch all blocks of the prompts from tiers, as soon as the core knows that these are open; then run them."""
    first = wait_until(lambda: client.prefetch_kv(prompts[0]), "no block is found", DEADLINE_S)
    fetched = [first, *(client.prefetch_kv(prompt) for prompt in prompts[1:])]
    assert fetched == [num_readable(prompt) for prompt in prompts]
    return ask(client, prompts)


def num_loaded(outputs: Sequence[RequestOutput], place: str) -> int:
    """Return how many tokens of prompts came from a place."""
    return sum(output.metrics.num_loaded_tokens.get(place, 0) for output in outputs)


def compute(
    engine: TierEngine, client: Client, prompts: Sequence[list[int]], params: SamplingParams = GREEDY
) -> list[RequestOutput]:
    """Run new prompts, which no cache knows, until the blocks of each are on the disk."""
    outputs = []
    assert engine.kv is not None
    for prompt in prompts:
        num_before = len(objects(engine.kv))
        (output,) = ask(client, [prompt], params)
        assert output.num_cached_tokens == 0 or params.n > 1, "this prompt is new"
        engine.wait_written(num_before + len(prompt) // BLOCK_SIZE)
        outputs.append(output)
    return outputs


def check_equal(calm: Sequence[RequestOutput], outputs: Sequence[RequestOutput], tolerance: float = 0.0) -> None:
    """Check that all tokens, and the logprobs up to `tolerance`, are those of engines with empty caches."""
    for one, other in zip(calm, outputs, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids and len(one.outputs) == len(other.outputs)
        for expected, found in zip(one.outputs, other.outputs, strict=True):
            assert expected.token_ids == found.token_ids
            assert expected.logprobs is not None and found.logprobs is not None
            for before, after in zip(expected.logprobs, found.logprobs, strict=True):
                assert before.keys() == after.keys()
                for token, logprob in before.items():
                    assert abs(logprob.logprob - after[token].logprob) <= tolerance

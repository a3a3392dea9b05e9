"""A worker process follows the core's stream, drops invalid messages, and exits with the right code."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.base import Hello, Holding, Rank
from tokenloom.ipc.messages.supervisor import Failed, Measured, Phase
from tokenloom.ipc.messages.workers import Probe, ProbeAck, Resend, RowSampling, WorkerError
from tokenloom.ipc.process.arena import PAGE, Arena, ArenaShape, new_arena
from tokenloom.kernels.cpu.processor import instruction_levels
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.workers.random_schedule import execute, frame, message, new_row
from tokenloom.tests.workers.worker_harness import GENERATION, GREEDY, NUM_SLOTS, PROMPT, WorkerHarness, make_spec
from tokenloom.workers.worker import Worker


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    return tiny_checkpoint(folder, hidden_size=128, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def running(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerHarness]:
    """One worker, in a thread, for all tests that do not end it."""
    harness = WorkerHarness(make_spec(checkpoint, tmp_path_factory.mktemp("run")), in_thread=True)
    try:
        harness.start()
        yield harness
    finally:
        harness.close()


@pytest.fixture(scope="module")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerHarness]:
    """Two ranks, in processes. The last test ends them."""
    harness = WorkerHarness(make_spec(checkpoint, tmp_path_factory.mktemp("pair"), tensor_parallel_size=2))
    try:
        harness.start()
        yield harness
    finally:
        harness.close()


@pytest.fixture
def core(running: WorkerHarness) -> WorkerHarness:
    """A new core: the worker has no rows and expects step 1."""
    running.new_core()
    return running


@pytest.fixture
def fresh(checkpoint: Path, tmp_path: Path) -> Iterator[WorkerHarness]:
    """A newly started worker, in a thread."""
    harness = WorkerHarness(make_spec(checkpoint, tmp_path), in_thread=True)
    yield harness
    harness.close()


def pool_of(worker: Worker) -> PoolShape:
    """The pool of a loaded worker."""
    measured = worker.measure()
    return PoolShape.of(measured.pool_bytes, measured.block_bytes)


def check_copies(core: WorkerHarness) -> None:
    """A block that is stored, overwritten and loaded elsewhere gives the tokens that its prompt gave."""
    expected = core.generate(PROMPT, 3, GREEDY)  # begins in block 1
    stored = msgspec.structs.replace(core.next_step([], []), stores=frame(1, NUM_SLOTS))
    assert core.execute(stored) == []
    core.generate(PROMPT[::-1], 1, GREEDY)
    size = core.spec.config.block_size
    found = core.next_step([0], [len(PROMPT) - size], [new_row(0, PROMPT, size)], [0, 0, 5, 0, 0, 6])
    tokens = core.execute(msgspec.structs.replace(found, loads=frame(NUM_SLOTS, 5)))
    assert tokens + core.execute(core.next_step([0], [1])) + core.execute(core.next_step([0], [1])) == expected
    core.execute(core.next_step([], [], freed=[0]))


def test_a_worker_copies_again_after_its_cache_slept(checkpoint: Path, tmp_path: Path) -> None:
    worker, step = Worker(make_spec(checkpoint, tmp_path), rank=0, generation=0), message()
    assert len(list(worker.load())) == 1
    pool = pool_of(worker)
    shape, fd = ArenaShape(NUM_SLOTS, (1,), (pool.slab_bytes,)), new_arena()
    Arena.resize(fd, shape)
    arena = Arena(fd, shape)
    arena.slot(1)[:] = bytes([7]) * pool.slab_bytes
    worker.initialize(pool, arena)
    worker.hold(Holding(asleep=["kv_cache"]))
    assert worker.runner is None
    worker.hold(Holding())
    assert worker.runner is not None
    execute(worker.runner, msgspec.structs.replace(step, loads=frame(1, 9)))
    execute(worker.runner, msgspec.structs.replace(step, stores=frame(9, 2)))
    assert bytes(arena.slot(2)) == bytes([7]) * pool.slab_bytes
    os.close(fd)


@pytest.mark.parametrize(
    ("options", "is_exact"),
    [
        ({}, bool(instruction_levels())),
        ({"enforce_reference": True}, False),
        ({"enforce_reference": True, "deterministic": True}, True),
    ],
)
def test_a_worker_knows_whether_drafts_change_rounding(
    options: dict[str, int], is_exact: bool, checkpoint: Path, tmp_path: Path
) -> None:
    worker = Worker(make_spec(checkpoint, tmp_path, **options), rank=0, generation=0)
    list(worker.load())
    assert worker.measure().has_exact_drafts == is_exact


def test_a_load_tells_how_many_tensors_are_read(checkpoint: Path, tmp_path: Path) -> None:
    worker, progress = Worker(make_spec(checkpoint, tmp_path), rank=0, generation=0), list[tuple[int, int]]()
    worker.on_progress = lambda *numbers: progress.append(numbers)
    assert [phase.name for phase in worker.load()] == ["load weights"]
    assert progress == [(num_read, len(progress)) for num_read in range(1, len(progress) + 1)]


@pytest.mark.parametrize("has_tiers", [False, True])
def test_memory_is_taken_ahead_for_all_blocks_that_a_tier_may_bring_a_request(
    has_tiers: bool, checkpoint: Path, tmp_path: Path
) -> None:
    spec = make_spec(checkpoint, tmp_path)
    worker = Worker(spec, rank=0, generation=0, ahead_bytes=PAGE)
    list(worker.load())
    pool, fd = pool_of(worker), new_arena()
    shape = ArenaShape(NUM_SLOTS, (1,), (pool.slab_bytes,))
    Arena.resize(fd, shape)
    worker.initialize(pool, Arena(fd, shape) if has_tiers else None)
    request_bytes = spec.max_blocks_per_row * pool.slab_bytes
    assert request_bytes > PAGE and worker.page_supply is not None and worker._pool_pages is not None
    wanted = pool.slab_bytes + (request_bytes if has_tiers else PAGE)  # the null block, and those ahead
    assert worker._pool_pages.num_missing == -(-wanted // PAGE) * PAGE
    while not worker.page_supply.is_done:
        worker.page_supply.take_piece()
    assert bool(os.fstat(fd).st_blocks) == has_tiers, "the arena's pages, too"
    os.close(fd)


class IdleWorker:
    """Has no rows, and memory to take without end."""

    runner = None
    is_done = False

    def __init__(self) -> None:
        self.page_supply, self.num_pieces = self, 0

    def take_piece(self) -> None:
        self.num_pieces += 1

    def close(self) -> None:
        pass


def test_an_idle_process_takes_memory_ahead_until_a_message_arrives(checkpoint: Path, tmp_path: Path) -> None:
    worker = IdleWorker()
    harness = WorkerHarness(make_spec(checkpoint, tmp_path), in_thread=True, worker=worker)
    harness.wait_for(Hello)
    wait_until(lambda: worker.num_pieces > 2, "memory is taken ahead")
    assert harness.stop() == [0]
    harness.close()


def test_a_gap_is_requested_again_and_filled(core: WorkerHarness) -> None:
    first = core.next_step([0], [len(PROMPT)], [new_row(0, PROMPT)], [0, 0, 1, 0, 0, 2])
    second, third = core.next_step([0], [1]), core.next_step([0], [1])
    core.publish(second)
    core.publish(third)
    assert core.receive(Resend) == Resend(rank=Rank(0, 0), generation=GENERATION, from_step=1)
    tokens = [token for step in (first, second, third) for token in core.execute(step)]
    assert tokens == core.generate(PROMPT, 3, GREEDY)


def test_stale_and_malformed_messages_are_dropped(core: WorkerHarness) -> None:
    step = core.next_step([0], [len(PROMPT)], [new_row(0, PROMPT)], [0, 0, 1, 0, 0, 2])
    old = type(step)(step=1, core_epoch=core.epoch - 1, generation=GENERATION, rows=b"", counts=b"")
    other_group = type(step)(step=1, core_epoch=core.epoch, generation=GENERATION + 1, rows=b"", counts=b"")
    core.publish(old)
    core.publish(other_group)
    core.publish(Probe(core_epoch=core.epoch + 5, generation=GENERATION - 1))
    for payload in (b"", b"\xc1", b"\x81\xa4type\xa4step", os.urandom(200), b"\xff" * 5000):
        core.publisher.send(payload)
        core.tell_raw(payload)
    core.publisher.send_multipart([b"two", b"frames"])
    token = core.execute(step)
    core.publish(step)  # done already
    core.publish(Probe(core_epoch=core.epoch, generation=GENERATION))
    assert core.receive(ProbeAck).core_epoch == core.epoch
    assert token == core.generate(PROMPT, 1, GREEDY)


def test_a_probe_of_the_same_core_keeps_rows_and_a_new_core_drops_them(core: WorkerHarness) -> None:
    core.execute(core.next_step([0], [3], [new_row(0, PROMPT)], [0, 0, 1, 0, 0, 2]))
    core.publish(Probe(core_epoch=core.epoch, generation=GENERATION))
    assert core.execute(core.next_step([0], [len(PROMPT) - 3])) == core.generate(PROMPT, 1, GREEDY)
    core.new_core()
    # Row 0 was not freed: admitting it again is legal only if it is gone.
    assert len(core.execute(core.next_step([0], [2], [new_row(0, [1, 2])], [0, 0, 1]))) == 1


def test_the_start_sends_hello_phases_and_measured_and_stop_ends_the_process(
    fresh: WorkerHarness, caplog: pytest.LogCaptureFixture
) -> None:
    messages = fresh.control_messages()
    identity, hello = next(messages)
    assert identity == b"worker-0-%d" % GENERATION
    assert isinstance(hello, Hello)
    assert hello.fingerprint == fresh.spec.fingerprint
    for name in ("import torch", "load weights", "measure memory"):
        phase = next(messages)[1]
        assert isinstance(phase, Phase)
        assert phase.name == name and phase.duration_s >= 0
    measured = next(messages)[1]
    assert isinstance(measured, Measured)
    assert measured.pool_bytes == 64 * measured.block_bytes[0]
    fresh.tell_raw(b"\xc1")
    with caplog.at_level(logging.INFO):
        assert fresh.stop() == [0]
    assert "dropped 1 malformed and 0 stale frames" in caplog.text


def test_a_failed_step_is_reported_and_ends_the_process(fresh: WorkerHarness, caplog: pytest.LogCaptureFixture) -> None:
    fresh.start()
    caplog.set_level(logging.INFO)
    fresh.publish(fresh.next_step([2], [1]))
    error = fresh.receive(WorkerError)
    assert (error.rank, error.step, error.phase) == (Rank(0, 0), 1, "prepare inputs")
    assert error.message.startswith("ProtocolError: row 2 is scheduled")
    assert fresh.exit_codes() == [1]
    assert "dropped" not in caplog.text, "nothing was"


def test_a_bad_checkpoint_is_reported_in_one_line_with_exit_code_2(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tiny_checkpoint(tmp_path / "model")
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    with caplog.at_level(logging.INFO):
        harness = WorkerHarness(make_spec(broken, tmp_path / "run"), in_thread=True)
        failed = harness.wait_for(Failed)
        assert harness.exit_codes() == [2]
    assert failed.error.kind == "config"
    assert weights.name in failed.error.message
    assert len(caplog.text.strip().splitlines()) <= 2, caplog.text
    harness.close()


def test_two_ranks_give_the_tokens_of_one(core: WorkerHarness, pair: WorkerHarness) -> None:
    for sampling in (GREEDY, RowSampling(temperature=0.8, seed=11)):
        assert pair.generate(PROMPT, 10, sampling, chunk=7) == core.generate(PROMPT, 10, sampling)
    check_copies(pair)


def test_the_process_title_names_the_rank(pair: WorkerHarness) -> None:
    for rank, process in enumerate(pair.processes):
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert arguments.rstrip(b"\0") == b"tokenloom worker %d" % rank


def test_a_worker_ignores_sigint(pair: WorkerHarness) -> None:
    pair.new_core()
    pair.processes[0].send_signal(signal.SIGINT)
    assert len(pair.generate(PROMPT, 1, GREEDY)) == 1


def test_workers_exit_with_their_parent(pair: WorkerHarness) -> None:
    pair.cut_lifelines()
    pair.exit_codes()


def test_the_import_runs_no_garbage_collection_and_leaves_out_what_is_heavy() -> None:
    """The import of torch is the longest part of a start."""
    heavy = "{'torch._dynamo', 'torch._inductor', 'sympy', 'triton', 'transformers', 'tokenizers', 'yaml'}"
    code = (
        "import gc, sys\n"
        "import tokenloom.workers.process as process\n"
        "print('torch' in sys.modules)\n"
        "collections = []\n"
        "gc.callbacks.append(lambda phase, info: collections.append(info))\n"
        "process.import_worker()\n"
        "print(len(collections), gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
        f"print('torch' in sys.modules, {heavy} & sys.modules.keys())\n"
    )
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n0 True True\nTrue set()\n"

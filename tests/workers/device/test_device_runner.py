"""Steps on device-resident rows give the tokens of the plain runner under any schedule, with one or two in flight.

Runs everything except graph capture on the device of fake_device.py, alone and as two ranks.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenloom.ipc.messages.workers import RowSampling, SchedulerOutput
from tokenloom.ipc.spec.kv.kv_groups import kv_groups
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.device.fake_device import (
    SMALL,
    DeviceHistoryModel,
    FakeRecorder,
    Launches,
    NoWaiting,
    device_ops,
    new_runner,
)
from tokenloom.tests.workers.device.row_schedule import OF_RANKS, drive
from tokenloom.tests.workers.history_model import ONE_GROUP
from tokenloom.tests.workers.paged_run import CPU, PagedRun, load
from tokenloom.tests.workers.random_schedule import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    RandomSchedule,
    Request,
    execute,
    expected_tokens,
    message,
    new_caches,
    new_row,
    sampled_by,
)
from tokenloom.tests.workers.threaded_group import run_ranks
from tokenloom.workers.device.cuda_graphs import gc_paused, graph_bytes, padded_size
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.load import load_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy: 32-bit words wrap in the interpreter
    pytest.mark.timeout(600),  # it takes minutes over the long forms
]

FEW = 4  # requests, without filters: the interpreter takes long over these


@pytest.mark.parametrize(
    ("seed", "num_requests"), [(0, FEW), *(pytest.param(seed, 20, marks=pytest.mark.nightly) for seed in range(1, 5))]
)
@pytest.mark.parametrize("windows", some([(ONE_GROUP,), ((None, 6, 17),)], 1))
def test_graph_decode_gives_the_tokens_of_the_plain_runner(
    seed: int, num_requests: int, windows: Sequence[int | None]
) -> None:
    schedule, recorder = RandomSchedule(seed, has_filters=num_requests > FEW, windows=windows), FakeRecorder()
    schedule.requests = schedule.requests[:num_requests]
    runner = new_runner(recorder, windows=windows)
    assert runner._device_runner is not None
    tables = runner._device_runner.rows.columns.block_tables

    def check_tables(rows: list[int]) -> None:
        """Compare the tables on the device with those of the core; blocks come in the step that needs them."""
        for request in schedule.requests:
            if request.row in rows:
                assert tables[:, request.row, : len(request.tables[0])].tolist() == request.tables

    schedule.run(runner, check_tables)
    schedule.check()
    assert (schedule.num_freed > 0) == (len(windows) > 1)
    assert recorder.num_replays > 10


def test_a_dropped_runner_frees_its_model_and_another_reuses_its_cache() -> None:
    """As a reload does. Graphs refer to the model and to themselves."""
    caches, prompt = new_caches(), [5, 6, 7]
    models: list[weakref.ref[DeviceHistoryModel]] = []
    for _ in range(2):
        model = DeviceHistoryModel()
        models.append(weakref.ref(model))
        runner = new_runner(FakeRecorder(), model, caches)
        tokens = execute(runner, message([0], [3], [], [new_row(0, prompt)], [0, 0, 9, 0, 0, 10]))
        drawn = tokens.token_ids + [execute(runner, message([0], [1])).token_ids[0] for _ in range(3)]
        assert drawn == expected_tokens(prompt, RowSampling(temperature=0.0), 4)
        del runner, model
        gc.collect()
        assert [reference() for reference in models] == [None] * len(models)


@dataclass
class ExpectingRequest(Request):
    """Also counts tokens that are sampled but not received yet."""

    num_expected: int = 0

    @property
    def num_tokens(self) -> int:
        return super().num_tokens + self.num_expected


class OverlappedSchedule(RandomSchedule):
    """A core with steps in flight: rows continue before it has their tokens; tokens of a freed row are dropped."""

    def __init__(self, seed: int, num_requests: int) -> None:
        super().__init__(seed, has_filters=num_requests > FEW)
        self.waiting_for = [ExpectingRequest(r.prompt, r.sampling, r.limit) for r in self.requests[:num_requests]]
        self.requests = list[Request](self.waiting_for)
        self.in_flight: deque[dict[int, ExpectingRequest]] = deque()  # the sampling requests, by row

    @property
    def open(self) -> list[Request]:
        return [request for request in self.waiting_for if len(request.outputs) + request.num_expected < request.limit]

    @property
    def is_over(self) -> bool:
        return all(len(request.outputs) == request.limit for request in self.requests)

    def start(self) -> SchedulerOutput:
        step = self.step()
        rows = np.frombuffer(step.rows, np.int32).tolist()
        sampling = {}
        for request in self.waiting_for:
            if request.row in rows and request.num_computed == request.num_tokens:
                sampling[request.row or 0] = request
                request.num_expected += 1
        self.in_flight.append(sampling)
        return step

    def _free(self) -> list[int]:
        freed = super()._free()
        for request in self.waiting_for:
            if request.row is None:
                request.num_expected = 0
        for owners in self.in_flight:
            for row in freed:
                owners.pop(row, None)
        return freed

    def finish(self, rows: list[int], token_ids: list[int]) -> None:
        owners = self.in_flight.popleft()
        assert set(owners) <= set(rows)
        for row, token in zip(rows, token_ids, strict=True):
            if row in owners:
                owners[row].outputs.append(token)
                owners[row].num_expected -= 1


@pytest.mark.parametrize(
    ("seed", "num_requests"), [(0, FEW), *(pytest.param(seed, 20, marks=pytest.mark.nightly) for seed in range(1, 5))]
)
@pytest.mark.parametrize("has_graphs", some([True, False], 1))
def test_tokens_do_not_depend_on_steps_in_flight(seed: int, num_requests: int, has_graphs: bool) -> None:
    schedule, recorder = OverlappedSchedule(seed, num_requests), FakeRecorder()
    runner = new_runner(recorder if has_graphs else None)
    for _ in range(3000):
        while len(schedule.in_flight) < 2:
            runner.start(schedule.start())
        sampled = sampled_by(runner.finish())
        schedule.finish(sampled.rows, sampled.token_ids)
        if schedule.is_over:
            break
    schedule.check()


def test_a_host_sampled_step_waits_for_the_steps_in_flight() -> None:
    runner = new_runner(FakeRecorder())
    greedy, counted = RowSampling(temperature=0.0), RowSampling(temperature=0.0, num_logprobs=0)
    new_rows = [new_row(0, [5, 6, 7], sampling=greedy), new_row(1, [8, 9], sampling=counted)]
    tokens: dict[int, list[int]] = {0: [], 1: []}
    unfinished = 0

    def finish_all() -> None:
        nonlocal unfinished
        while unfinished:
            unfinished -= 1
            sampled = sampled_by(runner.finish())
            for row, token in zip(sampled.rows, sampled.token_ids, strict=True):
                tokens[row].append(token)

    for rows, counts, added, blocks in (
        ([0], [3], new_rows, [0, 0, 9, 1, 0, 10]),
        ([0], [1], [], []),
        ([0, 1], [1, 2], [], [0, 0, 11]),
        ([0], [1], [], []),
        ([0, 1], [1, 1], [], []),
    ):
        runner.start(message(rows, counts, [], added, blocks), finish_all=finish_all)
        unfinished += 1
    assert unfinished == 1
    finish_all()
    assert tokens[0] == expected_tokens([5, 6, 7], greedy, 5)
    assert tokens[1] == expected_tokens([8, 9], greedy, 2)


def test_host_sampled_decode_steps_run_as_graphs() -> None:
    """Rows continue with tokens that the host sampled, on the host and on the device."""
    recorder = FakeRecorder()
    runner = new_runner(recorder)
    samplings = [RowSampling(seed=3), RowSampling(seed=4, num_logprobs=2)]
    prompts = [[5, 6, 7], [70, 71]]
    blocks = [value for row in (0, 1) for i in range(4) for value in (row, 0, 9 + 4 * row + i)]
    new_rows = [new_row(row, prompts[row], sampling=samplings[row]) for row in (0, 1)]
    tokens: list[list[int]] = [[], []]
    for number, rows in enumerate([[0, 1]] * 4 + [[0]] * 2 + [[0, 1]] * 2 + [[1]] * 3):
        counts, added, appends = [1] * len(rows), [], []
        if number == 0:
            counts, added, appends = [3, 2], new_rows, blocks
        sampled = execute(runner, message(rows, counts, [], added, appends))
        for row, token in zip(sampled.rows, sampled.token_ids, strict=True):
            tokens[row].append(token)
        assert (sampled.logprobs is not None) == (1 in rows)
    for row in (0, 1):
        assert tokens[row] == expected_tokens(prompts[row], samplings[row], len(tokens[row]))
    assert [len(each) for each in tokens] == [8, 9]
    assert (
        recorder.num_replays == 2 + 2 + 2 + 2
    )  # of the host's two rows, of one that the device draws, … of the host's


def test_a_late_token_is_not_written_to_the_next_request_of_its_row() -> None:
    runner = new_runner(FakeRecorder())
    prompt = [70, 71, 72, 73, 74, 75]
    runner.start(message([0], [3], [], [new_row(0, [5, 6, 7])], [0, 0, 9]))
    runner.start(message([0], [2], [0], [new_row(0, prompt)], [0, 0, 11, 0, 0, 12]))
    assert sampled_by(runner.finish()).rows == [0]
    assert sampled_by(runner.finish()).rows == []
    tokens = execute(runner, message([0], [4])).token_ids
    tokens += execute(runner, message([0], [1])).token_ids
    assert tokens == expected_tokens(prompt, RowSampling(temperature=0.0), 2)


def test_a_decode_step_has_one_launch_before_its_layers_and_one_after(tmp_path: Path) -> None:
    """Beside five kernels and four products a layer. Whatever changed of rows, of some at once, takes one copy and one
    launch more, other rows than before another copy."""
    model = load(tiny_checkpoint(tmp_path, "qwen3", **SMALL), ops=device_ops())
    (spec,) = model.kv_cache_specs(BLOCK_SIZE, torch.float32)
    runner = new_runner(FakeRecorder(), model, [spec.allocate(NUM_BLOCKS, CPU)])
    new_rows = [new_row(row, [5, 6, 7], sampling=RowSampling(temperature=0.7, seed=row)) for row in range(3)]
    admitting = message([0, 1, 2], [3, 3, 3], [], new_rows, [0, 0, 9, 0, 0, 10, 1, 0, 11, 2, 0, 12])
    with Launches() as mixed:
        runner.start(admitting)
    assert mixed.counts["write_rows_kernel"] == 1
    assert mixed.counts["copy_"] == 3  # changes to the device; tokens beside the rows', to the host
    assert not {"index_put_", "scatter_", "fill_"} & set(mixed.counts)
    runner.finish()
    for _ in range(2):  # a graph of the size
        execute(runner, message([0], [1]))
    with Launches() as launches:
        runner.start(message([0], [1]))
    per_layer = ("norm_kernel", "qk_norm_rope_cache_kernel", "decode_kernel", "merge_kernel")
    num_layers = spec.num_layers
    expected = Counter(dict.fromkeys(per_layer, num_layers))
    expected += Counter({"norm_kernel": num_layers + 1, "gemv_kernel": 4 * num_layers})  # the norm of all
    expected += Counter({"begin_decode_kernel": 1, "plan_kernel": 1, "gemv_kernel": 1, "sample_kernel": 1})
    expected["copy_"] = 2  # tokens beside the graph's, to the host
    assert launches.counts == expected
    runner.finish()
    known = [new_row(row, [8, 9, row], computed=2) for row in range(3, 7)]
    for _ in range(2):
        execute(runner, message([0], [1]))  # to the end of its blocks
    with Launches() as changing:
        blocks = [value for row in (0, 3, 4, 5, 6) for value in (row, 0, 13 + row)]
        runner.start(message([0, 3, 4, 5, 6], [1] * 5, [1, 2], known, blocks))
    num_products = expected.pop("gemv_kernel")  # several rows are torch's to multiply
    expected += Counter({"linear": num_products, "activation_kernel": num_layers})
    assert changing.counts == expected + Counter({"write_rows_kernel": 1, "copy_": 2})


def test_two_ranks_give_the_tokens_of_one_without_waiting_for_the_device(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="item"), NoWaiting():
        torch.zeros(1).item()
    folder = tiny_checkpoint(tmp_path, "qwen3", **SMALL)

    def run(group: ParallelGroup) -> dict[str, list[int]]:
        model, recorder = load(folder, group=group, ops=device_ops()), FakeRecorder()
        (spec,) = model.kv_cache_specs(BLOCK_SIZE, torch.float32)
        runner = new_runner(recorder, model, [spec.allocate(NUM_BLOCKS, CPU)], group)
        tokens = drive(runner, OF_RANKS, num_in_flight=2, watch=NoWaiting)
        assert recorder.num_replays
        return tokens

    wanted = run(ParallelGroup())
    assert run_ranks(2, run) == [wanted, wanted]
    assert [len(tokens) for tokens in wanted.values()] == [7, 4, 4, 2]


def test_layers_with_tables_of_their_own_give_the_tokens_of_the_host(tmp_path: Path) -> None:
    """Whatever no token sees is NaN, as in a pool whose memory goes from group to group."""
    fields = {**SMALL, "num_hidden_layers": 2, "sliding_window": 6, "sliding_window_pattern": 2}
    folder = tiny_checkpoint(tmp_path, "gemma3_text", **fields)
    config = load_model_config(folder)
    groups = kv_groups(config, MAX_MODEL_LEN, is_grouped=True)
    found, recorder = [], FakeRecorder()
    for ops in (ReferenceOps(), device_ops()):
        model = load_model(folder, config, MAX_MODEL_LEN, torch.float32, CPU, ops, ParallelGroup(), groups=groups)
        specs = model.kv_cache_specs(BLOCK_SIZE, torch.float32)
        buffer = torch.full((40 * specs[0].block_bytes // 4,), torch.nan).view(torch.uint8)
        caches, windows = [spec.view(buffer) for spec in specs], [group.window for group in groups]
        schedule = RandomSchedule(0, windows=windows)
        schedule.free_blocks = schedule.free_blocks[:39]
        schedule.requests = [Request(list(range(5, 5 + size)), RowSampling(temperature=0.0), 7) for size in (9, 13)]
        schedule.run(new_runner(recorder if found else None, model, caches, windows=windows))
        found.append([request.outputs for request in schedule.requests])
        assert schedule.num_freed
    assert found[0] == found[1] and recorder.num_replays > 3


def test_garbage_collection_is_paused_during_capture_and_resumes_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), gc_paused():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_padded_sizes_exceed_the_rows_by_at_most_an_eighth() -> None:
    for num_rows in range(1, 513):
        size = padded_size(num_rows, 512)
        assert num_rows <= size <= max(num_rows + 3, num_rows * 9 / 8 + 1)
        assert padded_size(size, 512) == size
    assert padded_size(100, 101) == 101
    assert len({padded_size(n, 512) for n in range(1, 513)}) <= 48


def test_graph_bytes_counts_the_kernels_of_each_graph() -> None:
    """Qwen3-8B's shape, 64 rows: 0.22 GB for the largest, and twice 18 graphs of 36 layers, 10 KB for each kernel."""
    few, many = (graph_bytes(64, 151_936, 32, 128, num_layers, 2560, 1) for num_layers in (1, 36))
    num_sizes = len({padded_size(n, 64) for n in range(1, 65)})
    assert num_sizes == 18
    assert many - few >= 2 * num_sizes * 35 * 12 * 10_000  # seven kernels and four products, one of them split
    assert 0.4e9 < many < 0.5e9


@torch.inference_mode()
def test_triton_kernels_give_the_logits_of_the_reference(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen3", **SMALL)
    plain, kernels = load(folder), load(folder, ops=device_ops())
    prompt = np.random.default_rng(0).integers(0, 200, 21).tolist()
    runs = [PagedRun(model, block_size=16) for model in (plain, kernels)]
    for step in ({"a": prompt}, {"a": [5], "b": prompt[:9], "c": [8]}):
        wanted, actual = (run.step(step) for run in runs)
        for name in step:
            torch.testing.assert_close(actual[name], wanted[name], atol=2e-5, rtol=2e-5)

"""The core as a process, with this test as its supervisor, its frontend and its workers, over real sockets."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tokenloom.ipc.codec import Decoder, encode
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.base import Hello, Holding, Ping, Pong, Rank, Refused, Unknown, Welcome
from tokenloom.ipc.messages.core import AbortRequests, CoreToFrontend, EngineCoreOutputs
from tokenloom.ipc.messages.orders import Held, Hold
from tokenloom.ipc.messages.supervisor import Initialize, ReplaceWorkers, Stop, WorkersDown, WorkersUp
from tokenloom.ipc.messages.workers import ControlAck, Probe, ReloadWeights, Resend, SchedulerOutput, WorkerError
from tokenloom.ipc.notes.touched import read_touched
from tokenloom.ipc.sockets.zmq_sockets import new_socket
from tokenloom.tests.core.core_bench import DEADLINE_S, Bench
from tokenloom.tests.core.fake_adapters import digest_of
from tokenloom.tests.core.fake_worker import expected_tokens
from tokenloom.tests.support.waiting import num_switches


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with contextlib.closing(Bench(tmp_path)) as bench:
        yield bench


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with contextlib.closing(Bench(tmp_path_factory.mktemp("core"))) as bench:
        bench.start()
        yield bench


@pytest.fixture
def shared(started: Bench) -> Bench:
    """A core that goes on after the test."""
    started.news.clear()
    return started


def test_requests_travel_through_sockets(bench: Bench) -> None:
    bench.start()
    for key in range(5):
        bench.submit(key, [key + 1] * 7)
    bench.run_until_finished(*range(5))
    assert bench.tokens() == {key: expected_tokens([key + 1] * 7, key, 10, []) for key in range(5)}
    bench.order(Stop())
    assert bench.core.wait(DEADLINE_S) == 0


def test_before_hello_the_answer_is_unknown_and_another_run_is_refused(shared: Bench) -> None:
    stranger = new_socket(shared.context, zmq.DEALER, identity=b"s" * 16)
    stranger.connect(shared.spec.endpoints.core)
    decoder: Decoder[CoreToFrontend] = Decoder(CoreToFrontend)
    stranger.send(encode(AbortRequests(keys=[1])))
    assert stranger.poll(5000) and isinstance(decoder.decode(stranger.recv()), Unknown)
    stranger.send(encode(shared.hello(run_id="f" * 16)))
    assert stranger.poll(5000)
    refused = decoder.decode(stranger.recv())
    assert isinstance(refused, Refused) and "f" * 16 in refused.error.message
    stranger.close()


def test_a_worker_that_missed_a_step_gets_it_again(shared: Bench) -> None:
    shared.is_mute = True
    shared.submit(0, [1, 2, 3])
    shared.pump(SchedulerOutput)
    shared.is_mute = False
    shared.push(Resend(rank=Rank(0, 0), generation=0, from_step=shared.worker.num_steps + 1))
    shared.check(0, [1, 2, 3])


@pytest.mark.parametrize("how", ["error", "nonsense", "silence"])
def test_a_failed_group_is_replaced_and_streams_go_on(bench: Bench, how: str) -> None:
    bench.start()
    for key in range(3):
        bench.submit(key, [key + 1] * 9, 60)
    bench.pump(EngineCoreOutputs)
    bench.is_mute = True
    if how == "error":
        bench.push(WorkerError(rank=Rank(0, 0), generation=0, step=2, phase="execute", message="RuntimeError: boom"))
    elif how == "nonsense":
        bench.push(bench.worker.execute(msgspec.structs.replace(_empty_step(bench), step=bench.worker.num_steps + 1)))
    reason = bench.hear(ReplaceWorkers).reason
    assert {"error": "boom", "nonsense": "makes no sense", "silence": "hang"}[how] in reason
    bench.renew_workers(1)
    bench.run_until_finished(0, 1, 2)
    assert bench.tokens() == {key: expected_tokens([key + 1] * 9, key, 60, []) for key in range(3)}


def test_a_suspect_is_noted_until_a_step_has_ended(bench: Bench) -> None:
    bench.start()
    bench.is_mute = True
    bench.submit(0, [1] * 9, num_losses=2)
    bench.pump(SchedulerOutput)
    bench.submit(1, [2] * 9)
    bench.order(Ping())  # another turn
    bench.pump(Pong)
    assert [each.key for each in read_touched(bench.spec.own_file("touched"))] == [0]


def test_a_core_that_stood_still_blames_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    monkeypatch.setenv("TOKENLOOM_FAULTS", str(faults))
    with contextlib.closing(Bench(tmp_path)) as bench:
        bench.start()
        bench.submit(1, [5] * 7, 40)
        bench.pump(EngineCoreOutputs)
        (faults / "core.schedule").write_text("delay 2.5")  # more than a step may take
        bench.run_until_finished(1)
        assert not any(isinstance(message, ReplaceWorkers) for message in bench.told)


def test_a_new_core_continues_streams_from_the_blocks_of_the_workers(bench: Bench) -> None:
    bench.start()
    prompt = list(range(100))
    bench.submit(0, prompt, 60)
    while len(bench.tokens().get(0, ())) < 10:
        bench.pump(EngineCoreOutputs)
    bench.replace_core()
    had, num_computed = bench.tokens()[0], bench.worker.num_computed_tokens
    bench.submit(0, prompt, 60, had)
    bench.run_until_finished(0)
    assert bench.tokens()[0] == expected_tokens(prompt, 0, 60, [])
    assert bench.worker.num_computed_tokens - num_computed < (60 - len(had)) + 3 * 4, "the prompt is computed again"


def test_workers_that_do_not_answer_a_new_core_are_replaced(bench: Bench) -> None:
    """The first group says nothing, the second is lost while it is probed; all others are answered all the time."""
    bench.is_mute = True
    bench.pump(Hello)
    bench.order(Initialize(pool=PoolShape(64, 1, (1,))))
    bench.pump(Probe)
    bench.order(Ping())
    assert not any(isinstance(message, ReplaceWorkers) for message in bench.pump(Pong))
    replace = bench.hear(ReplaceWorkers)
    assert replace.generation == 0 and "worker 0 did not answer the core's probe within 2 s" in replace.reason
    bench.join(generation=1)
    bench.order(WorkersUp(generation=1))
    bench.pump(Probe)
    bench.say(bench.hello())
    bench.pump(Welcome)
    bench.order(WorkersDown(generation=1, reason="killed"))
    bench.renew_workers(2)
    bench.submit(0, [1, 2, 3])
    bench.check(0, [1, 2, 3])


def test_requests_that_end_before_an_order_is_carried_out_are_reported_before_it(shared: Bench) -> None:
    shared.submit(0, [1, 2, 3])
    shared.pump(SchedulerOutput)
    shared.order(Hold(order_id="7", action="pause", mode="wait"))
    assert shared.hear(Held) == Held(order_id="7")
    shared.pump(seconds=0.1)
    assert 0 in shared.finished()
    shared.order(Hold(order_id="8", action="resume"))
    assert shared.hear(Held) == Held(order_id="8")


def _empty_step(shared: Bench) -> SchedulerOutput:
    return SchedulerOutput(step=1, core_epoch=0, generation=shared.generation, rows=b"", counts=b"")


def begin_reload(bench: Bench, step: int = 1) -> None:
    """The workers have the order of a reload, which has no reply."""
    bench.is_mute = True
    bench.order(Hold(order_id="7", action="reload", holding=Holding(model_folder="elsewhere")))
    order = bench.hear(ReloadWeights)
    assert (order.step, order.holding) == (step, Holding(model_folder="elsewhere"))
    assert not any(isinstance(message, Held) for message in bench.pump(seconds=0.1))


def test_a_reload_is_done_when_all_ranks_have_read_the_new_weights(bench: Bench) -> None:
    bench.start()
    begin_reload(bench)
    bench.push(ControlAck(rank=Rank(0, 0), step=1, core_epoch=0, generation=0))
    assert bench.hear(Held) == Held(order_id="7", generation=0)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_reload_that_a_rank_does_not_end_is_lost_with_the_workers(bench: Bench, is_silent: bool) -> None:
    bench.start()
    begin_reload(bench)
    if not is_silent:
        bench.push(WorkerError(rank=Rank(0, 0), generation=0, step=1, phase="reload", message="OSError: boom"))
    lost = bench.hear(ReplaceWorkers)
    assert ("other weights were not read within --start-timeout-s 1" if is_silent else "OSError: boom") in lost.reason
    bench.order(WorkersDown(generation=0, reason="lost"))
    bench.renew_workers(1)
    bench.submit(0, [1, 2, 3])
    bench.run_until_finished(0)
    assert not any(isinstance(message, Held) for message in bench.told), "the supervisor has ended it"
    begin_reload(bench, bench.worker.num_steps + 1)


def test_malformed_frames_stop_nothing(shared: Bench) -> None:
    rng = random.Random(0)
    valid = encode(AbortRequests(keys=[1, 2, 3]))
    for _ in range(500):
        frame = bytearray(valid)
        frame[rng.randrange(len(frame))] = rng.randrange(256)
        shared.frontend.send(bytes(frame) if rng.random() < 0.5 else rng.randbytes(rng.randrange(50)))
        shared.results.send(rng.randbytes(rng.randrange(50)))
    shared.submit(900, [1, 2, 3])
    shared.run_until_finished(900)


def test_the_core_dies_with_its_lifeline(bench: Bench) -> None:
    bench.start()
    os.close(bench.lifeline)
    bench.core.wait(DEADLINE_S)
    bench.lifeline = os.open(os.devnull, os.O_RDONLY)


def test_an_idle_core_does_not_wake(shared: Bench) -> None:
    shared.submit(0, [1, 2, 3])
    shared.run_until_finished(0)
    shared.pump(seconds=0.3)
    before = num_switches(shared.core.pid)
    shared.pump(seconds=0.5)
    assert num_switches(shared.core.pid) - before <= 3


@pytest.fixture
def lora_bench(tmp_path: Path) -> Iterator[Bench]:
    with contextlib.closing(Bench(tmp_path, enable_lora=True, max_loras=2, tensor_parallel_size=2)) as bench:
        yield bench


def test_an_adapter_is_loaded_once_and_a_new_core_adopts_it_if_all_ranks_hold_it(lora_bench: Bench) -> None:
    bench = lora_bench
    bench.start()
    for key, adapter in enumerate((1, 2, 1)):
        bench.submit(key, [key + 1] * 7, adapter=adapter)
    bench.run_until_finished(0, 1, 2)
    bench.worker.adapters.content[Rank(0, 1)].popitem()  # one rank lost the last one
    bench.replace_core()
    for key, adapter in ((3, 1), (4, 2)):
        bench.submit(key, [key + 1] * 7, adapter=adapter)
    bench.run_until_finished(3, 4)
    digests = [digest_of(adapter) for adapter in (1, 2, 1, 1, 2)]
    expected = {key: expected_tokens([key + 1] * 7, key, 10, [], digest) for key, digest in enumerate(digests)}
    assert bench.tokens() == expected and bench.worker.adapters.num_begun == 3


def test_answers_of_other_workers_or_to_another_core_fill_no_slot(lora_bench: Bench) -> None:
    bench = lora_bench
    bench.start()
    bench.fills_by_itself = False
    bench.submit(0, [1, 2, 3], adapter=1)
    bench.pump(SchedulerOutput)
    answers = [bench.worker.adapters.finish(rank) for rank in bench.spec.ranks]
    for answer in answers:
        bench.push(msgspec.structs.replace(answer, core_epoch=7))
        bench.push(msgspec.structs.replace(answer, generation=7))
    bench.push(answers[0])
    bench.push(answers[0])  # twice
    assert not any(isinstance(each, SchedulerOutput) for each in bench.pump(seconds=0.3))
    bench.push(answers[1])
    bench.run_until_finished(0)
    assert bench.tokens()[0] == expected_tokens([1, 2, 3], 0, 10, [], digest_of(1))


def test_a_fill_that_hangs_ends_its_request_at_the_deadline_and_no_other(lora_bench: Bench) -> None:
    bench = lora_bench
    bench.start()
    bench.fills_by_itself = False
    bench.submit(0, [1, 2, 3], adapter=1)
    bench.pump(SchedulerOutput)
    bench.run_until_finished(0)
    (done,) = [each for news in bench.news if isinstance(news, EngineCoreOutputs) for each in news.finished]
    assert done.error is not None and done.error.kind == "internal"
    assert "worker 0 and worker 1 did not answer within --start-timeout-s 1 s" in done.error.message
    bench.submit(1, [1, 2, 3])
    bench.run_until_finished(1)
    assert not any(isinstance(message, ReplaceWorkers) for message in bench.told)

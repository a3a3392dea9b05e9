"""ZmqTransport: requests survive the loss of the frontend, and an idle transport uses no CPU."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from tokenloom.frontend.client.client import Client
from tokenloom.ipc.errors import EngineDead, InternalError, Overloaded, ProtocolError, RequestError
from tokenloom.ipc.messages.client import CREDIT_WINDOW, Submit
from tokenloom.ipc.sockets.zmq_sockets import MAX_CLIENT_MESSAGE_BYTES
from tokenloom.tests.frontend.fake_frontend import DEADLINE_S, FakeFrontend, expected_text, greedy
from tokenloom.tests.support.shortages import few_descriptors, few_threads, num_descriptors
from tokenloom.tests.support.waiting import wait_until


def test_requests_resume_after_the_frontend_is_replaced(fake: FakeFrontend, client: Client) -> None:
    for _ in range(3):
        fake.set(max_deltas=3, is_paused=False)
        future = client.submit("p", greedy())
        fake.until(lambda service: service.is_paused)
        fake.hang_up()
        fake.come_back()
        fake.set(is_paused=False, max_deltas=None)
        assert future.result(DEADLINE_S).outputs[0].text == expected_text("p", 40)


def test_an_idle_client_reconnects_to_the_new_frontend(fake: FakeFrontend, client: Client) -> None:
    fake.hang_up()
    fake.come_back()
    fake.until(lambda service: service.seen["Hello"] == 2)
    assert client.generate("p", greedy(), use_tqdm=False)[0].outputs[0].text == expected_text("p", 40)


def test_all_waits_end_with_engine_dead_if_the_engine_does_not_return(fake: FakeFrontend) -> None:
    with Client(fake.address, reconnect_timeout_s=0.3) as client:
        fake.set(is_paused=True)
        future = client.submit("p", greedy())
        fake.until(lambda service: service.seen["Submit"] == 1)
        fake.hang_up()
        with pytest.raises(EngineDead, match=r"lost and did not come back within 0.3 s"):
            future.result(DEADLINE_S)
        fake.come_back()
        fake.set(is_paused=False)

        def is_served() -> bool:
            with contextlib.suppress(EngineDead):  # it may come back too late for the first tries
                return client.generate("p", greedy(), use_tqdm=False)[0].finished
            return False

        wait_until(is_served)


def test_malformed_frames_are_dropped(fake: FakeFrontend, client: Client) -> None:
    for frame in (b"", b"\xc1", b"garbage", os.urandom(1000), b"\x81\xa4type\xa4nope"):
        fake.say(frame)
    assert client.generate("p", greedy(), use_tqdm=False)[0].finished


def test_a_query_whose_reply_cannot_be_decoded_fails_with_the_reason(fake: FakeFrontend, client: Client) -> None:
    fake.set(is_mute=True)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.get_metrics)
        fake.until(lambda service: service.seen["GetMetrics"] == 1)
        fake.say(b"garbage")
        with pytest.raises(ProtocolError, match="cannot decode a message of the engine"):
            answer.result(DEADLINE_S)


def test_pings_and_credits_continue_without_a_reading_consumer(fake: FakeFrontend, client: Client) -> None:
    fake.set(tokens_per_delta=1)
    num_tokens = CREDIT_WINDOW * 3
    stream = client.stream("p", greedy(num_tokens))
    text = next(stream)  # then the program computes without reading
    other = client.submit("q", greedy(num_tokens))
    other.result(DEADLINE_S)
    fake.set(is_paused=True)
    kept_open = client.submit("r", greedy())
    pings = fake.do(lambda service: service.seen["Ping"])
    fake.until(lambda service: service.seen["Ping"] > pings + 1)
    assert text + "".join(stream) == expected_text("p", num_tokens)
    assert fake.do(lambda service: service.max_in_flight) <= CREDIT_WINDOW
    kept_open.cancel()


def test_the_thread_of_an_idle_client_does_not_wake(fake: FakeFrontend, client: Client) -> None:
    """After the events that follow an output, it sleeps longer than every interval of the protocol."""
    client.generate("p", greedy(3), use_tqdm=False)

    def sleeps() -> bool:
        wakeups = _context_switches()
        threading.Event().wait(1.2)
        return _context_switches() - wakeups <= 2

    wait_until(sleeps)


def _context_switches() -> int:
    """Return the voluntary context switches of the transport's thread."""
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "tokenloom connection"]
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


def test_an_exception_in_a_sink_leaves_no_caller_waiting(fake: FakeFrontend) -> None:
    with Client(fake.address) as client:
        fake.set(is_paused=True)
        future = client.submit("p")

        def broken(update: object) -> None:
            raise KeyError("a bug")

        fake.until(lambda service: service.seen["Submit"] == 1)
        client._transport.submit(_submit("x"), broken)
        with pytest.raises(InternalError, match="KeyError: 'a bug'"):
            future.result(DEADLINE_S)
        with pytest.raises(InternalError):
            client.generate("p")


def test_a_request_too_large_for_a_message_fails_alone(fake: FakeFrontend, client: Client) -> None:
    half = "x" * (MAX_CLIENT_MESSAGE_BYTES // 2)
    turns = [{"role": "user", "content": half}, {"role": "user", "content": half}]
    with pytest.raises(RequestError, match=f"at most {MAX_CLIENT_MESSAGE_BYTES}"):
        client.chat(turns, use_tqdm=False)
    assert client.generate("p", greedy(3), use_tqdm=False)[0].finished


@pytest.mark.parametrize("is_back", [True, False])
def test_a_query_too_large_for_a_message_fails_alone(fake: FakeFrontend, client: Client, is_back: bool) -> None:
    if not is_back:  # it is sent when the frontend returns
        fake.hang_up()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.reload, "\ud800")
        if not is_back:
            fake.come_back()
        with pytest.raises(RequestError, match=r"cannot be sent.*surrogates"):
            answer.result(DEADLINE_S)
    assert client.generate("p", greedy(3), use_tqdm=False)[0].finished


def test_a_client_refuses_calls_after_a_fork(fake: FakeFrontend, client: Client) -> None:
    script = (
        "import os, sys, tokenloom\n"
        f"client = tokenloom.Client({fake.address!r})\n"
        "pid = os.fork()\n"
        "if pid:\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "try:\n"
        "    client.generate('p')\n"
        "except tokenloom.RequestError as error:\n"
        "    client.close()\n"
        "    os._exit(42 if 'fork' in str(error) else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=DEADLINE_S, cwd="/").returncode == 42


def _submit(request_id: str) -> Submit:
    return Submit(request_id=request_id, prompt="p", params=greedy())


@pytest.mark.parametrize("num_left", [0, 1])
def test_a_client_whose_threads_cannot_start_leaves_nothing_behind(fake: FakeFrontend, num_left: int) -> None:
    before, num_threads = num_descriptors(), threading.active_count()
    for _ in range(3):
        with few_threads(num_left), pytest.raises(Overloaded, match="can't start new thread"):
            Client(fake.address)
    wait_until(lambda: threading.active_count() <= num_threads)
    wait_until(lambda: num_descriptors() <= before)
    with Client(fake.address) as client:
        assert client.generate("p", greedy(), use_tqdm=False)[0].outputs[0].text == expected_text("p", 40)


def test_a_lost_client_without_descriptors_connects_when_there_are_some() -> None:
    """Over TCP: ZeroMQ ends the process, of the fake too, if it cannot accept at a unix socket (see `Door`)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fake = FakeFrontend(f"tcp://127.0.0.1:{port}")
    with Client(fake.address) as client:
        fake.hang_up()

        def comes_back() -> bool:
            with contextlib.suppress(zmq.ZMQError):  # ZeroMQ still closes the old socket
                fake.come_back()
                return True
            return False

        wait_until(comes_back)
        with few_descriptors():
            future = client.submit("p", greedy())
            with contextlib.suppress(TimeoutError):  # unless it has come back before the shortage
                future.result(0.5)
        assert future.result(DEADLINE_S).outputs[0].text == expected_text("p", 40)
    fake.close()

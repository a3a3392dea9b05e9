"""Client against a fake frontend."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tokenloom.frontend.client.client import Client
from tokenloom.ipc.errors import EngineDead, RequestError
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.sockets.addresses import closed_name
from tokenloom.tests.frontend.fake_frontend import DEADLINE_S, FORBIDDEN, FakeFrontend, expected_text, greedy


def test_outputs_are_in_the_order_of_the_prompts(client: Client) -> None:
    prompts = [f"prompt {index}" for index in range(50)]
    params = [greedy(1 + (index * 7) % 40) for index in range(50)]
    outputs = client.generate(prompts, params, use_tqdm=False)
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == list(prompt.encode())
        assert output.finished
        (answer,) = output.outputs
        assert answer.text == expected_text(prompt, each.max_tokens or 0)
        assert len(answer.token_ids) == each.max_tokens
        assert (answer.index, answer.finish_reason, answer.stop_reason) == (0, "length", None)
        assert (output.num_cached_tokens, output.metrics.arrival_time) == (3, 1.0)
    assert len({output.request_id for output in outputs}) == 50
    assert client.generate([], greedy()) == []


def test_requests_without_parameters_get_the_engine_s_defaults(fake: FakeFrontend, client: Client) -> None:
    fake.set(defaults={"temperature": 0.25, "max_tokens": 3})
    params = client.get_default_sampling_params()
    assert params == SamplingParams(temperature=0.25, max_tokens=3)
    params.max_tokens = 9  # does not change the client's defaults
    lengths = [len(output.outputs[0].token_ids) for output in client.generate(["a", "b"], use_tqdm=False)]
    lengths.append(len(client.chat([{"role": "user", "content": "c"}], use_tqdm=False)[0].outputs[0].token_ids))
    lengths.append(len(client.submit("d").result(DEADLINE_S).outputs[0].token_ids))
    assert lengths == [3] * 4 and "".join(client.stream("e")).count("<") == 3
    assert {submit.params.temperature for submit in fake.do(lambda service: service.submits)} == {0.25}
    assert len(client.generate("f", SamplingParams(max_tokens=5), use_tqdm=False)[0].outputs[0].token_ids) == 5


def test_parameters_are_checked_and_copied_at_submission(client: Client) -> None:
    params = greedy(3)
    futures = [client.submit("a", params)]
    params.max_tokens = 5
    futures.append(client.submit("b", params))
    params.max_tokens = -1
    for use in (client.submit, client.stream, client.generate):
        with pytest.raises(RequestError, match="max_tokens must be in"):
            use("c", params)
    assert [len(future.result(DEADLINE_S).outputs[0].token_ids) for future in futures] == [3, 5]


def test_an_invalid_prompt_among_many_is_refused_before_any_is_sent(fake: FakeFrontend, client: Client) -> None:
    with pytest.raises(RequestError, match="no tokens"):
        client.generate(["good", []], greedy(), use_tqdm=False)
    assert fake.do(lambda service: service.submits) == []


def test_an_error_of_one_prompt_is_raised_and_aborts_the_others(fake: FakeFrontend, client: Client) -> None:
    fake.set(is_paused=True)
    with pytest.raises(RequestError, match=r"prompt 1 of 3: .*forbidden: choose"):
        client.generate(["a", FORBIDDEN, "c"], greedy(), use_tqdm=False)
    fake.until(lambda service: service.seen["Abort"] == 2)
    fake.set(is_paused=False)
    assert client.generate("a", greedy(2), use_tqdm=False)[0].finished


def test_a_long_list_completes_on_an_engine_that_admits_few_at_once(fake: FakeFrontend, client: Client) -> None:
    fake.set(max_running=3)
    prompts = [f"p{index}" for index in range(100)]
    outputs = client.generate(prompts, greedy(6), use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [expected_text(prompt, 6) for prompt in prompts]


def test_a_stream_yields_the_text_in_pieces_and_aborts_its_request_when_closed(
    fake: FakeFrontend, client: Client
) -> None:
    pieces = list(client.stream([{"role": "user", "content": "hello"}], greedy(20)))
    assert len(pieces) == 5 and "".join(pieces) == expected_text("hello", 20)
    fake.set(max_deltas=1)
    stream = client.stream("hello", greedy(20))
    next(stream)
    stream.close()
    fake.until(lambda service: service.seen["Abort"] == 1)


def test_a_stream_raises_the_error_of_its_request(client: Client) -> None:
    with pytest.raises(RequestError, match="forbidden"):
        list(client.stream(FORBIDDEN))
    with pytest.raises(RequestError, match="no tokens"):
        client.stream([])  # before the iterator is read


def test_cancelling_a_future_aborts_the_request(fake: FakeFrontend, client: Client) -> None:
    fake.set(is_paused=True)
    future = client.submit("p", greedy(9))
    fake.until(lambda service: service.seen["Submit"] == 1)
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(0.01)
    assert future.cancel() and future.cancelled() and future.cancel()
    assert concurrent.futures.wait([future], DEADLINE_S).done == {future}
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(DEADLINE_S)
    fake.until(lambda service: service.seen["Abort"] == 1)
    fake.set(is_paused=False)
    finished = client.submit("p", greedy(9))
    finished.result(DEADLINE_S)
    assert not finished.cancel()


def test_a_callback_of_a_future_may_use_the_client(client: Client) -> None:
    again: concurrent.futures.Future[str] = concurrent.futures.Future()

    def callback(future: concurrent.futures.Future[object]) -> None:
        again.set_result(client.generate("again", greedy(3), use_tqdm=False)[0].outputs[0].text)

    client.submit("p", greedy(3)).add_done_callback(callback)
    assert again.result(DEADLINE_S) == expected_text("again", 3)


def test_an_aborted_request_ends_with_the_tokens_so_far(fake: FakeFrontend, client: Client) -> None:
    fake.set(max_deltas=2)
    future = client.submit("p", greedy(20), request_id="mine")
    fake.until(lambda service: service.is_paused)
    client.abort("mine")
    client.abort("nobody's")
    (answer,) = future.result(DEADLINE_S).outputs
    assert answer.finish_reason == "abort"
    assert expected_text("p", 20).startswith(answer.text)
    assert len(answer.token_ids) == 8


def test_queries_get_their_replies(client: Client) -> None:
    assert client.tokenize("hi") == [104, 105]
    assert client.tokenize([{"role": "user", "content": "hi"}]) == [104, 105]
    assert client.detokenize([104, 105]) == "hi"
    assert client.health().is_ready
    assert client.info().model == "fake"
    with pytest.raises(RequestError, match="forbidden"):
        client.tokenize(FORBIDDEN)


def test_each_of_many_threads_and_clients_gets_its_own_output(fake: FakeFrontend, client: Client) -> None:
    def work(number: int) -> None:
        with Client(fake.address) as own:
            for round_number in range(5):
                prompts = [f"{number} {round_number} {index}" for index in range(8)]
                for each in (client, own):
                    outputs = each.generate(prompts, greedy(11), use_tqdm=False)
                    texts = [output.outputs[0].text for output in outputs]
                    assert texts == [expected_text(prompt, 11) for prompt in prompts]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, number) for number in range(8)]:
            future.result(DEADLINE_S * 2)


def test_each_of_thousands_of_requests_takes_little_cpu_time(fake: FakeFrontend, client: Client) -> None:
    prompts = [f"p{index}" for index in range(3000)]
    begin = time.process_time()
    outputs = client.generate(prompts, greedy(4), use_tqdm=False)
    per_request_us = (time.process_time() - begin) * 1e6 / len(prompts)
    assert all(output.finished for output in outputs)
    assert per_request_us < 1000, "about 150 µs, half of them the fake's"


def test_the_progress_bar_counts_requests_and_tokens_if_there_is_a_console(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    client.generate(["a", "b"], greedy(5))
    bar = capsys.readouterr().err
    assert "2/2" in bar and "tokens/s" in bar
    with contextlib.redirect_stderr(None):
        assert client.generate("a", greedy(5))[0].finished


def test_a_closed_client_refuses_calls_and_leaves_no_thread(fake: FakeFrontend) -> None:
    before = set(threading.enumerate())
    fake.set(is_paused=True)
    client = Client(fake.address)
    future = client.submit("p")
    client.close()
    client.close()
    with pytest.raises(RequestError, match="closed"):
        future.result(DEADLINE_S)
    with pytest.raises(RequestError, match="closed"):
        client.generate("p")
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("waits_at_exit", [False, True])
def test_a_program_ends_despite_a_callback_that_never_returns(
    fake: FakeFrontend, tmp_path: Path, waits_at_exit: bool
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import threading, tokenloom\n"
        "from tokenloom.frontend.client import transport\n"
        "transport.CLOSE_TIMEOUT_S, entered = 0.3, threading.Event()\n"
        f"client = tokenloom.Client({fake.address!r})\n"
        "future = client.submit('p', tokenloom.SamplingParams(max_tokens=3))\n"
        "future.add_done_callback(lambda future: (entered.set(), threading.Event().wait()))\n"
        "entered.wait()\n" + ("" if waits_at_exit else "client.close()\nprint('closed')\n")
    )
    result = subprocess.run([sys.executable, script], capture_output=True, timeout=DEADLINE_S, text=True, cwd=tmp_path)
    assert result.returncode == 0
    assert result.stdout == ("" if waits_at_exit else "closed\n")
    (line,) = result.stderr.splitlines()
    assert "a callback has not returned within 0.3 s: thread «tokenloom callbacks»" in line


def test_garbage_collection_closes_a_client(fake: FakeFrontend) -> None:
    before = set(threading.enumerate())
    client = Client(fake.address)
    client.submit("p", greedy(3)).result(DEADLINE_S)
    del client
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE_S)
    assert set(threading.enumerate()) == before


def test_at_a_closed_door_the_error_names_the_limit_to_raise(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(closed_name(tmp_path / "full")))
        with pytest.raises(EngineDead, match=r"full takes no new connections: .*ulimit -n"):
            Client(f"ipc://{tmp_path}/full", connect_timeout_s=0.2)


def test_without_an_engine_the_error_names_the_address_and_the_mend(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(EngineDead, match=rf"{tmp_path}/none for 0.2 s.*engine-launch"):
        Client(f"ipc://{tmp_path}/none", connect_timeout_s=0.2)
    assert set(threading.enumerate()) == before


def test_an_unknown_keyword_is_answered_with_the_one_that_is_meant() -> None:
    with pytest.raises(TypeError, match=r"^Client\(\) has no keyword 'keyfile': did you mean key_file\?$"):
        Client("ipc:///nowhere", keyfile="x")  # type: ignore[arg-type]


def test_a_client_shows_the_model_once_it_is_known(fake: FakeFrontend, client: Client) -> None:
    before = repr(client)
    model = client.info().model
    assert model not in before.split() and repr(client).startswith(f"<Client {model} at ipc://")


@pytest.mark.parametrize("address", ["", "localhost:5555", "tcp://host", "ipc://" + "x" * 200, 5])
def test_an_invalid_address_is_refused_at_once(address: object) -> None:
    with pytest.raises(ValueError, match=r"ipc://|cannot connect"):
        Client(address)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), None, "5"])
def test_an_invalid_timeout_is_refused_at_once(timeout_s: object) -> None:
    with pytest.raises(RequestError, match="connect_timeout_s must be"):
        Client("ipc:///none", connect_timeout_s=timeout_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["bogus", None, 3])
def test_an_unknown_pause_mode_is_refused_before_it_is_sent(client: Client, mode: object) -> None:
    with pytest.raises(RequestError, match="mode must be keep, wait, abort"):
        client.pause(mode)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="model is None"):
        client.reload(None)  # type: ignore[arg-type]
    assert client.generate("p", greedy(3), use_tqdm=False)[0].finished


def test_a_program_without_close_ends_at_once(fake: FakeFrontend, tmp_path: Path) -> None:
    """The program needs no __main__ guard, torch, transformers or numpy, and imports fast."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, json, tokenloom\n"
        f"client = tokenloom.Client({fake.address!r})\n"
        "output = client.generate('p', tokenloom.SamplingParams(max_tokens=3), use_tqdm=False)\n"
        "client.submit('never read', tokenloom.SamplingParams(max_tokens=3))\n"
        "tokenloom.AsyncClient, tokenloom.LLM, tokenloom.AsyncLLM\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tqdm', 'tokenizers', 'psutil', 'jinja2', 'yaml'}\n"
        "print(json.dumps([output[0].outputs[0].text, sorted(heavy & set(sys.modules))]))\n"
    )
    result = subprocess.run([sys.executable, script], capture_output=True, timeout=DEADLINE_S, text=True, cwd=tmp_path)
    assert result.stderr == ""
    assert json.loads(result.stdout) == [expected_text("p", 3), []]
    assert result.returncode == 0

"""Loads, names and requests' adapters at the Frontend: a request keeps the adapter that its name stood for."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tokenloom.frontend.server.adapters.desk import AdapterDesk
from tokenloom.frontend.server.adapters.names_file import FILE_NAME
from tokenloom.frontend.server.adapters.registry import digests_of
from tokenloom.ipc.codec import encode
from tokenloom.ipc.errors import ConfigError, TokenloomError
from tokenloom.ipc.messages.adapter import AdapterInfo, AdapterRef
from tokenloom.ipc.messages.client import (
    Abort,
    Accepted,
    Adapters,
    Child,
    ClientMessage,
    Control,
    Done,
    ListAdapters,
    LoadAdapter,
    QueryFailed,
    UnloadAdapter,
)
from tokenloom.ipc.messages.core import EngineControl, Finished
from tokenloom.ipc.spec.adapters.digest import adapter_digest
from tokenloom.tests.frontend.bench import DEADLINE_S, Bench, ids, new_submit
from tokenloom.tests.frontend.server.adapters.samples import adapter_spec, write_adapter


class AdapterBench(Bench):
    """A Bench of an engine that serves adapters; its frontend may be replaced."""

    def __init__(self, run_directory: Path, **options: Any) -> None:
        spec = adapter_spec(run_directory, **options)
        super().__init__(config=spec.config, run_directory=spec.run_directory)
        assert self.frontend.adapters.registry is not None
        self.folder, self.registry = run_directory.parent, self.frontend.adapters.registry

    def adapter(self, name: str = "a", **fields: Any) -> Path:
        """Write an adapter beside the run directory."""
        return write_adapter(self.folder / name, **fields)

    def load(self, name: str, path: Path, **fields: Any) -> None:
        assert self.ask(LoadAdapter(query_id=1, name=name, path=str(path), **fields)) == [Done(query_id=1)]

    def failure(self, query: ClientMessage) -> str:
        (failed,) = self.ask(query)
        assert isinstance(failed, QueryFailed) and failed.error.kind == "request" and "\n" not in failed.error.message
        return failed.error.message

    def load_failure(self, name: str, path: object, **fields: Any) -> str:
        return self.failure(LoadAdapter(query_id=1, name=name, path=str(path), **fields))

    def adapters(self) -> list[AdapterInfo]:
        (reply,) = self.ask(ListAdapters(query_id=1))
        assert isinstance(reply, Adapters)
        return reply.adapters

    def names(self) -> list[str]:
        return [info.name for info in self.adapters()]

    def ref(self, request_id: str, adapter: str, **fields: Any) -> AdapterRef:
        """Submit a request with an adapter; return what the core gets of that."""
        found = self.core_request(request_id, adapter=adapter, **fields).adapter
        assert found is not None
        return found

    def error(self, adapter: str, **fields: Any) -> str:
        return self.refusal(new_submit("wrong", adapter=adapter, **fields)).message

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.wait_for_wakeup()


NewDesk = Callable[..., AdapterBench]
RESUMED: dict[str, Any] = {"attempt": 1, "children": [Child(output_token_ids=b"\5\0\0\0")]}


@pytest.fixture
def new_desk(tmp_path: Path) -> Iterator[NewDesk]:
    desks: list[AdapterBench] = []

    def new(run: str = "run", **options: Any) -> AdapterBench:
        desks.append(AdapterBench(tmp_path / run, **options))
        return desks[-1]

    yield new
    for desk in desks:
        desk.frontend.stop("the test ends")


@pytest.fixture
def desk(new_desk: NewDesk) -> AdapterBench:
    return new_desk()


def test_a_loaded_adapter_is_listed_and_reaches_the_core(desk: AdapterBench) -> None:
    source = desk.adapter("a", rank=4)
    desk.load("sql", source)
    (info,) = desk.adapters()
    digest = adapter_digest(source)
    assert (info.name, info.path, info.digest, info.rank) == ("sql", str(source), digest.hex(), 4)
    assert info.base == "sample" and info.loaded_at == desk.now + 1e9
    ref = desk.ref("r", "sql")
    assert (ref.digest, ref.rank) == (digest, 4)
    assert adapter_digest(Path(ref.folder)) == digest
    desk.core(accepted=[desk.to_core[-1].children[0].key])
    (accepted,) = desk.heard()
    assert isinstance(accepted, Accepted) and accepted.adapter_digest == digest
    assert desk.core_request("base").adapter is None
    assert desk.core_request("named", adapter="sample").adapter is None, "a name of the model itself"


def test_a_name_given_to_other_weights_serves_new_requests_at_once_and_leaves_the_open_ones(desk: AdapterBench) -> None:
    old, new = desk.adapter("a", seed=1), desk.adapter("b", seed=2)
    desk.load("sql", old)
    before = desk.ref("before", "sql")
    assert "'sql' has already been loaded. If you want" in desk.load_failure("sql", new)
    desk.load("sql", new, is_inplace=True)
    digests = (before.digest, desk.ref("after", "sql").digest)
    assert digests == (adapter_digest(old), adapter_digest(new))
    assert desk.ref("before", "sql", adapter_digest=before.digest, **RESUMED) == before


def test_unloading_changes_nothing_for_open_requests(desk: AdapterBench) -> None:
    source = desk.adapter()
    desk.load("sql", source)
    adapter = desk.ref("open", "sql")
    key = desk.to_core[-1].children[0].key
    shutil.rmtree(source)
    assert desk.ask(UnloadAdapter(query_id=1, name="sql")) == [Done(query_id=1)] and desk.names() == []
    assert "cannot be found" in desk.failure(UnloadAdapter(query_id=1, name="sql"))
    assert "the model 'sql' is not served here: this engine serves sample" in desk.error("sql")
    assert Path(adapter.folder).is_dir() and not desk.registry.may_drop(adapter.digest)
    desk.core(accepted=[key])
    desk.heard()
    desk.tokens((key, 0, ids("The")))
    assert desk.deltas()[0].text == "The"
    desk.say(Abort(request_id="open"))
    assert desk.registry.may_drop(adapter.digest), "its last request has ended"


def test_an_adapter_is_released_exactly_once_however_a_request_ends(desk: AdapterBench) -> None:
    desk.load("sql", desk.adapter())
    users, (info,) = desk.registry._num_users, desk.adapters()
    found: list[AdapterInfo | TokenloomError | None] = []
    desk.frontend.adapters.find("sql", found.append)
    assert found == [info] and not users, "to find is no use"
    digest = bytes.fromhex(info.digest)
    keys = [desk.core_request(name, adapter="sql").children[0].key for name in ("finishes", "aborted")]
    assert users[digest] == 2
    desk.core(finished=[Finished(key=keys[0], reason="length")])
    assert users[digest] == 1
    desk.say(Abort(request_id="aborted"))
    assert not users
    assert "min_tokens is 600" in desk.error("sql", params={"min_tokens": 600, "max_tokens": 700})
    assert not users
    desk.core_request("gone", adapter="sql")
    desk.frontend.on_client_lost(b"c", "gone", "")
    assert not users


def test_one_of_two_loads_of_a_name_at_once_is_refused(desk: AdapterBench) -> None:
    paths = [desk.adapter(f"a{number}", seed=number) for number in range(2)]
    replies = desk.ask(*(LoadAdapter(query_id=i, name="sql", path=str(path)) for i, path in enumerate(paths)))
    assert sorted(type(reply).__name__ for reply in replies) == ["Done", "QueryFailed"]
    (done,) = (reply for reply in replies if isinstance(reply, Done))
    assert desk.adapters()[0].path == str(paths[done.query_id])


def test_an_order_that_is_sent_again_is_carried_out_once(desk: AdapterBench) -> None:
    source = desk.adapter()
    desk.load("sql", source, order_id="one")
    desk.load("sql", source, order_id="one")
    assert "already been loaded" in desk.load_failure("sql", source, order_id="two")
    for _ in range(2):
        assert desk.ask(UnloadAdapter(query_id=1, name="sql", order_id="three")) == [Done(query_id=1)]
    desk.load("sql", source, order_id="four")


def test_the_next_frontend_and_another_run_resume_requests_with_their_adapter(
    desk: AdapterBench, new_desk: NewDesk, tmp_path: Path
) -> None:
    desk.load("sql", desk.adapter("a", seed=1))
    before = desk.ref("before", "sql")
    desk.load("sql", desk.adapter("b", seed=2), is_inplace=True)
    replaced, other = new_desk(), new_desk("run 2")
    assert replaced.names() == ["sql"]
    fields: dict[str, Any] = {"adapter": "sql", "adapter_digest": before.digest, **RESUMED}
    for each in (replaced, other):
        assert each.ref("before", **fields) == before
    assert not other.registry.may_drop(before.digest)
    assert digests_of(tmp_path / "run 2" / FILE_NAME) == {before.digest}, "for other engines of the store"
    shutil.rmtree(Path(before.folder))
    error = new_desk("run 3").refusal(new_submit(**fields))
    assert error.kind == "request" and "is not in" in error.message and "submit the request again" in error.message


def test_sub_folders_of_the_adapter_folder_are_found_on_first_use_and_once(new_desk: NewDesk, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    write_adapter(folder / "sql", rank=3)
    (folder / "empty").mkdir()
    (folder / "out").symlink_to(write_adapter(tmp_path / "outside"))
    desk = new_desk(adapter_folder=str(folder))
    assert desk.names() == []
    for request_id in ("one", "two"):
        desk.frontend.on_client_frame(b"c", encode(new_submit(request_id, adapter="sql")))
    desk.turn()
    desk.until(lambda: len(desk.to_core) == 2)
    assert {request.adapter.rank for request in desk.to_core} == {3}
    assert [(info.name, info.path) for info in desk.adapters()] == [("sql", str(folder / "sql"))]
    assert "the model 'nil' is not served here: this engine serves sample, sql" in desk.error("nil")
    for name in ("../outside", "..", ".", "x" * 256, "x" * 5000, "a\0b", "ü" * 200, "a\nb"):
        message = desk.error(name)
        assert "is not served here" in message and str(folder) not in message
    for path in ("x" * 256, "x/" * 3000, "a\0b"):
        assert "cannot be read" in desk.error("new", adapter_path=path)
    assert "adapter_config.json cannot be read" in desk.error("empty")
    assert "is not beneath --adapter-folder" in desk.error("out")


def test_a_path_in_a_request_loads_the_adapter_and_later_names_the_same(desk: AdapterBench) -> None:
    path = str(desk.adapter())
    first = desk.ref("one", "sql", adapter_path=path)
    assert desk.ref("two", "sql", adapter_path=path) == desk.ref("three", "sql") == first
    message = desk.error("sql", adapter_path="/elsewhere")
    assert f"the adapter 'sql' was loaded from {path}: choose another name" in message
    assert "leave out '..'" in desk.error("..", adapter_path=path)


def test_a_load_that_hangs_is_given_up_and_names_nothing_later(new_desk: NewDesk) -> None:
    desk = new_desk(start_timeout_s=5.0)
    goes_on, has_ended = threading.Event(), threading.Event()
    store = desk.frontend.adapters._store
    copy, discard = store.copy, store.discard

    def slow(source: Path, within: Path | None = None) -> Any:
        assert goes_on.wait(DEADLINE_S)
        return copy(source, within)

    store.copy, store.discard = slow, lambda copied: (discard(copied), has_ended.set())
    desk.frontend.on_client_frame(b"c", encode(LoadAdapter(query_id=1, name="sql", path=str(desk.adapter()))))
    desk.turn()
    assert desk.frontend.seconds_to_tick(desk.now) is not None
    desk.wait(4.0)
    assert desk.heard() == []
    desk.wait(1.5)
    (failed,) = desk.heard()
    assert isinstance(failed, QueryFailed) and "was not loaded within 5 s: check where" in failed.error.message
    goes_on.set()
    assert has_ended.wait(DEADLINE_S)
    desk.wait_for_wakeup()
    assert desk.heard() == [] and desk.names() == []


def test_a_request_that_is_aborted_while_its_adapter_loads_holds_nothing(desk: AdapterBench) -> None:
    source = desk.adapter()
    desk.frontend.on_client_frame(b"c", encode(new_submit("r", adapter="sql", adapter_path=str(source))))
    (delta,) = desk.news(Abort(request_id="r"))
    assert delta.finish_reason == "abort"
    desk.until(lambda: desk.names() == ["sql"])
    assert desk.to_core == []
    desk.until(lambda: not desk.registry._num_users)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors cannot be read"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json cannot be read"),
        (lambda folder: write_adapter(folder, value=float("nan")), "is NaN or infinite: train or save it again"),
    ],
)
def test_a_bad_adapter_fails_its_load_alone(desk: AdapterBench, change: Callable[[Path], object], reason: str) -> None:
    folder = desk.adapter()
    change(folder)
    message = desk.load_failure("sql", folder)
    assert reason in message and str(folder) in message
    assert reason in desk.error("sql", adapter_path=str(folder))
    assert desk.names() == []
    desk.load("sql", desk.adapter("good"))


def test_a_bad_name_or_missing_folder_fails_its_load(desk: AdapterBench) -> None:
    for name in ("..", "", "sample", "a/../b"):
        assert re.match(r"lora_name (is )?'", desk.load_failure(name, desk.adapter()))
    message = desk.load_failure("sql", "/nonexistent")
    assert message == "No adapter found for /nonexistent: there is no such folder on the engine's machine"


def test_without_enable_lora_everything_is_refused_and_nothing_is_written(bench: Bench, cache_folder: Path) -> None:
    for query in (LoadAdapter(query_id=1, name="a", path="/x"), UnloadAdapter(query_id=1, name="a")):
        (failed,) = bench.say(query)
        assert isinstance(failed, QueryFailed) and "start it with --enable-lora" in failed.error.message
    assert bench.say(ListAdapters(query_id=1)) == [Adapters(query_id=1, adapters=[])]
    assert "the model 'a' is not served here" in bench.refusal(new_submit(adapter="a")).message
    assert not os.path.exists(cache_folder)


def test_modules_of_the_command_line_are_loaded_at_the_start_and_not_again(tmp_path: Path) -> None:
    good, bad = write_adapter(tmp_path / "good"), write_adapter(tmp_path / "bad", value=float("nan"))
    broken = adapter_spec(tmp_path / "run 0", lora_modules=[f"bad={bad}"])
    with (
        closing(AdapterDesk(broken, lambda: None)) as desk,
        pytest.raises(ConfigError, match=r"modules bad: .* is NaN"),
    ):
        desk.load_modules()
    spec = adapter_spec(tmp_path / "run", lora_modules=[f"good={good}"])
    with closing(AdapterDesk(spec, lambda: None)) as first:
        first.load_modules()
        assert [info.name for info in first.infos] == ["good"]
        replies: list[object] = []
        first.answer(UnloadAdapter(query_id=1, name="good"), replies.append)
        assert replies == [Done(query_id=1)]
    with closing(AdapterDesk(spec, lambda: None)) as second:
        second.load_modules()
        assert second.infos == [], "the operator has unloaded it since the start"


def test_many_names_are_cut_in_errors(desk: AdapterBench) -> None:
    source = desk.adapter()
    for number in range(30):
        desk.load(f"a{number:02}", source)
    message = desk.error("x")
    assert message.endswith("a17, a18 and 11 more") and len(message) < 300


def test_a_prefetch_loads_blocks_of_an_adapter(new_desk: NewDesk, tmp_path: Path) -> None:
    desk = new_desk(kv_disk=str(tmp_path / "kv"))
    source = desk.adapter()
    desk.load("sql", source)
    for query_id, name in enumerate(("sql", "", "sample")):
        control = Control(query_id=query_id, action="prefetch_kv", prompt="The capital", adapter=name)
        assert desk.say(control) == []
    commands = [message for message in desk.to_core if isinstance(message, EngineControl)]
    assert [command.adapter_digest for command in commands] == [adapter_digest(source), b"", b""]
    message = desk.failure(Control(query_id=1, action="prefetch_kv", prompt="The capital", adapter="nil"))
    assert "the model 'nil' is not served here" in message

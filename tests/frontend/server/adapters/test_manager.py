"""Loads, names and requests' adapters at the Frontend: a request keeps the adapter that its name stood for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenloom.frontend.server.adapters.manager import AdapterManager
from tokenloom.frontend.server.adapters.names_file import FILE_NAME
from tokenloom.frontend.server.adapters.registry import digests_of
from tokenloom.frontend.server.helpers.task import run
from tokenloom.ipc.codec import encode
from tokenloom.ipc.errors import ConfigError
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
from tokenloom.ipc.messages.core import Finished, Prefetch
from tokenloom.ipc.spec.adapters.digest import adapter_digest
from tokenloom.tests.frontend.bench import DEADLINE_S, Bench, ids, new_submit
from tokenloom.tests.frontend.server.adapters.samples import adapter_spec, write_adapter
from tokenloom.tests.support.mounts import full, needs_mounts
from tokenloom.tests.support.outcomes import outcomes_of


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


NewRig = Callable[..., AdapterBench]
RESUMED: dict[str, Any] = {"attempt": 1, "children": [Child(output_token_ids=b"\5\0\0\0")]}


@pytest.fixture
def new_rig(tmp_path: Path) -> Iterator[NewRig]:
    rigs: list[AdapterBench] = []

    def new(run: str = "run", **options: Any) -> AdapterBench:
        rigs.append(AdapterBench(tmp_path / run, **options))
        return rigs[-1]

    yield new
    for rig in rigs:
        rig.frontend.stop("the test ends")


@pytest.fixture
def rig(new_rig: NewRig) -> AdapterBench:
    return new_rig()


def test_a_loaded_adapter_is_listed_and_reaches_the_core(rig: AdapterBench) -> None:
    source = rig.adapter("a", rank=4)
    rig.load("sql", source)
    (info,) = rig.adapters()
    digest = adapter_digest(source)
    assert (info.name, info.path, info.digest, info.rank) == ("sql", str(source), digest.hex(), 4)
    assert info.base == "sample" and info.loaded_at == rig.now + 1e9
    ref = rig.ref("r", "sql")
    assert (ref.digest, ref.rank) == (digest, 4)
    assert adapter_digest(Path(ref.folder)) == digest
    rig.core(accepted=[rig.to_core[-1].children[0].key])
    (accepted,) = rig.heard()
    assert isinstance(accepted, Accepted) and accepted.adapter_digest == digest
    assert rig.core_request("base").adapter is None
    assert rig.core_request("named", adapter="sample").adapter is None, "a name of the model itself"


def test_a_name_given_to_other_weights_serves_new_requests_at_once_and_leaves_the_open_ones(
    rig: AdapterBench,
) -> None:
    old, new = rig.adapter("a", seed=1), rig.adapter("b", seed=2)
    rig.load("sql", old)
    before = rig.ref("before", "sql")
    assert "'sql' has already been loaded. If you want" in rig.load_failure("sql", new)
    rig.load("sql", new, is_inplace=True)
    digests = (before.digest, rig.ref("after", "sql").digest)
    assert digests == (adapter_digest(old), adapter_digest(new))
    assert rig.ref("before", "sql", adapter_digest=before.digest, **RESUMED) == before


def test_unloading_changes_nothing_for_open_requests(rig: AdapterBench) -> None:
    source = rig.adapter()
    rig.load("sql", source)
    adapter = rig.ref("open", "sql")
    key = rig.to_core[-1].children[0].key
    shutil.rmtree(source)
    assert rig.ask(UnloadAdapter(query_id=1, name="sql")) == [Done(query_id=1)] and rig.names() == []
    assert "cannot be found" in rig.failure(UnloadAdapter(query_id=1, name="sql"))
    assert "the model 'sql' is not served here: this engine serves sample" in rig.error("sql")
    assert Path(adapter.folder).is_dir() and not rig.registry.may_drop(adapter.digest)
    rig.core(accepted=[key])
    rig.heard()
    rig.tokens((key, 0, ids("The")))
    assert rig.deltas()[0].text == "The"
    rig.say(Abort(request_id="open"))
    assert rig.registry.may_drop(adapter.digest), "its last request has ended"


def test_an_adapter_is_released_exactly_once_however_a_request_ends(rig: AdapterBench) -> None:
    rig.load("sql", rig.adapter())
    users, (info,) = rig.registry._num_users, rig.adapters()
    assert outcomes_of(rig.frontend.adapters.find("sql")) == [info] and not users, "to find is no use"
    digest = bytes.fromhex(info.digest)
    keys = [rig.core_request(name, adapter="sql").children[0].key for name in ("finishes", "aborted")]
    assert users[digest] == 2
    rig.core(finished=[Finished(key=keys[0], reason="length")])
    assert users[digest] == 1
    rig.say(Abort(request_id="aborted"))
    assert not users
    assert "min_tokens is 600" in rig.error("sql", params={"min_tokens": 600, "max_tokens": 700})
    assert not users
    rig.core_request("gone", adapter="sql")
    rig.frontend.on_client_lost(b"c", "gone", "")
    assert not users


def test_one_of_two_loads_of_a_name_at_once_is_refused(rig: AdapterBench) -> None:
    paths = [rig.adapter(f"a{number}", seed=number) for number in range(2)]
    replies = rig.ask(*(LoadAdapter(query_id=i, name="sql", path=str(path)) for i, path in enumerate(paths)))
    assert sorted(type(reply).__name__ for reply in replies) == ["Done", "QueryFailed"]
    (done,) = (reply for reply in replies if isinstance(reply, Done))
    assert rig.adapters()[0].path == str(paths[done.query_id])


def test_an_order_that_is_sent_again_is_carried_out_once(rig: AdapterBench) -> None:
    source = rig.adapter()
    rig.load("sql", source, order_id="one")
    rig.load("sql", source, order_id="one")
    assert "already been loaded" in rig.load_failure("sql", source, order_id="two")
    for _ in range(2):
        assert rig.ask(UnloadAdapter(query_id=1, name="sql", order_id="three")) == [Done(query_id=1)]
    rig.load("sql", source, order_id="four")


def test_the_next_frontend_and_another_run_resume_requests_with_their_adapter(
    rig: AdapterBench, new_rig: NewRig, tmp_path: Path
) -> None:
    rig.load("sql", rig.adapter("a", seed=1))
    before = rig.ref("before", "sql")
    rig.load("sql", rig.adapter("b", seed=2), is_inplace=True)
    replaced, other = new_rig(), new_rig("run 2")
    assert replaced.names() == ["sql"]
    fields: dict[str, Any] = {"adapter": "sql", "adapter_digest": before.digest, **RESUMED}
    for each in (replaced, other):
        assert each.ref("before", **fields) == before
    assert not other.registry.may_drop(before.digest)
    assert digests_of(tmp_path / "run 2" / FILE_NAME) == {before.digest}, "for other engines of the store"
    shutil.rmtree(Path(before.folder))
    error = new_rig("run 3").refusal(new_submit(**fields))
    assert error.kind == "request" and "is not in" in error.message and "submit the request again" in error.message


def test_sub_folders_of_the_adapter_folder_are_found_on_first_use_and_once(new_rig: NewRig, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    write_adapter(folder / "sql", rank=3)
    (folder / "empty").mkdir()
    (folder / "out").symlink_to(write_adapter(tmp_path / "outside"))
    rig = new_rig(adapter_folder=str(folder))
    assert rig.names() == []
    for request_id in ("one", "two"):
        rig.frontend.on_client_frame(b"c", encode(new_submit(request_id, adapter="sql")))
    rig.turn()
    rig.until(lambda: len(rig.to_core) == 2)
    assert {request.adapter.rank for request in rig.to_core} == {3}
    assert [(info.name, info.path) for info in rig.adapters()] == [("sql", str(folder / "sql"))]
    assert "the model 'nil' is not served here: this engine serves sample, sql" in rig.error("nil")
    for name in ("../outside", "..", ".", "x" * 256, "x" * 5000, "a\0b", "ü" * 200, "a\nb"):
        message = rig.error(name)
        assert "is not served here" in message and str(folder) not in message
    for path in ("x" * 256, "x/" * 3000, "a\0b"):
        assert "cannot be read" in rig.error("new", adapter_path=path)
    assert "adapter_config.json cannot be read" in rig.error("empty")
    assert "is not beneath --adapter-folder" in rig.error("out")


def test_a_path_in_a_request_loads_the_adapter_and_later_names_the_same(rig: AdapterBench) -> None:
    path = str(rig.adapter())
    first = rig.ref("one", "sql", adapter_path=path)
    assert rig.ref("two", "sql", adapter_path=path) == rig.ref("three", "sql") == first
    message = rig.error("sql", adapter_path="/elsewhere")
    assert f"the adapter 'sql' was loaded from {path}: choose another name" in message
    assert "leave out '..'" in rig.error("..", adapter_path=path)


def test_a_load_that_hangs_is_given_up_and_names_nothing_later(new_rig: NewRig) -> None:
    rig = new_rig(start_timeout_s=5.0)
    goes_on, has_ended = threading.Event(), threading.Event()
    store = rig.frontend.adapters._store
    copy, discard = store.copy, store.discard

    def slow(source: Path, within: Path | None = None) -> Any:
        assert goes_on.wait(DEADLINE_S)
        return copy(source, within)

    store.copy, store.discard = slow, lambda copied: (discard(copied), has_ended.set())
    rig.frontend.on_client_frame(b"c", encode(LoadAdapter(query_id=1, name="sql", path=str(rig.adapter()))))
    rig.turn()
    assert rig.frontend.seconds_to_tick(rig.now) is not None
    rig.wait(4.0)
    assert rig.heard() == []
    rig.wait(1.5)
    (failed,) = rig.heard()
    assert isinstance(failed, QueryFailed) and "was not loaded within 5 s: check where" in failed.error.message
    goes_on.set()
    assert has_ended.wait(DEADLINE_S)
    rig.wait_for_wakeup()
    assert rig.heard() == [] and rig.names() == []


def test_a_request_that_is_aborted_while_its_adapter_loads_holds_nothing(rig: AdapterBench) -> None:
    source = rig.adapter()
    rig.frontend.on_client_frame(b"c", encode(new_submit("r", adapter="sql", adapter_path=str(source))))
    (delta,) = rig.news(Abort(request_id="r"))
    assert delta.finish_reason == "abort"
    rig.until(lambda: rig.names() == ["sql"])
    assert rig.to_core == []
    rig.until(lambda: not rig.registry._num_users)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors cannot be read"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json cannot be read"),
        (lambda folder: write_adapter(folder, value=float("nan")), "is NaN or infinite: train or save it again"),
    ],
)
def test_a_bad_adapter_fails_its_load_alone(rig: AdapterBench, change: Callable[[Path], object], reason: str) -> None:
    folder = rig.adapter()
    change(folder)
    message = rig.load_failure("sql", folder)
    assert reason in message and str(folder) in message
    assert reason in rig.error("sql", adapter_path=str(folder))
    assert rig.names() == []
    rig.load("sql", rig.adapter("good"))


def test_a_bad_name_or_missing_folder_fails_its_load(rig: AdapterBench) -> None:
    for name in ("..", "", "sample", "a/../b"):
        assert re.match(r"lora_name (is )?'", rig.load_failure(name, rig.adapter()))
    message = rig.load_failure("sql", "/nonexistent")
    assert message == "No adapter found for /nonexistent: there is no such folder on the engine's machine"


def test_without_enable_lora_everything_is_refused_and_nothing_is_written(bench: Bench, cache_folder: Path) -> None:
    for query in (LoadAdapter(query_id=1, name="a", path="/x"), UnloadAdapter(query_id=1, name="a")):
        (failed,) = bench.say(query)
        assert isinstance(failed, QueryFailed) and "start it with --enable-lora" in failed.error.message
    assert bench.say(ListAdapters(query_id=1)) == [Adapters(query_id=1, adapters=[])]
    assert "the model 'a' is not served here" in bench.refusal(new_submit(adapter="a")).message
    assert not os.path.exists(cache_folder)


def test_a_model_of_any_name_serves_every_name_but_those_of_adapters(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(adapter_spec(tmp_path / "run"), takes_any_name=True)
    with closing(AdapterManager(spec, lambda: None)) as manager:
        for name in ("claude-sonnet", "gpt-4o-mini", "sql"):
            assert outcomes_of(manager.find(name)) == [None]
            assert outcomes_of(manager.resolve(new_submit(adapter=name))) == [None]


def test_modules_of_the_command_line_are_loaded_at_the_start_and_not_again(tmp_path: Path) -> None:
    good, bad = write_adapter(tmp_path / "good"), write_adapter(tmp_path / "bad", value=float("nan"))
    broken = adapter_spec(tmp_path / "run 0", lora_modules=[f"bad={bad}"])
    with (
        closing(AdapterManager(broken, lambda: None)) as manager,
        pytest.raises(ConfigError, match=r"modules bad: .* is NaN"),
    ):
        manager.load_modules()
    spec = adapter_spec(tmp_path / "run", lora_modules=[f"good={good}"])
    with closing(AdapterManager(spec, lambda: None)) as first:
        first.load_modules()
        assert [info.name for info in first.infos] == ["good"]
        replies: list[object] = []
        run(first.answer(UnloadAdapter(query_id=1, name="good"), replies.append))
        assert replies == [Done(query_id=1)]
    with closing(AdapterManager(spec, lambda: None)) as second:
        second.load_modules()
        assert second.infos == [], "the operator has unloaded it since the start"


@needs_mounts
@pytest.mark.timeout(120)
def test_a_module_for_which_the_disk_has_no_room_is_refused_with_the_remedy(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tokenloom.frontend.server.adapters.manager import AdapterManager\n"
        "from tokenloom.tests.frontend.server.adapters.test_manager import adapter_spec\n"
        "spec = adapter_spec(Path(sys.argv[1]), lora_modules=['a=' + sys.argv[2]])\n"
        "try: AdapterManager(spec, lambda: None).load_modules()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    disk = tmp_path / "disk"
    disk.mkdir()
    source = write_adapter(tmp_path / "source")
    command = [*full(disk), sys.executable, "-P", "-c", program, str(tmp_path / "run"), str(source)]
    environment = os.environ | {"XDG_CACHE_HOME": str(disk)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd="/", env=environment)
    assert re.fullmatch(
        r"ConfigError --lora-modules a: \S+ cannot be copied to \S+: No space left on device: free space .*\n",
        done.stdout,
    )


def test_many_names_are_cut_in_errors(rig: AdapterBench) -> None:
    source = rig.adapter()
    for number in range(30):
        rig.load(f"a{number:02}", source)
    message = rig.error("x")
    assert message.endswith("a17, a18 and 11 more") and len(message) < 300


def test_a_prefetch_loads_blocks_of_an_adapter(new_rig: NewRig, tmp_path: Path) -> None:
    rig = new_rig(kv_disk=str(tmp_path / "kv"))
    source = rig.adapter()
    rig.load("sql", source)
    for query_id, name in enumerate(("sql", "", "sample")):
        control = Control(query_id=query_id, action="prefetch_kv", prompt="The capital", adapter=name)
        assert rig.say(control) == []
    commands = [message for message in rig.to_core if isinstance(message, Prefetch)]
    assert [command.adapter_digest for command in commands] == [adapter_digest(source), b"", b""]
    message = rig.failure(Control(query_id=1, action="prefetch_kv", prompt="The capital", adapter="nil"))
    assert "the model 'nil' is not served here" in message

"""The engine that a command means: at an address, of a model, or the one that runs."""

from __future__ import annotations

import msgspec
import pytest

from tokenloom.frontend.cli.engines import (
    age,
    check_address,
    choose,
    client_places,
    engine_at,
    engine_of,
    is_address,
    url_of,
)
from tokenloom.frontend.launcher.engine_record import EngineRecord
from tokenloom.ipc.errors import ConfigError


class Typist:
    """A terminal at which lines are typed; without lines nobody sits there."""

    def __init__(self, *lines: str) -> None:
        self.is_person, self._lines = bool(lines), iter(lines)
        self.shown = ""

    def ask(self, text: str) -> str:
        self.shown += text
        return next(self._lines)


def engine(model: str, http: str | None = None, *, is_private: bool = False) -> EngineRecord:
    return EngineRecord(
        pid=7, model=model, addresses=[f"ipc:///{model}"], started_at=0.0, http_address=http, is_private=is_private
    )


SMALL = engine("small", "http://127.0.0.1:8000")
OPEN = engine("open", "http://0.0.0.0:8001")
SECURE = engine("secure", "https://10.0.0.7:443")
PRIVATE = engine("private", is_private=True)
ALL = (SMALL, OPEN, SECURE, PRIVATE)


@pytest.mark.parametrize(
    "address, found",
    [
        ("ipc:///small", SMALL),
        ("ipc:///private", PRIVATE),
        ("http://localhost:8000", SMALL),
        ("http://127.0.0.1:8000/v1", SMALL),
        ("http://localhost:8001/", OPEN),
        ("https://10.0.0.7", SECURE),
        ("https://localhost", None),
        ("http://10.0.0.7:8000", None),
        ("http://localhost:8002", None),
        ("https://localhost:8000", None),
        ("tcp://10.0.0.7:5555", None),
    ],
)
def test_an_address_finds_the_engine_of_this_machine_that_serves_there(
    address: str, found: EngineRecord | None
) -> None:
    assert engine_at(address, ALL) == found


def test_a_word_that_is_no_address_is_refused_with_the_forms() -> None:
    with pytest.raises(ConfigError, match="ipc://, tcp://, http://, https://"):
        check_address("localhost:8000")


def test_the_page_of_a_model_is_no_address_of_an_engine() -> None:
    assert is_address("https://example.com/o/n") and is_address("ipc:///a")
    assert not is_address("https://huggingface.co/o/n") and not is_address("o/n")


def test_a_model_finds_the_public_engine_that_serves_it() -> None:
    assert engine_of("small", ALL) == SMALL
    assert engine_of("private", ALL) is None
    assert engine_of("demo", [EngineRecord(pid=1, model="tokenloom-demo", addresses=[], started_at=0.0)])


def test_without_a_name_the_only_public_engine_is_meant() -> None:
    assert choose([SMALL, PRIVATE], Typist()) == SMALL
    assert choose([PRIVATE], Typist()) is None


def test_of_several_engines_a_person_chooses_until_the_number_is_one_of_them() -> None:
    typist = Typist("x\n", "9\n", "2\n")
    assert choose(ALL, typist) == OPEN
    assert typist.shown.count("which one (1 to 3)?") == 3 and "http://127.0.0.1:8000" in typist.shown


@pytest.mark.parametrize(
    "typist, message",
    [(Typist(), "3 engines run, give the address of one: small http://127.0.0.1:8000 pid 7"), (Typist(""), "none was")],
)
def test_of_several_engines_none_is_taken_without_a_choice(typist: Typist, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(ALL, typist)


NOBODY = Typist()


@pytest.mark.parametrize(
    ("address", "places"),
    [
        (None, (["ipc:///small"], "own.key")),
        ("http://localhost:8000", (["ipc:///small"], "own.key")),
        ("ipc:///small", (["ipc:///small"], "own.key")),
        ("ipc:///elsewhere", (["ipc:///elsewhere"], None)),
        ("tcp://10.0.0.7:5555", (["tcp://10.0.0.7:5555"], None)),
    ],
)
def test_a_client_reaches_the_engine_that_runs_or_the_one_at_an_address(
    address: str | None, places: tuple[list[str], str | None]
) -> None:
    running = [msgspec.structs.replace(SMALL, key_file="own.key"), PRIVATE]
    assert client_places(address, None, running, NOBODY) == places
    assert client_places(address, "given.key", running, NOBODY).key_file == "given.key"


@pytest.mark.parametrize(
    ("address", "engines", "reason"),
    [
        (None, [PRIVATE], "no engine of this user runs: engine-launch serve MODEL starts one"),
        (None, ALL, "3 engines run, give the address of one: small"),
        ("http://10.0.0.7:8000", ALL, r"no engine of this user serves at http://10\.0\.0\.7:8000: give its ipc:// or"),
        ("localhost:8000", ALL, "is not an engine's address"),
    ],
)
def test_a_client_that_can_reach_no_engine_is_told_why(
    address: str | None, engines: list[EngineRecord], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        client_places(address, None, engines, NOBODY)


def test_a_model_of_the_hub_is_found_under_each_form_of_its_name() -> None:
    served = EngineRecord(pid=1, model="m", addresses=[], started_at=0.0, given_model="hf.co/o/n:Q4_0")
    assert engine_of("https://huggingface.co/o/n:Q4_0", [served]) == served
    assert engine_of("o/n", [served]) is None and engine_of("o/n:Q8_0", [served]) is None


def test_the_url_of_an_engine_is_one_that_this_machine_can_reach() -> None:
    assert [url_of(each) for each in (SMALL, OPEN, SECURE)] == [
        "http://127.0.0.1:8000",
        "http://127.0.0.1:8001",
        "https://10.0.0.7:443",
    ]
    assert url_of(engine("v6", "http://[::]:8000")) == "http://[::1]:8000"
    with pytest.raises(ConfigError, match=r"pid 7.* has no HTTP server"):
        url_of(engine("socket", "unix:/run/loom.sock"))


def test_an_age_is_one_number_with_its_unit() -> None:
    assert [age(seconds) for seconds in (-1.0, 59.9, 60.0, 7199.0, 90000.0)] == ["0 s", "59 s", "1 min", "1 h", "1 d"]

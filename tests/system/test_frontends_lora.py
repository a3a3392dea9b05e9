"""Two frontends of an engine share its adapters: a load, an unload or a replacement at one counts at the other at once,
and for one that takes the place of a lost one."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import httpx2
import pytest

from tokenloom import Client, RequestOutput, SamplingParams
from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.ipc.errors import RequestError
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.inputs.adapter_requests import linked_cache
from tokenloom.tests.support.adapters import write_adapters
from tokenloom.tests.support.today import at_night
from tokenloom.tests.system.launched import RECOVERY_S, LaunchedEngine, lost, serve
from tokenloom.tests.system.test_frontends import OPTIONS, clients, doors

__all__ = ["clients", "doors"]  # fixtures
PROMPT = "The capital of France is"
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
MODULE, FOUND, *LOADED = NAMES = ("module", "found", "one", "two")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for path, name in zip(write_adapters(folder, DEMO_FOLDER, len(NAMES)), NAMES, strict=True):
        path.rename(folder / name)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    runtime = tmp_path_factory.mktemp("frontends")
    lora = ["--enable-lora", "--max-loras", "2", "--adapter-folder", str(folder), "--allow-runtime-lora"]
    arguments = ["--device", "cpu", "--num-threads", "1", *OPTIONS, *lora, "--lora-modules", f"base={folder / MODULE}"]
    cache = linked_cache(tmp_path_factory.mktemp("cache") / "own")
    yield from serve(Engine(runtime, arguments, {"XDG_CACHE_HOME": str(cache)}))


def tokens(client: Client, name: str) -> list[int]:
    return list(client.generate(PROMPT, LONG, use_tqdm=False, model=name)[0].outputs[0].token_ids)


def names(door: httpx2.Client) -> list[str]:
    return [model["id"] for model in door.get("/v1/models").json()["data"]]


def order(door: httpx2.Client, action: str, name: str, status: int = 200, **more: object) -> None:
    response = door.post(f"/v1/{action}_lora_adapter", json={"lora_name": name, **more})
    assert response.status_code == status, response.text


def test_an_order_at_one_frontend_counts_at_the_other_as_soon_as_it_is_answered(
    clients: list[Client], doors: list[httpx2.Client]
) -> None:
    one, other = doors
    expected = {name: tokens(clients[0], name) for name in (FOUND, *LOADED)}
    assert len({*map(tuple, expected.values()), tuple(tokens(clients[1], "base"))}) == 4, "each changes the tokens"
    for turn in range(2):
        here, there, client = doors[turn % 2], doors[1 - turn % 2], clients[1 - turn % 2]
        order(here, "load", "sql", lora_path=LOADED[0])
        assert "sql" in names(there) and tokens(client, "sql") == expected[LOADED[0]]
        order(there, "load", "sql", 400, lora_path=LOADED[1])
        order(here, "load", "sql", lora_path=LOADED[1], load_inplace=True)
        assert tokens(client, "sql") == expected[LOADED[1]]
        order(there, "unload", "sql")
        assert "sql" not in names(here)
        order(here, "unload", "sql", 404)
        with pytest.raises(RequestError, match="the model 'sql' is not served here"):
            clients[turn % 2].generate(PROMPT, LONG, use_tqdm=False, model="sql")
    assert names(one) == names(other)


@pytest.mark.parametrize("place", [*at_night(0), 1])
def test_the_loss_of_a_frontend_after_a_load_changes_no_answer_and_no_name(
    engine: Engine, clients: list[Client], doors: list[httpx2.Client], place: int
) -> None:
    name = "frontend 1" if place else "frontend"
    expected = {each: tokens(clients[0], each) for each in (FOUND, *LOADED)}
    order(doors[place], "load", "moving", lora_path=LOADED[0])
    with Client(engine.addresses[::-1] if place else engine.addresses, reconnect_timeout_s=RECOVERY_S) as client:
        futures: list[Future[RequestOutput]] = [client.submit(PROMPT, LONG, model=each) for each in (FOUND, "moving")]
        next(client.stream(PROMPT, LONG, model="moving"))
        order(doors[place], "load", "moving", lora_path=LOADED[1], load_inplace=True)
        with lost(engine, name):
            assert tokens(clients[1 - place], "moving") == expected[LOADED[1]]
            found = [list(future.result(RECOVERY_S).outputs[0].token_ids) for future in futures]
        assert found == [expected[FOUND], expected[LOADED[0]]], "requests keep the content that the name stood for"
    assert tokens(clients[place], "moving") == expected[LOADED[1]]
    clients[place].unload_adapter("moving")
    assert {info.name for info in clients[1 - place].list_adapters()} == {"base", FOUND, *LOADED}


def test_a_start_with_a_bad_adapter_exits_with_2_and_one_line(tmp_path: Path) -> None:
    (bad,) = write_adapters(tmp_path / "adapters", DEMO_FOLDER, 1)
    file = bad / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + struct.pack("<f", math.nan))
    own = {"XDG_CACHE_HOME": str(linked_cache(tmp_path / "own"))}
    with LaunchedEngine(tmp_path, "--enable-lora", "--lora-modules", f"bad={bad}", more=own) as engine:
        assert engine.wait_exit() == 2
    (line,) = (line for line in engine.log().splitlines() if "INFO" not in line)
    assert "--lora-modules bad: " in line and str(bad) in line and "is NaN or infinite: train or save it again" in line

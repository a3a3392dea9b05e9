"""A search for a checkpoint holds nobody up and ends with a folder that can be reloaded, or with the reason."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tokenloom.frontend.checkpoint.resolve import resolve
from tokenloom.frontend.checkpoint.search import CheckpointSearch
from tokenloom.ipc.errors import InternalError, Overloaded, RequestError, TokenloomError
from tokenloom.ipc.sockets.addresses import RunDirectory
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.shortages import few_threads

DEADLINE_S = 20.0


class Searcher:
    def __init__(self, folder: Path) -> None:
        config = EngineConfig(model=str(tiny_checkpoint(folder / "one")), device="cpu")
        self.directory = RunDirectory(folder)
        self.woken = threading.Event()
        self.search = CheckpointSearch(resolve(config, self.directory), self.woken.set)

    def find(self, model: str) -> str | TokenloomError:
        found: list[str | TokenloomError] = []
        self.woken.clear()
        self.search.find(model, found.append)
        assert found == [] and self.woken.wait(DEADLINE_S)
        self.search.take()
        (result,) = found
        return result


@pytest.fixture
def searcher(tmp_path: Path) -> Searcher:
    return Searcher(tmp_path)


def test_a_checkpoint_of_the_same_shape_is_found_and_others_are_refused(searcher: Searcher, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "two", seed=2)
    assert searcher.find(str(other)) == str(other)
    larger = tiny_checkpoint(tmp_path / "three", num_hidden_layers=3)
    for model, message in (("", "reload needs a model"), ("nil", "the model nil"), (str(larger), "another")):
        error = searcher.find(model)
        assert isinstance(error, RequestError) and message in str(error)


def test_a_bug_in_a_search_is_its_result(searcher: Searcher) -> None:
    searcher.search = CheckpointSearch(None, searcher.woken.set)  # type: ignore[arg-type]
    error = searcher.find("demo")
    assert isinstance(error, InternalError) and "AttributeError" in str(error)


def test_a_search_without_a_thread_ends_at_once(searcher: Searcher) -> None:
    found: list[str | TokenloomError] = []
    with few_threads():
        searcher.search.find("demo", found.append)
    assert isinstance(found[0], Overloaded) and searcher.search.num_open == 0

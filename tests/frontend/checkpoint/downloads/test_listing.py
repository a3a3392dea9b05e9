"""The models in the hub's cache, each by the name that serves it, and the removal of one alone."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom.frontend.checkpoint.downloads.cached import CachedRepository
from tokenloom.frontend.checkpoint.downloads.fetch import fetch
from tokenloom.frontend.checkpoint.downloads.hub_name import HubName, parse_hub_name
from tokenloom.frontend.checkpoint.downloads.listing import (
    cached_model,
    cached_models,
    remove_files,
    remove_repository,
)
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.support.fake_hub import fake_hub

BYTES = random.Random(3).randbytes(9000)
NAMES = ["a/both", "a/both:Q8_0", "b/gguf:F16", "b/gguf:Q4_K_M", "b/two:x-Q4_0", "b/two:y-Q4_0", "c/plain"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineConfig]:
    """Fetch repositories of all kinds into a cache. All have the same commit, as copies of a repository have."""
    config = EngineConfig(download_dir=str(tmp_path))
    plain = {"config.json": b"{}", "model.safetensors": BYTES}
    with fake_hub(monkeypatch) as hub:
        hub.files["a/both"] = plain | {"m-Q8_0.gguf": BYTES[:2000]}
        hub.files["b/gguf"] = {
            "m-Q4_K_M.gguf": BYTES[:3000],
            "m-F16-00001-of-00002.gguf": BYTES[:4000],
            "m-F16-00002-of-00002.gguf": BYTES[:5000],
        }
        hub.files["b/two"] = {"x-Q4_0.gguf": BYTES[:1500], "y-Q4_0.gguf": BYTES[:1600]}
        hub.files["c/plain"] = plain
        for text in NAMES:
            fetch(name_of(text), None, text, config)
    yield config


def name_of(text: str) -> HubName:
    name = parse_hub_name(text)
    assert name is not None
    return name


def names_in(config: EngineConfig) -> list[str]:
    return [str(model.name) for model in cached_models(config)]


def test_each_model_is_listed_by_the_name_that_serves_it_with_its_bytes(config: EngineConfig) -> None:
    assert names_in(config) == NAMES
    sizes = [9002, 2000, 9000, 3000, 1500, 1600, 9002]
    for text, size in zip(NAMES, sizes, strict=True):
        model = cached_model(name_of(text), config)
        assert model is not None and str(model.name) == text and model.num_bytes == size, text
        assert model.place is not None and model.place.exists()


def test_a_name_without_a_tag_means_the_usual_file_and_an_unknown_one_nothing(config: EngineConfig) -> None:
    for text, meant in (("b/gguf", "b/gguf:Q4_K_M"), ("b/gguf:q4_k_m", "b/gguf:Q4_K_M"), ("a/both", "a/both")):
        model = cached_model(name_of(text), config)
        assert model is not None and str(model.name) == meant
    for text in ("b/gguf:Q2_K", "b/none", "c/plain:Q4_0"):
        assert cached_model(name_of(text), config) is None
    with pytest.raises(ConfigError, match="b/two has 2 GGUF files: name one, as b/two:x-Q4_0"):
        cached_model(name_of("b/two"), config)


@pytest.mark.parametrize("text", NAMES)
def test_a_removed_file_takes_its_bytes_along_and_leaves_all_others(text: str, config: EngineConfig) -> None:
    model = cached_model(name_of(text), config)
    assert model is not None
    if model.first is None:
        return
    assert remove_files(model, config) == model.num_bytes
    assert names_in(config) == [each for each in NAMES if each != text]
    assert not any(blob.exists() for blob in model.blobs)


@pytest.mark.parametrize("repository", ["a/both", "b/gguf", "c/plain"])
def test_a_removed_repository_leaves_those_with_the_same_commit(repository: str, config: EngineConfig) -> None:
    place = CachedRepository(repository, config)
    place.partial("e").write_bytes(b"xyz")
    whole = sum(path.stat().st_size for path in (place.folder / "blobs").iterdir())
    assert remove_repository(repository, config) == whole
    assert names_in(config) == [each for each in NAMES if each.partition(":")[0] != repository]
    assert not place.folder.exists()


def test_a_fetch_that_was_broken_off_is_listed_with_what_is_there(config: EngineConfig, tmp_path: Path) -> None:
    place = CachedRepository("z/part", config)
    place.blob("").mkdir(parents=True)
    place.partial("e").write_bytes(b"xyz")
    place.partial("empty").touch()
    (model,) = (each for each in cached_models(config) if each.name.repository == "z/part")
    assert model.place is None and model.num_bytes == 3
    os.truncate(place.partial("e"), 0)
    assert names_in(config) == NAMES


def test_a_cache_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert cached_models(EngineConfig(download_dir=str(tmp_path / "none"))) == []

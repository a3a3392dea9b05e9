"""Engines answer to the media of a GGUF model with an mmproj file as transformers does with the checkpoint of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom import RequestError
from tokenloom.scripts.bench.inputs.adapter_requests import linked_cache
from tokenloom.tests.support.mmproj_checkpoints import MMPROJ_MODELS
from tokenloom.tests.support.today import some
from tokenloom.tests.system.media_engine import Checker, make_requests, open_llm, run
from tokenloom.tests.system.media_families import make_gguf_models

NUM_REQUESTS = 6


@pytest.fixture(scope="module", autouse=True)
def _own_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep folders of GGUF files apart from those of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(linked_cache(tmp_path_factory.mktemp("cache") / "own")))
        yield


@pytest.mark.parametrize("name", some(list(MMPROJ_MODELS), 2))
def test_answers_to_media_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    models = make_gguf_models(tmp_path, name)
    requests = make_requests(models, 1, NUM_REQUESTS)
    with open_llm(models) as llm:
        Checker(models).check(requests, run(llm, models, requests))


def test_the_same_model_without_the_file_answers_to_text_and_names_what_is_missing(tmp_path: Path) -> None:
    models = make_gguf_models(tmp_path, "gemma3")
    requests = make_requests(models, 1, NUM_REQUESTS)
    with open_llm(models, mmproj="none") as llm:
        texts = [request for request in requests if not request.media]
        Checker(models).check(texts, run(llm, models, texts))
        with pytest.raises(RequestError, match="does not see images, as --mmproj none says"):
            run(llm, models, requests[:1])

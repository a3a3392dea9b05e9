"""Images and audio reach the engines behind a gateway, which share no files with it: the answers are those of an engine
that reads them itself, also while engines are lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import pytest

from tokenloom import Client, RequestOutput, SamplingParams
from tokenloom.ipc.sockets.keys import Keys
from tokenloom.scripts.chaos.chaos import VISION_MODEL, about_images
from tokenloom.tests.support.audio_checkpoints import audio_checkpoint
from tokenloom.tests.support.audio_configs import AUDIO_MODELS
from tokenloom.tests.support.chaos_work import check_equal, make_work
from tokenloom.tests.support.today import at_night
from tokenloom.tests.support.vision_checkpoints import vision_checkpoint
from tokenloom.tests.system.fleet import DEADLINE_S, Fleet, free_port, wait_running
from tokenloom.tests.system.launched import reconnecting
from tokenloom.tests.system.test_audio import samples, wav

AUDIO_MODEL = "qwen2_audio"
TIMES = 20  # so many that a fast machine does not end all before the engine is killed


class Kind(NamedTuple):
    """A kind of media: its model, and questions about it."""

    model: Callable[[Path], Path]
    submit: Callable[[Client, int], list[Future[RequestOutput]]]  # all requests, so many times


def submit_images(client: Client, count: int) -> list[Future[RequestOutput]]:
    rng = random.Random(7)
    work = about_images(make_work(rng)[:4], rng)
    return [client.submit(each.form, each.params) for each in work * count]


def submit_clips(client: Client, count: int) -> list[Future[RequestOutput]]:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=200, ignore_eos=True)
    prompt, clips = f"{AUDIO_MODELS[AUDIO_MODEL].audio} is", [wav(samples(seed, 0.5 + seed / 10)) for seed in range(8)]
    return [client.submit({"prompt": prompt, "multi_modal_data": {"audio": clip}}, params) for clip in clips * count]


KINDS = {
    "images": Kind(lambda folder: vision_checkpoint(folder, VISION_MODEL), submit_images),
    "audio": Kind(lambda folder: audio_checkpoint(folder, AUDIO_MODEL), submit_clips),
}


@pytest.fixture(scope="module", params=["images", *at_night("audio")])
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def fleet(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    Keys.generate().save(folder / "fleet.key")
    model, places = kind.model(folder / "model"), [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    fleet = Fleet(folder, folder / "fleet.key", places, options=["--model", str(model)])
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def calm(fleet: Fleet, kind: Kind) -> list[RequestOutput]:
    """The answers of the first engine at its own address, to which the media are sent."""
    with Client(fleet.engine(0).address) as client:
        return [future.result(timeout=DEADLINE_S) for future in kind.submit(client, 1)]


def test_media_of_a_gateway_reach_an_engine_also_after_it_has_dropped_them(
    fleet: Fleet, kind: Kind, calm: list[RequestOutput]
) -> None:
    found = []
    with reconnecting(fleet.gateway) as client:
        for _ in range(2):
            check_equal(calm, kind.submit(client, 1))
            found.append(fleet.blobs(1, "media"))
            for path in fleet.engine(1).runtime.rglob("media/*"):
                path.unlink()
    assert all(found), "it has no other way to the media"


def test_an_engine_that_is_killed_changes_no_answer_about_media(
    fleet: Fleet, kind: Kind, calm: list[RequestOutput]
) -> None:
    with reconnecting(fleet.gateway) as client:
        futures = kind.submit(client, TIMES)
        wait_running(client, 5)
        assert not all(future.done() for future in futures), "all have ended before the loss"
        fleet.kill(0)
        check_equal(calm * TIMES, futures)

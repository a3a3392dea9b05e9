"""A request with images reaches the core with their spans, and releases them at its end."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenloom.ipc.codec import decode_ids, encode, encode_ids
from tokenloom.ipc.messages.base import FinishReason
from tokenloom.ipc.messages.client import Abort, Accepted, GetInfo, Info, Medium, NeedMedia, PutMedium
from tokenloom.ipc.messages.core import Finished
from tokenloom.tests.frontend.bench import Bench, deltas_of, ids, new_submit
from tokenloom.tests.frontend.server.requests.fake_media import BAD, MARKER, fake_media, seeing_spec
from tokenloom.tests.support.outcomes import outcomes_of
from tokenloom.tests.support.waiting import wait_until

(PLACEHOLDER,) = ids(MARKER)


class SeeingBench(Bench):
    def __init__(self, folder: Path, **config: object) -> None:
        media, self.reader = fake_media(PLACEHOLDER)
        super().__init__(media=media, seeing=seeing_spec(folder, PLACEHOLDER, **config))

    def put(self, data: bytes) -> Medium:
        digest = hashlib.sha256(data).digest()
        self.say(PutMedium(digest=digest, data=memoryview(data)))
        return Medium(digest=digest)

    def error_of(self, *media: Medium, **fields: object) -> str:
        return self.refusal(new_submit(media=[*media], **fields)).message

    @property
    def num_pins(self) -> int:
        pins = self.frontend.media.store._pins
        return sum(user.startswith("job") for pin in [*pins.values()] for user in [*pin.users])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[SeeingBench]:
    bench = SeeingBench(tmp_path)
    yield bench
    bench.frontend.stop("the test is over")


def test_placeholders_are_expanded_and_spans_reach_each_core(bench: SeeingBench) -> None:
    media = [bench.put(b"abc"), bench.put(b"de")]
    fields: dict[str, Any] = {"prompt": f"a{MARKER}b{MARKER}", "media": media}
    request = bench.core_request(**fields)
    assert [(span.start, span.length) for span in request.media] == [(1, 3), (5, 2)]
    assert decode_ids(request.prompt_token_ids).tolist().count(PLACEHOLDER) == 5
    stored = bench.frontend.media.store.open(request.media[0].digest)
    assert stored is not None and bytes(stored) == b"file of abc"
    bench.core(accepted=[request.children[0].key])
    (accepted,) = bench.heard()
    assert isinstance(accepted, Accepted) and accepted.prompt_token_ids == request.prompt_token_ids
    for again in (bench.restart_core(), bench.core_request(**fields, attempt=1)):
        assert (again.media, again.prompt_token_ids) == (request.media, request.prompt_token_ids)
    assert bench.reader.reads == {b"abc": 1, b"de": 1}


def wait_for_no_pins(bench: SeeingBench) -> None:
    done = outcomes_of(bench.frontend.media.read([]).reply)  # behind the release
    while not done:
        bench.wait_for_wakeup()
    assert bench.num_pins == 0


@pytest.mark.parametrize("reason", ["stop", "abort"])
def test_the_end_of_a_request_releases_its_images(bench: SeeingBench, reason: FinishReason) -> None:
    key = bench.core_request(prompt=MARKER, media=[bench.put(b"abc")]).children[0].key
    assert bench.num_pins == 1
    if reason == "abort":
        bench.say(Abort(request_id="r"))
    else:
        bench.tokens((key, 0, [5]), accepted=[key], finished=[Finished(key=key, reason="stop")])
    wait_for_no_pins(bench)


def test_while_images_are_read_requests_end_before_they_reach_the_core_and_a_text_goes_first(
    bench: SeeingBench,
) -> None:
    bench.reader.held.add(b"abc")
    fields: dict[str, Any] = {"prompt": MARKER, "media": [bench.put(b"abc")]}
    bench.say(new_submit("aborted", **fields))
    wait_until(lambda: bench.reader.reads)
    bench.submit("text")
    bench.to_core.clear()
    (delta,) = bench.news(Abort(request_id="aborted"))
    assert delta.finish_reason == "abort"
    bench.say(new_submit("late", **fields, params={"timeout_s": 0.1}))
    bench.now += 1
    while not (heard := bench.heard()):
        bench.wait_for_wakeup()
    assert [each.finish_reason for each in deltas_of(heard)] == ["timeout"] and isinstance(heard[0], Accepted)
    bench.reader.held.clear()
    wait_for_no_pins(bench)
    assert not bench.to_core


def test_lost_bytes_are_asked_for_and_continue_the_request(bench: SeeingBench) -> None:
    digest = hashlib.sha256(b"abc").digest()
    messages = bench.ask(new_submit(prompt=MARKER, media=[Medium(digest=digest)], attempt=3))
    assert messages == [NeedMedia(request_id="r", attempt=3, digests=[digest])]
    bench.put(b"abc")
    while not bench.to_core:
        bench.wait_for_wakeup()
    assert bench.to_core[0].media[0].length == 3


def test_bad_media_and_placeholders_that_do_not_match_end_their_request_alone(tmp_path: Path) -> None:
    bench = SeeingBench(tmp_path, limit_mm_per_prompt={"image": 1})
    assert "image 1 of 1 cannot be taken: this is no image" in bench.error_of(bench.put(BAD), prompt=MARKER)
    assert "has 2 images, at most 1" in bench.error_of(*[bench.put(b"a")] * 2, prompt=MARKER * 2)
    params = {"truncate_prompt_tokens": 4}
    assert "truncate_prompt_tokens" in bench.error_of(bench.put(b"a"), prompt=MARKER, params=params)
    assert bench.error_of(prompt=f"a{MARKER}") == "the prompt has 1 placeholders, but 0 images"
    assert "2 placeholders, but 1 images" in bench.error_of(bench.put(b"abc"), prompt=MARKER * 2)
    assert "1 placeholders, but 0 images" in bench.error_of(prompt_token_ids=encode_ids([PLACEHOLDER]))
    assert bench.core_request(prompt=MARKER, media=[bench.put(b"abc")]).media
    (info,) = bench.say(GetInfo(query_id=1))
    assert isinstance(info, Info) and (info.modalities, info.max_media) == (["image"], {"image": 1})
    bench.frontend.stop("the test is over")


def test_the_bytes_of_an_image_are_not_copied_in_the_loop(bench: SeeingBench) -> None:
    data = bytes(20 << 20)
    frame = memoryview(encode(PutMedium(digest=hashlib.sha256(data).digest(), data=memoryview(data))))
    put, taken = bench.frontend.media.put, list[PutMedium]()
    bench.frontend.media.put = taken.append  # type: ignore[method-assign]
    tracemalloc.start()
    try:
        bench.frontend.on_client_frame(b"c", frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        bench.frontend.media.put = put  # type: ignore[method-assign]
    assert len(taken) == 1 and taken[0].data == data
    assert peak < 1 << 20

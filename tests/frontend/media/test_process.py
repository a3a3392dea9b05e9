"""Media processes read media of the blob store; one that ends or hangs costs at most its own medium."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tokenloom.frontend.media import host
from tokenloom.frontend.media.audio.audio_processor_config import AudioProcessorConfig
from tokenloom.frontend.media.host import MediaHost
from tokenloom.frontend.media.images.image_processor import process_image
from tokenloom.frontend.media.images.image_processor_config import ImageProcessorConfig, ImageSize
from tokenloom.frontend.media.link import MediaLink, may_go_on
from tokenloom.frontend.media.processor import Processor
from tokenloom.ipc.blobs.media_file import parse_media_file
from tokenloom.ipc.blobs.store import BlobStore
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.errors import InternalError, Overloaded, RequestError
from tokenloom.tests.frontend.media.audio.encoders import ENCODERS
from tokenloom.tests.frontend.media.audio.sound_files import compressed, stored, tone
from tokenloom.tests.frontend.media.images.image_files import encoded, new_pixels
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.shortages import few_descriptors, num_descriptors

DEADLINE_S = 60.0
CONFIG = ImageProcessorConfig(
    family="qwen2_vl",
    do_resize=True,
    size=ImageSize(shortest_edge=784, longest_edge=78400),
    resample=3,
    crop=None,
    square_color=None,
    patch_size=14,
    merge_size=2,
    num_class_embeds=0,
    tile_size=0,
    is_tiled=False,
    min_tiles=1,
    max_tiles=1,
)

AUDIO = AudioProcessorConfig(encoder=ENCODERS["voxtral"], max_audio_s=600.0)


class Bench:
    """A host, and the store that it shares with its processes."""

    def __init__(self, folder: Path, item_s: float, processor: Processor = CONFIG, **options: Any) -> None:
        spec = new_spec(run_directory=str(folder), config=EngineConfig(**({"media_processes": 1} | options)))
        self.store = BlobStore(folder / "media", spec.config.media_store_bytes)
        self.host = MediaHost(spec, processor, item_s)

    def put(self, seed: int = 0, width: int = 90, height: int = 60) -> bytes:
        return self.store.put(encoded(new_pixels(width, height, seed)), "test")

    def put_clip(self, seconds: float = 1.0, hertz: float = 440.0) -> bytes:
        return self.store.put(stored(tone(seconds, 16_000, hertz), 16_000, "WAV", "FLOAT"), "test")

    def processes(self) -> list[psutil.Process]:
        return [each for each in psutil.Process().children() if "media" in " ".join(each.cmdline())]


@asynccontextmanager
async def bench(folder: Path, item_s: float = DEADLINE_S, **options: Any) -> AsyncIterator[Bench]:
    found = Bench(folder, item_s, **options)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield found
    finally:
        found.host.close()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def test_image_of_the_store_becomes_a_media_file_of_the_store(tmp_path: Path) -> None:
    async def work() -> None:
        async with bench(tmp_path) as ours:
            image = new_pixels(90, 60)
            medium = await ours.host.read(ours.store.put(encoded(image), "test"), "image")
            content = ours.store.open(medium.digest)
            assert content is not None and len(content) == medium.num_bytes
            file = parse_media_file(content)
            expected = process_image(image, CONFIG)
            assert medium.grid == file.grid == expected.grid
            assert bytes(file.data) == np.asarray(expected.tiles[0]).tobytes()
            low = await ours.host.read(ours.store.put(encoded(image), "test"), "image", detail="low")
            assert low.digest == medium.digest  # below 512 × 512 anyway
            (process,) = ours.processes()
            assert process.nice() > psutil.Process().nice() and process.num_threads() == 2  # with its lifeline
            assert process.rlimit(psutil.RLIMIT_AS)[0] == 2 << 30
            assert os.getsid(process.pid) == process.pid

    run(work)


def test_error_of_an_image_is_its_callers_alone(tmp_path: Path) -> None:
    async def work() -> None:
        async with bench(tmp_path, max_image_pixels=10_000) as ours:
            bad, big = ours.store.put(b"II*\0" + bytes(40), "test"), ours.put(width=101, height=100)
            found = await asyncio.gather(
                *(ours.host.read(each, "image") for each in (bad, ours.put(), big, bytes(32))),
                ours.host.read(ours.put(), "image", detail="sharp"),
                return_exceptions=True,
            )
            assert "TIFF" in str(found[0]) and isinstance(found[0], RequestError)
            assert not isinstance(found[1], BaseException)
            assert "10100 in all, --max-image-pixels is 10000" in str(found[2])
            assert isinstance(found[3], Overloaded) and "left the store" in str(found[3])
            assert "detail is 'sharp'" in str(found[4])
            assert len(ours.processes()) == 1

    run(work)


@pytest.mark.parametrize("kind", ["error", "hang"])
def test_process_that_ends_or_hangs_is_replaced_and_the_image_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("TOKENLOOM_FAULTS", str(tmp_path))

    async def work() -> None:
        async with bench(tmp_path, item_s=2.0 if kind == "hang" else DEADLINE_S) as ours:
            await ours.host.read(ours.put(), "image")
            (first,) = ours.processes()
            fault = inject(tmp_path, "media.read", kind)
            await ours.host.read(ours.put(1), "image")
            assert not fault.exists() and not first.is_running()

    run(work)


def test_process_that_computes_on_a_busy_machine_has_its_time_of_a_processor() -> None:
    assert may_go_on(1.0, 1, 10.0) and may_go_on(9.9, 5, 10.0)
    assert not may_go_on(0.0, 1, 10.0), "it hangs"
    assert not may_go_on(0.3, 3, 10.0), "it hangs after a while"
    assert not may_go_on(10.0, 1, 10.0), "it takes too long"


def test_process_that_does_not_start_is_no_error_of_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")

    async def work() -> None:
        async with bench(tmp_path) as ours:
            with pytest.raises(Overloaded, match="a media process exited with code 1 at its start"):
                await ours.host.read(ours.put(), "image")

    run(work)


@pytest.mark.parametrize("num_left", [0, 1, 2, 3])
def test_without_descriptors_an_image_is_refused_and_the_next_one_is_read(tmp_path: Path, num_left: int) -> None:
    async def work() -> None:
        async with bench(tmp_path) as ours:
            source, before = ours.put(), num_descriptors()
            with few_descriptors(num_left), pytest.raises(Overloaded, match=r"not be started: .* \(ulimit -n"):
                await ours.host.read(source, "image")
            assert num_descriptors() == before
            assert (await ours.host.read(source, "image")).num_bytes

    run(work)


def test_image_that_ends_every_process_is_an_error_and_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENLOOM_FAULTS", str(tmp_path))

    async def work() -> None:
        async with bench(tmp_path) as ours:
            fault = inject(tmp_path, "media.read", "error always")
            with pytest.raises(RequestError, match=r"not be read in 2 tries: the process .* exited with code 1"):
                await ours.host.read(ours.put(), "image")
            fault.unlink()
            await ours.host.read(ours.put(), "image")

    run(work)


def test_process_killed_while_idle_costs_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        async with bench(tmp_path) as ours:
            await ours.host.read(ours.put(), "image")
            (process,) = ours.processes()
            process.kill()
            process.wait(DEADLINE_S)
            await ours.host.read(ours.put(1), "image")

    run(work)


def test_owners_take_turns_and_cancelled_images_are_dropped(tmp_path: Path) -> None:
    async def work() -> None:
        async with bench(tmp_path) as ours:
            order: list[str] = []

            async def read(name: str, owner: str) -> None:
                await ours.host.read(ours.put(len(order)), "image", owner=owner)
                order.append(name)

            names = [("a0", "a"), ("a1", "a"), ("a2", "a"), ("b0", "b"), ("b1", "b")]
            tasks = [asyncio.create_task(read(*each)) for each in names]
            await asyncio.sleep(0)
            tasks[2].cancel()
            await asyncio.wait(tasks)
            assert order == ["a0", "b0", "a1", "b1"]

    run(work)


def test_image_whose_caller_is_gone_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLOOM_FAULTS", str(tmp_path))

    async def work() -> None:
        async with bench(tmp_path, item_s=0.5) as ours:
            inject(tmp_path, "media.read", "hang always")
            num_lost = MediaLink.num_lost
            gone = asyncio.create_task(ours.host.read(ours.put(), "image"))
            while not ours.processes():
                await asyncio.sleep(0.01)
            gone.cancel()
            with pytest.raises(RequestError, match="in 2 tries: the process that decodes it took longer than"):
                await ours.host.read(ours.put(1), "image")
            assert MediaLink.num_lost == num_lost + 3

    run(work)


def test_full_store_is_overload_until_pins_are_released(tmp_path: Path) -> None:
    async def work() -> None:
        async with bench(tmp_path, media_store_bytes=100_000) as ours:
            other = ours.store.put(bytes(70_000), "other")
            source = ours.put(width=100, height=50)
            with pytest.raises(Overloaded, match="no room for"):
                await ours.host.read(source, "image")
            ours.store.unpin(other, "other")
            await ours.host.read(source, "image")

    run(work)


def test_close_ends_processes_and_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLOOM_FAULTS", str(tmp_path))

    async def work() -> None:
        async with bench(tmp_path) as ours:
            await ours.host.read(ours.put(), "image")
            (process,) = ours.processes()
            process.send_signal(signal.SIGSTOP)
            reads = [asyncio.create_task(ours.host.read(ours.put(each), "image")) for each in range(2)]
            await asyncio.sleep(0)
            ours.host.close()
            found = await asyncio.gather(*reads, return_exceptions=True)
            assert all(isinstance(each, InternalError) for each in found)
            assert not ours.processes()

    run(work)


def test_process_imports_neither_torch_nor_numpy_nor_transformers() -> None:
    script = (
        "import sys, tokenloom.frontend.media.process\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'tokenizers', 'jinja2') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=DEADLINE_S)
    assert found.stdout == "[]\n", found.stderr


def test_frontend_imports_no_pillow_with_the_host() -> None:
    script = "import sys, tokenloom.frontend.media.host; print('PIL' in sys.modules)"
    found = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=DEADLINE_S)
    assert found.stdout == "False\n", found.stderr


def test_clip_of_the_store_becomes_a_media_file_of_the_store(tmp_path: Path) -> None:
    async def work() -> None:
        async with bench(tmp_path, processor=AUDIO) as ours:
            medium = await ours.host.read(ours.put_clip(31.0), "audio")
            content = ours.store.open(medium.digest)
            assert content is not None and len(content) == medium.num_bytes
            file = parse_media_file(content)
            assert medium.grid == file.grid == (2, 1, 31 * 16_000) and file.shape == (1, 1, 31 * 16_000, 4)
            np.testing.assert_array_equal(np.frombuffer(file.data, "<f4"), tone(31.0, 16_000))
            (process,) = ours.processes()
            assert process.num_threads() == 2, "numpy computes in the thread that asks"
            assert process.memory_info().rss < 120 << 20

    run(work)


def test_pieces_of_a_clip_are_media_files_and_stay_until_the_next_answer(tmp_path: Path) -> None:
    async def work() -> None:
        async with bench(tmp_path, processor=AUDIO, media_store_bytes=16 << 20) as ours:
            pieces = await ours.host.read_pieces(ours.put_clip(65.0), 30.0)
            assert [each.start_s for each in pieces] == [0, *(each.end_s for each in pieces[:-1])]
            assert len(pieces) == 3 and pieces[-1].end_s == 65
            found = [ours.store.open(each.digest) for each in pieces]
            samples = [np.frombuffer(parse_media_file(each).data, "<f4") for each in found if each is not None]
            np.testing.assert_array_equal(np.concatenate(samples), tone(65.0, 16_000))

    run(work)


def test_pieces_are_released_when_there_is_no_room_for_all(tmp_path: Path) -> None:
    async def work() -> None:
        async with bench(tmp_path, processor=AUDIO, media_store_bytes=4_300_000) as ours:
            clip = ours.put_clip(33.0)  # 2.1 MB, and as much in its pieces
            other = ours.store.put(bytes(100_000), "other")
            with pytest.raises(Overloaded, match="no room for"):
                await ours.host.read_pieces(clip, 30.0)
            (process,) = ours.processes()
            assert not [each for each in process.open_files() if "media" in each.path], "nothing is pinned"
            ours.store.unpin(other, "other")
            assert len(await ours.host.read_pieces(clip, 30.0)) == 2
            assert len([each for each in process.open_files() if "media" in each.path]) == 2

    run(work)


def test_error_of_a_clip_is_its_callers_alone(tmp_path: Path) -> None:
    async def work() -> None:
        async with bench(tmp_path, processor=AUDIO, max_audio_s=2.0) as ours:
            video = ours.store.put(b"\0\0\0\x18ftypisom" + bytes(40), "test")
            silence = compressed(np.zeros(16_000 * 3600, np.int16), 16_000, "FLAC")
            found = await asyncio.gather(
                *(ours.host.read(each, "audio") for each in (video, ours.put_clip(), ours.put_clip(2.5))),
                ours.host.read(ours.store.put(silence, "test"), "audio"),
                ours.host.read(ours.put(), "audio"),
                return_exceptions=True,
            )
            assert isinstance(found[0], RequestError) and "MP4" in str(found[0])
            assert not isinstance(found[1], BaseException)
            assert "lasts 2.5 s, at most 2 s are read" in str(found[2])
            assert "lasts 3600.0 s, at most 2 s are read" in str(found[3])
            assert "PNG, an image" in str(found[4])
            assert len(ours.processes()) == 1

    run(work)


@pytest.mark.parametrize("kind", ["error always", "hang always"])
def test_clip_that_ends_every_process_is_an_error_and_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("TOKENLOOM_FAULTS", str(tmp_path))

    async def work() -> None:
        async with bench(tmp_path, item_s=0.5 if kind == "hang always" else DEADLINE_S, processor=AUDIO) as ours:
            fault = inject(tmp_path, "media.read", kind)
            monkeypatch.setattr(host, "AUDIO_SPEED", 10_000)
            with pytest.raises(RequestError, match=r"the audio clip could not be read in 2 tries: the process that"):
                await ours.host.read(ours.put_clip(), "audio")
            fault.unlink()
            ours.host._item_s = DEADLINE_S
            await ours.host.read(ours.put_clip(), "audio")

    run(work)

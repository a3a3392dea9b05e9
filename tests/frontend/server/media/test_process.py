"""Media processes read media of the blob store; one that ends or hangs costs at most its own medium."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tokenloom.frontend.server.media.decoder import MediaDecoder
from tokenloom.frontend.server.media.images.image_processor import process_image
from tokenloom.ipc.blobs.media_file import parse_media_file
from tokenloom.ipc.blobs.store import BlobStore
from tokenloom.ipc.errors import InternalError, Overloaded, RequestError
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.processors.audio_processor_config import AudioProcessorConfig
from tokenloom.ipc.spec.processors.image_processor_config import ImageProcessorConfig, ImageSize
from tokenloom.ipc.spec.processors.processor import Processor
from tokenloom.tests.frontend.server.media.audio.encoders import ENCODERS
from tokenloom.tests.frontend.server.media.audio.sound_files import compressed, stored, tone
from tokenloom.tests.frontend.server.media.images.image_files import encoded, new_pixels
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.in_loop import in_loop
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
    """A decoder, the store that it shares with its processes, and the folder of their faults."""

    def __init__(self, folder: Path, processor: Processor = CONFIG, item_s: float = DEADLINE_S, **options: Any) -> None:
        spec = new_spec(run_directory=str(folder), config=EngineConfig(**({"media_processes": 1} | options)))
        self.folder = folder
        self.store = BlobStore(folder / "media", spec.config.media_store_bytes)
        self.decoder = MediaDecoder(spec, processor, item_s)

        self.pinned: list[bytes] = []

    def put(self, content: bytes) -> bytes:
        self.pinned.append(self.store.put(content, "test"))
        return self.pinned[-1]

    def close(self) -> None:
        self.decoder.close()
        for digest in self.pinned:
            self.store.unpin(digest, "test")

    def put_image(self, seed: int = 0, width: int = 90, height: int = 60) -> bytes:
        return self.put(encoded(new_pixels(width, height, seed)))

    def put_clip(self, seconds: float = 1.0) -> bytes:
        return self.put(stored(tone(seconds, 16_000, 440.0), 16_000, "WAV", "FLOAT"))

    def content(self, digest: bytes) -> memoryview:
        content = self.store.open(digest)
        assert content is not None
        return content

    async def read(self, seed: int = 0) -> bytes:
        """Read an image; return the digest of its media file."""
        return (await self.decoder.read(self.put_image(seed), "image")).digest

    async def refusal(self, *read: Any, kind: type[Exception] = RequestError) -> str:
        with pytest.raises(kind) as caught:
            await self.decoder.read(*read)
        return str(caught.value)

    @property
    def processes(self) -> list[psutil.Process]:
        return [each for each in psutil.Process().children() if "media" in " ".join(each.cmdline())]


def with_bench(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test in a loop, with a bench of these options."""

    @asynccontextmanager
    async def context(folder: Path) -> AsyncIterator[Bench]:
        bench = Bench(folder, **options)
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield bench
        finally:
            bench.close()

    return in_loop(context)


@pytest.fixture(autouse=True)
def fault_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLOOM_FAULTS", str(tmp_path))


# ── images ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@with_bench()
async def test_image_of_the_store_becomes_a_media_file_of_the_store(bench: Bench) -> None:
    image = new_pixels(90, 60)
    medium = await bench.decoder.read(bench.put(encoded(image)), "image")
    content, expected = bench.content(medium.digest), process_image(image, CONFIG)
    file = parse_media_file(content)
    assert medium.grid == file.grid == expected.grid and medium.num_bytes == len(content)
    assert bytes(file.data) == np.asarray(expected.tiles[0]).tobytes()
    low = await bench.decoder.read(bench.put(encoded(image)), "image", "low")
    assert low.digest == medium.digest  # below 512 × 512 anyway
    (process,) = bench.processes
    assert process.nice() > psutil.Process().nice() and process.num_threads() == 2  # with its lifeline
    assert process.rlimit(psutil.RLIMIT_AS)[0] == 2 << 30
    assert os.getsid(process.pid) == process.pid


@with_bench(max_image_pixels=10_000)
async def test_error_of_an_image_is_its_callers_alone(bench: Bench) -> None:
    assert "TIFF" in await bench.refusal(bench.put(b"II*\0" + bytes(40)), "image")
    big = bench.put_image(width=101, height=100)
    assert "10100 in all, --max-image-pixels is 10000" in await bench.refusal(big, "image")
    assert "left the store" in await bench.refusal(bytes(32), "image", kind=Overloaded)
    assert "detail is 'sharp'" in await bench.refusal(bench.put_image(), "image", "sharp")
    assert await bench.read() and len(bench.processes) == 1


@with_bench(item_s=1.0)
async def test_process_that_ends_or_hangs_is_replaced_and_the_image_tried_again(bench: Bench) -> None:
    await bench.read()
    for number, kind in enumerate(("error", "hang"), 1):
        (first,) = bench.processes
        fault = inject(bench.folder, "media.read", kind)
        await bench.read(number)
        assert not fault.exists() and not first.is_running()


@with_bench()
async def test_process_that_does_not_start_is_no_error_of_the_image(bench: Bench) -> None:
    with pytest.MonkeyPatch.context() as context:
        context.setenv("PYTHONHOME", "/nonexistent")
        refusal = await bench.refusal(bench.put_image(), "image", kind=Overloaded)
    assert refusal.startswith("a media process exited with code 1 at its start")
    source, before = bench.put_image(), num_descriptors()
    for num_left in range(4):
        with few_descriptors(num_left):
            refusal = await bench.refusal(source, "image", kind=Overloaded)
        assert "not be started: " in refusal and " (ulimit -n" in refusal and num_descriptors() <= before
    assert (await bench.decoder.read(source, "image")).num_bytes


@with_bench()
async def test_process_killed_while_idle_costs_nothing(bench: Bench) -> None:
    await bench.read()
    (process,) = bench.processes
    process.kill()
    process.wait(DEADLINE_S)
    await bench.read(1)


@with_bench()
async def test_owners_take_turns_and_cancelled_images_are_dropped(bench: Bench) -> None:
    order: list[str] = []

    async def read(name: str) -> None:
        await bench.decoder.read(bench.put_image(len(order)), "image", owner=name[0])
        order.append(name)

    tasks = [asyncio.create_task(read(each)) for each in ("a0", "a1", "a2", "b0", "b1")]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert order == ["a0", "b0", "a1", "b1"]


@with_bench(media_store_bytes=100_000)
async def test_full_store_is_overload_until_pins_are_released(bench: Bench) -> None:
    other = bench.store.put(bytes(70_000), "other")
    source = bench.put_image(width=100, height=50)
    assert "no room for" in await bench.refusal(source, "image", kind=Overloaded)
    bench.store.unpin(other, "other")
    await bench.decoder.read(source, "image")


@with_bench()
async def test_close_ends_processes_and_callers(bench: Bench) -> None:
    await bench.read()
    (process,) = bench.processes
    process.send_signal(signal.SIGSTOP)
    reads = [asyncio.create_task(bench.read(each)) for each in range(2)]
    await asyncio.sleep(0)
    bench.decoder.close()
    found = await asyncio.gather(*reads, return_exceptions=True)
    assert all(isinstance(each, InternalError) for each in found) and not bench.processes


@pytest.mark.parametrize(
    ("module", "absent"),
    [("process", ("torch", "numpy", "transformers", "tokenizers", "jinja2")), ("decoder", ("PIL", "soundfile"))],
)
def test_process_and_decoder_import_no_more_than_they_need(module: str, absent: tuple[str, ...]) -> None:
    program = f"import sys, tokenloom.frontend.server.media.{module}; print([*set({absent}) & sys.modules.keys()])"
    found = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert found.stdout == "[]\n", found.stderr


# ── clips ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@with_bench(processor=AUDIO)
async def test_clip_of_the_store_becomes_a_media_file_of_the_store(bench: Bench) -> None:
    medium = await bench.decoder.read(bench.put_clip(31.0), "audio")
    content = bench.content(medium.digest)
    file = parse_media_file(content)
    assert medium.num_bytes == len(content)
    assert medium.grid == file.grid == (2, 1, 31 * 16_000) and file.shape == (1, 1, 31 * 16_000, 4)
    np.testing.assert_array_equal(np.frombuffer(file.data, "<f4"), tone(31.0, 16_000))
    (process,) = bench.processes
    assert process.num_threads() == 2, "numpy computes in the thread that asks"
    assert process.memory_info().rss < 120 << 20


@with_bench(processor=AUDIO, media_store_bytes=16 << 20)
async def test_pieces_of_a_clip_are_media_files_and_stay_until_the_next_answer(bench: Bench) -> None:
    pieces = await bench.decoder.read_pieces(bench.put_clip(65.0), 30.0)
    assert [each.start_s for each in pieces] == [0, *(each.end_s for each in pieces[:-1])]
    assert len(pieces) == 3 and pieces[-1].end_s == 65
    samples = [np.frombuffer(parse_media_file(bench.content(each.digest)).data, "<f4") for each in pieces]
    np.testing.assert_array_equal(np.concatenate(samples), tone(65.0, 16_000))


@with_bench(processor=AUDIO, media_store_bytes=4_300_000)
async def test_pieces_are_released_when_there_is_no_room_for_all(bench: Bench) -> None:
    clip, other = bench.put_clip(33.0), bench.store.put(bytes(100_000), "other")  # 2.1 MB, and as much in its pieces
    with pytest.raises(Overloaded, match="no room for"):
        await bench.decoder.read_pieces(clip, 30.0)
    (process,) = bench.processes
    assert not [each for each in process.open_files() if "media" in each.path], "nothing is pinned"
    bench.store.unpin(other, "other")
    assert len(await bench.decoder.read_pieces(clip, 30.0)) == 2
    assert len([each for each in process.open_files() if "media" in each.path]) == 2


@with_bench(processor=AUDIO, max_audio_s=2.0)
async def test_error_of_a_clip_is_its_callers_alone(bench: Bench) -> None:
    silence = compressed(np.zeros(16_000 * 600, np.int16), 16_000, "FLAC")
    for source, complaint in (
        (bench.put(b"\0\0\0\x18ftypisom" + bytes(40)), "MP4"),
        (bench.put_clip(2.5), "lasts 2.5 s, at most 2 s are read"),
        (bench.put(silence), "lasts 600.0 s, at most 2 s are read"),
        (bench.put_image(), "PNG, an image"),
    ):
        assert complaint in await bench.refusal(source, "audio")
    assert await bench.decoder.read(bench.put_clip(), "audio") and len(bench.processes) == 1


@with_bench(processor=AUDIO, item_s=0.5, max_audio_s=10.0)
async def test_clip_that_ends_every_process_is_an_error_unless_its_caller_is_gone(bench: Bench) -> None:
    fault = inject(bench.folder, "media.read", "hang always")
    gone = asyncio.create_task(bench.decoder.read(bench.put_clip(), "audio"))
    while not bench.processes:
        await asyncio.sleep(0.01)
    gone.cancel()
    await asyncio.wait([gone])
    refusal = await bench.refusal(bench.put_clip(), "audio")
    assert "clip could not be read in 2 tries: the process that decodes it took longer than 0.6 s" in refusal
    assert bench.decoder._pool._idle[0].num_lost == 3
    fault = inject(bench.folder, "media.read", "error always")
    assert "exited with code 1: send a smaller one" in await bench.refusal(bench.put_clip(), "audio")
    fault.unlink()
    await bench.decoder.read(bench.put_clip(), "audio")

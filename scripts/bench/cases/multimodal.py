"""Measure requests with images or audio: encodes, the first token, the stall of others, throughput and memory.

    engine-launch bench multimodal vision-135m --rounds 5 --with-transformers
    engine-launch bench multimodal --audio --rounds 5

MODEL is a folder or vision-135m, a random model with the shape of Qwen2.5-VL and 135 M parameters of text.
Measured, with images of --side pixels on each side that no one has sent before:

    one image      --requests requests with one image at once: how often it is encoded
    first token    the second of two requests that differ in 16 last words: with an image, and with a text as long
    others         the time between tokens of --rows answers, without images and while images arrive at half of the rate
                   that the engine reaches; beside it the time that an image takes in one piece
    throughput     --batch requests with an image each at once; --with-transformers: beside transformers' generate
    many           --many small distinct images: memory of each process and bytes of the store, at several points
    memory         resident bytes of frontend and media process, above those of a frontend of text requests

With --audio, clips that no one has sent before; MODEL is a folder, whisper-tiny or audio-135m, both if it is left out:

    Whisper        transcripts of --clip-s seconds in --transcript tokens, alone and --batch at once, in turn with those
                   of transformers' generate: seconds of audio a second
    others         the time between tokens of --rows answers while --clips requests with clips of --short-s seconds come
                   at once, or with texts as long, and without them before and after
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenloom import AsyncClient
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.inputs.audio_requests import (
    WRITERS,
    ClipCall,
    TransformersWhisper,
    clip_file,
    clip_samples,
    find_audio_checkpoint,
    transcribe_all,
)
from tokenloom.scripts.bench.inputs.image_requests import (
    Call,
    encodes,
    find_vision_checkpoint,
    folder_bytes,
    image_file,
    resident_bytes,
    run_all,
    words,
)
from tokenloom.scripts.bench.report import Report, median, percentile
from tokenloom.scripts.bench.runner import Case, Setup

NUM_SUFFIX = 16  # words
STORE_BYTES = 64 << 20  # for many images, as the next: both are full long before the end
POOL_BYTES = 512 << 20
WARM_UP_TOKENS = 24  # of each answer
Part = Callable[[AsyncClient, Report, argparse.Namespace, Engine], Awaitable[None]]


def picture(arguments: argparse.Namespace, seed: object) -> bytes:
    return image_file(seed, arguments.side, arguments.side)


async def measure_one_image(client: AsyncClient, report: Report, arguments: argparse.Namespace, _: Engine) -> None:
    """Send requests with one image at once and count its encodes."""
    file, before = picture(arguments, "one"), await encodes(client)
    calls = [Call(f"{words(number, 8)}", [file], 4) for number in range(arguments.num_requests)]
    seconds = await run_all(client, calls)
    count = await encodes(client) - before
    report.note(f"encodes of one image in {arguments.num_requests} requests", count)
    report.add(part="one image", prompt_tokens=calls[0].num_prompt_tokens, seconds=seconds)


async def measure_first_token(client: AsyncClient, report: Report, arguments: argparse.Namespace, _: Engine) -> None:
    """Send two requests that differ in their ends, with an image and with a text of as many tokens."""
    ratios, others = [], []
    for number in range(arguments.rounds):
        file = picture(arguments, f"first {number}")
        cold, warm = (Call(f"{words(f'{number} {turn}', NUM_SUFFIX)}", [file]) for turn in range(2))
        await cold.run(client)
        await warm.run(client)
        text = await text_of(client, f"text {number}", cold.num_prompt_tokens - NUM_SUFFIX)
        text_cold, text_warm = (Call(f"{text} {words(f'{number} {turn}', NUM_SUFFIX)}") for turn in range(2))
        await text_cold.run(client)
        await text_warm.run(client)
        ratios.append(warm.first_token_s / text_warm.first_token_s)
        others.append((cold, warm, text_cold, text_warm))
    for name, index in (("image", 0), ("image again", 1), ("text", 2), ("text again", 3)):
        calls = [each[index] for each in others]
        report.add(
            part=name,
            prompt_tokens=calls[0].num_prompt_tokens,
            uncached_tokens=calls[0].num_prompt_tokens - calls[0].num_cached_tokens,
            ttft_ms=1e3 * median([call.first_token_s for call in calls]),
        )
    report.note("first token of the second request with an image, relative to one of text", median(ratios))


async def text_of(client: AsyncClient, seed: object, num_tokens: int) -> str:
    """Return random words of about `num_tokens` tokens."""
    num_words = 100
    found = len(await client.tokenize(words("length", num_words)))
    return words(seed, max(1, num_tokens * num_words // found))


async def measure_others(client: AsyncClient, report: Report, arguments: argparse.Namespace, _: Engine) -> None:
    """Measure the time between tokens of decoding requests while images arrive, and without them before and after."""
    alone = [Call("What?", [picture(arguments, f"rate {number}")]) for number in range(2)]
    for call in alone:
        await call.run(client)
    text = Call(await text_of(client, "as long", alone[0].num_prompt_tokens))
    await text.run(client)
    image_s = median([call.first_token_s for call in alone])
    whole_s, period_s = image_s - text.first_token_s, 2 * image_s  # with its decoding; half of the rate
    coming = [Call("What?", [picture(arguments, f"late {number}")]) for number in range(arguments.images)]

    async def send() -> None:
        tasks, begun = [], time.perf_counter()
        for number, call in enumerate(coming):
            tasks.append(asyncio.create_task(call.run(client)))
            await asyncio.sleep(max(0.0, begun + period_s * (number + 1) - time.perf_counter()))
        await asyncio.gather(*tasks)

    calm, during = await measure_rows(client, arguments, send)
    report_rows(report, "images", calm, during, coming)
    report.note("p99 between tokens beside images, relative to none", percentile(during, 99) / percentile(calm, 99))
    report.note("seconds between images", period_s)
    report.note("an image alone, with its decoding, relative to the p99 without", whole_s / percentile(calm, 99))


async def measure_rows(
    client: AsyncClient, arguments: argparse.Namespace, send: Callable[[], Awaitable[object]]
) -> tuple[list[float], list[float]]:
    """Return the seconds between tokens of decoding requests without others, before and after `send`, and during it."""
    rows = [Call(words(f"row {row}", 16), num_out=arguments.num_out) for row in range(arguments.rows)]
    running = [asyncio.create_task(row.run(client)) for row in rows]
    calm_from = await reach(rows, WARM_UP_TOKENS)
    sent = await reach(rows, WARM_UP_TOKENS + arguments.num_out // 8)
    await send()
    ended = time.perf_counter()
    await reach(rows, max(len(row.times) for row in rows) + arguments.num_out // 8)
    closed = time.perf_counter()
    is_over = [row.done() for row in running]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    if any(is_over):
        raise SystemExit("answers ended before the others: raise --out")
    calm = [gap for row in rows for gap in (*row.gaps(calm_from, sent), *row.gaps(ended, closed))]
    return calm, [gap for row in rows for gap in row.gaps(sent, ended)]


def report_rows(report: Report, name: str, calm: list[float], during: list[float], coming: Sequence[Call]) -> None:
    for part, gaps in (("rows alone", calm), (f"rows beside {name}", during)):
        report.add(
            part=part,
            itl_p50_ms=1e3 * median(gaps),
            itl_p99_ms=1e3 * percentile(gaps, 99),
            itl_max_ms=1e3 * max(gaps),
            ttft_ms=1e3 * median([call.first_token_s for call in coming]) if gaps is during else None,
        )


async def reach(calls: list[Call], num_tokens: int) -> float:
    """Wait until all calls have `num_tokens` tokens; return the time."""
    while not all(len(call.times) >= num_tokens for call in calls):
        await asyncio.sleep(0.005)
    return time.perf_counter()


async def measure_throughput(client: AsyncClient, report: Report, arguments: argparse.Namespace, _: Engine) -> None:
    """Run batches of requests with an image each."""
    rates = []
    for number in range(arguments.rounds):
        seconds = await run_all(client, batch_of(arguments, number))
        rates.append(arguments.batch / seconds)
    report.add(part=f"batch of {arguments.batch}", requests_per_s=median(rates))


def batch_of(arguments: argparse.Namespace, number: int) -> list[Call]:
    names = [f"batch {number} {row}" for row in range(arguments.batch)]
    return [Call(f"{words(0, 8)}", [picture(arguments, name)], arguments.batch_out) for name in names]


def measure_transformers(folder: Path, report: Report, arguments: argparse.Namespace) -> float:
    """Run the batches with transformers in this process; return the requests per second."""
    import torch
    from PIL import Image

    from tokenloom.tests.support.vision_oracle import VisionOracle

    torch.set_num_threads(arguments.threads)
    oracle = VisionOracle(folder, torch.bfloat16)
    rates = []
    for number in range(arguments.rounds):
        calls = batch_of(arguments, number)
        begun = time.perf_counter()
        oracle.generate_batch(
            [(oracle.chat(call.messages), [Image.open(io.BytesIO(call.images[0])).convert("RGB")]) for call in calls],
            arguments.batch_out,
            min_tokens=arguments.batch_out,
        )
        rates.append(arguments.batch / (time.perf_counter() - begun))
    report.add(part=f"transformers, batch of {arguments.batch}", requests_per_s=median(rates))
    return median(rates)


async def measure_many(client: AsyncClient, report: Report, arguments: argparse.Namespace, engine: Engine) -> None:
    """Send small distinct images; print memory and the store's size at several points."""
    marks = {max(1, arguments.many * tenth // 10) for tenth in (1, 2, 5, 10)}
    gate = asyncio.Semaphore(32)

    async def send(number: int) -> None:
        async with gate:
            await Call(f"{number}", [image_file(f"many {number}", 56, 56)]).run(client)

    done, begun = 0, time.perf_counter()
    for mark in sorted(marks):
        await asyncio.gather(*(send(number) for number in range(done, mark)))
        done = mark
        memory = {f"{name} MB": size / 1e6 for name, size in resident_bytes(engine.processes()).items()}
        store = sum(folder_bytes(path) for path in engine.runtime.rglob("media") if path.is_dir())
        report.note(f"after {done} distinct images", {"store MB": store / 1e6, **memory})
    report.add(part=f"{arguments.many} images", requests_per_s=arguments.many / (time.perf_counter() - begun))


def measure_memory(folder: Path, report: Report, arguments: argparse.Namespace) -> None:
    """Compare the frontend of text requests with frontend and media process after images."""

    async def ask(address: str, *, has_images: bool) -> None:
        async with AsyncClient(address) as client:
            for number in range(8):
                images = [picture(arguments, f"memory {number}")] if has_images else []
                await Call(words(number, 30), images).run(client)

    def host_bytes(engine: Engine) -> int:
        found = resident_bytes(engine.processes())
        return sum(size for name, size in found.items() if name.startswith(("tokenloom frontend", "tokenloom media")))

    sizes = {}
    for has_images in (False, True):
        with tempfile.TemporaryDirectory() as runtime, open_engine(folder, arguments, Path(runtime)) as engine:
            engine.wait_ready()
            asyncio.run(ask(engine.address, has_images=has_images))
            sizes[has_images] = host_bytes(engine)
            engine.stop()
    report.note("frontend and media process above a frontend of text, MB", (sizes[True] - sizes[False]) / 1e6)


async def measure_clips(address: str, report: Report, arguments: argparse.Namespace) -> None:
    """Measure the time between tokens of decoding requests while requests with clips come at once, and while as many
    requests with texts of the same length come."""
    found: dict[str, tuple[list[float], list[float], list[Call]]] = {}
    ratios: dict[str, list[float]] = {}
    async with AsyncClient(address) as client:
        sample = ClipCall("What?", num_out=4, clip=clip_file("warm-up", arguments.short_s))
        await sample.run(client)
        for number in range(arguments.rounds):
            seeds = [f"clip {number} {each}" for each in range(arguments.clips)]
            clips = [ClipCall("What?", clip=clip_file(seed, arguments.short_s)) for seed in seeds]
            texts = [Call(await text_of(client, seed, sample.num_prompt_tokens)) for seed in seeds]
            for name, coming in (("clips", clips), ("texts", texts)):
                calm, during = await measure_rows(client, arguments, partial(run_all, client, coming))
                ratios.setdefault(name, []).append(percentile(during, 99) / percentile(calm, 99))
                known = found.setdefault(name, ([], [], []))
                for kept, new in zip(known, (calm, during, coming), strict=True):
                    kept.extend(new)  # type: ignore[arg-type, attr-defined]
    for name, (calm, during, calls) in found.items():
        report_rows(report, f"{arguments.clips} {name} at once", calm, during, calls)
        report.note(f"p99 between tokens beside {name}, relative to none, median of the rounds", median(ratios[name]))
        report.note(f"of each round with {name}", ratios[name])
    report.note("tokens of a clip's prompt", sample.num_prompt_tokens)


def measure_transcripts(folder: Path, report: Report, arguments: argparse.Namespace) -> None:
    """Transcribe by the engine and by transformers in turn."""
    peer = TransformersWhisper(folder, arguments.threads)
    seconds: dict[tuple[int, str], list[float]] = {}

    async def run(address: str) -> None:
        async with AsyncClient(address) as client:
            for number in range(-1, arguments.rounds):  # the first warms up
                for batch in (1, arguments.batch):
                    names = [f"speech {number} {batch} {each}" for each in range(batch)]
                    ours = await transcribe_all(
                        client, [clip_file(name, arguments.clip_s) for name in names], arguments.transcript
                    )
                    theirs = peer.transcribe_all(
                        [clip_samples(name, arguments.clip_s) for name in names], arguments.transcript
                    )
                    if number >= 0:
                        seconds.setdefault((batch, "engine"), []).append(ours)
                        seconds.setdefault((batch, "transformers"), []).append(theirs)

    run_engine(folder, arguments, run)
    for (batch, name), found in seconds.items():
        report.add(
            part=f"{name}, {batch} at once",
            audio_s_per_s=batch * arguments.clip_s / median(found),
            clip_s=median(found) / batch,
        )
    for batch in dict.fromkeys((1, arguments.batch)):
        pairs = zip(seconds[batch, "transformers"], seconds[batch, "engine"], strict=True)
        report.note(f"speed of {batch} at once, relative to transformers", median([b / a for b, a in pairs]))


def run_engine(folder: Path, arguments: argparse.Namespace, run: Callable[[str], Coroutine[Any, Any, None]]) -> None:
    """Run `run` with the address of an engine."""
    with tempfile.TemporaryDirectory() as runtime, open_engine(folder, arguments, Path(runtime)) as engine:
        engine.wait_ready()
        asyncio.run(run(engine.address))
        engine.stop()


def measure_audio(report: Report, arguments: argparse.Namespace) -> None:
    for name in [arguments.checkpoint] if arguments.checkpoint else WRITERS:
        folder = find_audio_checkpoint(name) if name in WRITERS else Path(name).resolve()
        if json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "whisper":
            measure_transcripts(folder, report, arguments)
        else:
            run_engine(folder, arguments, partial(measure_clips, report=report, arguments=arguments))


def open_engine(folder: Path, arguments: argparse.Namespace, runtime: Path, *more: str) -> Engine:
    rows = max(32, arguments.rows + (arguments.clips if arguments.audio else 8))
    options = ["--model", str(folder), "--device", "cpu", "--max-num-seqs", str(rows)]
    options += ["--num-threads", str(arguments.threads), "--speculation", "off", *more]  # rows go on side by side
    if not arguments.audio:  # Whisper takes 448 tokens
        options += ["--max-model-len", str(arguments.max_model_len)]
    return Engine(runtime, options, has_faults=False)


def measure_parts(folder: Path, report: Report, arguments: argparse.Namespace, parts: list[Part], *more: str) -> None:
    """Run parts on one engine."""

    async def run(engine: Engine) -> None:
        async with AsyncClient(engine.address) as client:
            await Call("warm up", [picture(arguments, "warm-up")], 4).run(client)
            for part in parts:
                await part(client, report, arguments, engine)

    with tempfile.TemporaryDirectory() as runtime, open_engine(folder, arguments, Path(runtime), *more) as engine:
        engine.wait_ready()
        asyncio.run(run(engine))
        engine.stop()


PARTS: dict[str, Part] = {
    "one image": measure_one_image,
    "first token": measure_first_token,
    "others": measure_others,
    "throughput": measure_throughput,
}


def measure_images(report: Report, arguments: argparse.Namespace) -> None:
    is_named = arguments.checkpoint == "vision-135m"
    folder = find_vision_checkpoint() if is_named else Path(arguments.checkpoint).resolve()
    parts = [part for name, part in PARTS.items() if name in arguments.parts]
    if parts:
        measure_parts(folder, report, arguments, parts)
    if "throughput" in arguments.parts and arguments.with_transformers:
        measure_transformers(folder, report, arguments)
    if "many" in arguments.parts:
        limits = ("--media-store-bytes", str(STORE_BYTES), "--kv-cache-memory-bytes", str(POOL_BYTES))
        measure_parts(folder, report, arguments, [measure_many], *limits)
    if "memory" in arguments.parts:
        measure_memory(folder, report, arguments)


def measure(setup: Setup) -> None:
    arguments, report = setup.arguments, setup.report
    if arguments.audio:
        measure_audio(report, arguments)
    elif arguments.checkpoint is None:
        raise SystemExit("give a MODEL")
    else:
        measure_images(report, arguments)


OPTIONS = {
    "checkpoint": (None, "folder, or vision-135m; with --audio whisper-tiny or audio-135m"),
    "--audio": (False, "measure requests with audio, not images"),
    "--parts": ([*PARTS, "many", "memory"], "of the measurements with images"),
    "--side": (1024, "pixels on each side of an image"),
    "--requests": (8, "requests with one image"),
    "--rows": (16, "answers beside arriving images"),
    "--out": (2000, "tokens of these"),
    "--images": (6, "images that arrive beside them"),
    "--clips": (32, "requests with clips that come at once"),
    "--clip-s": (30, "seconds of a clip that is transcribed"),
    "--short-s": (10, "seconds of a clip of those that come at once"),
    "--transcript": (96, "tokens of a transcript"),
    "--batch": (8, "requests of a batch"),
    "--batch-out": (32, "tokens of these"),
    "--many": (10_000, "small distinct images"),
    "--threads": (min(2, os.cpu_count() or 1), "compute threads, of transformers too"),
    "--max-model-len": (4096, "longest request"),
    "--with-transformers": (False, "compare with transformers' generate"),
}
CASE = Case("multimodal", measure, OPTIONS, model="", rounds=5)

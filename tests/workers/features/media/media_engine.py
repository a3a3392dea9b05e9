"""A worker that takes media, in this process, and prompts for it: the tests of workers play its core."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from tokenloom.ipc.blobs.media_file import MediaFile, media_header
from tokenloom.ipc.blobs.store import BlobStore
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.media import Encode, MediaKind
from tokenloom.ipc.messages.workers import ModelRunnerOutput, NewRow, SchedulerOutput
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.tests.workers.random_schedule import frame, message, new_row
from tokenloom.tests.workers.worker_harness import WorkerHarness, make_spec
from tokenloom.workers.worker import Worker

NUM_OUTPUTS = 5


def media_spec(folder: Path, run_directory: Path, **options: int | str) -> EngineSpec:
    spec = make_spec(folder, run_directory, **{"num_kv_blocks": 160, **options})
    return msgspec.structs.replace(spec, max_model_len=256, encoder_cache_tokens=400)


class Engine:
    """Plays the core for one worker in this process: entries are numbers of media."""

    def __init__(self, folder: Path, run_directory: Path, **options: int | str) -> None:
        self.spec = media_spec(folder, run_directory, **options)
        config = self.spec.model.encoder
        assert config is not None
        self.config = config
        self.kind: MediaKind = "image" if self.spec.model.vision is not None else "audio"
        self.store = BlobStore(run_directory / "media", 1 << 24)
        self.worker = Worker(self.spec, 0, 7)
        self.phases = [phase.name for phase in self.worker.load()]
        measured = self.worker.measure()
        self.pool = PoolShape.of(measured.pool_bytes, measured.block_bytes)
        self.worker.initialize(self.pool)

    def order(self, entry: int, item: MediaFile, num_embeds: int) -> Encode:
        digest = self.store.put(media_header(item.grid, item.shape) + bytes(item.data))
        return Encode(
            entry=entry,
            kind=self.kind,
            digest=digest,
            grid=item.grid,
            num_embeds=num_embeds,
            first_piece=0,
            num_pieces=len(self.config.stages),
        )

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        assert self.worker.runner is not None
        return self.worker.runner.execute(step)


class Prompt:
    """A prompt with media between text."""

    def __init__(self, engine: Engine, items: Iterable[MediaFile], rng: random.Random) -> None:
        """items: taken one by one, as `rng` draws the text before and after them."""
        self.token_ids: list[int] = [rng.randrange(5, 900) for _ in range(3)]
        self.items, self.spans, self.orders = list[MediaFile](), list[int](), list[Encode]()
        encoder = engine.worker._media.encoder  # type: ignore[union-attr]
        for entry, item in enumerate(items, 1):
            self.items.append(item)
            num_embeds = len(encoder.finish(encoder.begin(item, item.grid)))
            self.spans += [len(self.token_ids), num_embeds, *item.grid]
            self.orders.append(engine.order(entry, item, num_embeds))
            self.token_ids += [engine.config.placeholder_id] * num_embeds
            self.token_ids += [rng.randrange(5, 900) for _ in range(rng.randrange(2, 5))]

    def new_row(self, row: int, computed: int = 0) -> NewRow:
        return msgspec.structs.replace(new_row(row, self.token_ids, computed), spans=frame(*self.spans))

    def bindings(self, row: int) -> bytes:
        return frame(*[each for i, order in enumerate(self.orders) for each in (row, i, order.entry)])


def chunks(prompt: Prompt, rng: random.Random, *, is_bidirectional: bool) -> Iterator[int]:
    """Random counts of the prompt's tokens; a span that sees ahead is in one step."""
    done, spans = 0, np.array(prompt.spans).reshape(-1, 5)
    while done < len(prompt.token_ids):
        end = done + rng.randint(1, len(prompt.token_ids) - done)
        for start, length in spans[:, :2].tolist() if is_bidirectional else ():
            end = start + length if start < end < start + length else end
        yield end - done
        done = end


def answers(engine: Engine, prompt: Prompt, seed: int) -> list[int]:
    """The tokens of row 1 by random chunks, beside text in row 2, with encodes by single layers before."""
    rng, config = random.Random(seed), engine.config
    for piece in range(len(config.stages)):
        orders = [msgspec.structs.replace(each, first_piece=piece, num_pieces=1) for each in prompt.orders]
        result = engine.execute(msgspec.structs.replace(message(), encodes=orders))
        assert result.failed_entries == []
        assert result.execute_s > 0
    blocks = appends_of(engine.pool, (1, 2), 16)
    rows = [prompt.new_row(1), new_row(2, [9, 8, 7])]
    step = msgspec.structs.replace(message([], [], None, rows, blocks), span_entries=prompt.bindings(1))
    engine.execute(step)
    tokens = list[int]()
    for number, count in enumerate(
        [*chunks(prompt, rng, is_bidirectional=config.is_bidirectional), *[1] * NUM_OUTPUTS]
    ):
        scheduled = {2: 3 if number == 0 else 1, 1: count} if rng.random() < 0.7 or number == 0 else {1: count}
        result = engine.execute(message(list(scheduled), list(scheduled.values())))
        found = dict(
            zip(*(np.frombuffer(each, np.int32).tolist() for each in (result.rows, result.token_ids)), strict=True)
        )
        tokens += [found[1]] if 1 in found else []
    entries = frame(*[order.entry for order in prompt.orders])
    engine.execute(msgspec.structs.replace(message(freed=[1, 2]), freed_entries=entries))
    return tokens[:NUM_OUTPUTS]


def appends_of(pool: PoolShape, rows: Sequence[int], num_blocks: int) -> list[int]:
    """Return block_appends that give each row `num_blocks` blocks of each KV group, in parts of the pool that do not
    overlap."""
    appends, end = list[int](), max(pool.block_bytes)
    for group, size in enumerate(pool.block_bytes):
        first = -(-end // size)
        for block, row in enumerate(np.repeat(rows, num_blocks).tolist(), first):
            appends += [row, group, block]
        end = (first + len(rows) * num_blocks) * size
    return appends


def check_two_processes(engine: Engine, prompt: Prompt, run_directory: Path) -> None:
    """Check that two ranks in processes give the tokens of one, and that both miss the same medium."""
    expected = answers(engine, prompt, 0)
    harness = WorkerHarness(media_spec(Path(engine.spec.model_folder), run_directory, tensor_parallel_size=2))
    try:
        harness.start()
        store = BlobStore(run_directory / "media", 1 << 24)
        for item in prompt.items:
            store.put(media_header(item.grid, item.shape) + bytes(item.data))
        lost = msgspec.structs.replace(prompt.orders[0], entry=9, digest=bytes(32))
        harness.publish(msgspec.structs.replace(harness.next_step([], []), encodes=[lost, *prompt.orders]))
        assert [each.entry for each in harness.receive(ModelRunnerOutput).failed_entries] == [9]
        appends = [each for block in range(8) for each in (1, 0, 1 + block)]
        first = harness.next_step([1], [10], [prompt.new_row(1)], appends)
        assert harness.execute(msgspec.structs.replace(first, span_entries=prompt.bindings(1))) == []
        tokens = harness.execute(harness.next_step([1], [len(prompt.token_ids) - 10]))
        while len(tokens) < NUM_OUTPUTS:
            tokens += harness.execute(harness.next_step([1], [1]))
        assert tokens == expected
        assert harness.stop() == [0, 0]
    finally:
        harness.close()

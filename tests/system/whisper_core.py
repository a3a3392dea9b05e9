"""A core and a worker of Whisper in one process, without a frontend: requests go in as the frontend would send them.

with-rules or without, any options of the engine; clips are samples, put into the store as media files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tokenloom.core.engine import EngineCore
from tokenloom.frontend.supervisor.resolve import resolve
from tokenloom.ipc.addresses import RunDirectory
from tokenloom.ipc.blobs.media_file import media_header
from tokenloom.ipc.blobs.store import BlobStore
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.messages.core import CoreChild, EngineCoreRequest, Finished
from tokenloom.ipc.messages.media import MediaSpan
from tokenloom.ipc.messages.workers import ModelRunnerOutput, SchedulerOutput, TokenMask
from tokenloom.ipc.sampling_params import SamplingParams
from tokenloom.tests.core.grammar.fake_grammar_host import FakeGrammarHost
from tokenloom.tests.support.audio_oracle import Samples
from tokenloom.workers.worker import Worker

MAX_TURNS = 5000


@dataclass(eq=False)
class ClipRequest:
    """A clip, the tokens of the prompt behind it, and how many are asked for."""

    samples: Samples
    prompt: list[int]
    max_tokens: int = 12
    outputs: list[int] = field(default_factory=list)
    finished: Finished | None = None


class WhisperCore:
    """Runs requests to their ends. `turn` is one call of the core's and at most one step of the worker's."""

    def __init__(self, folder: Path, run_directory: Path, **options: Any) -> None:
        options = {
            "num_threads": 1,
            "device": "cpu",
            "max_num_seqs": 8,
            "num_kv_blocks": 200,
            "block_size": 8,
            **options,
        }
        spec = resolve(EngineConfig(model=str(folder), **options), RunDirectory(run_directory))
        audio, cross = spec.model.audio, spec.model.cross
        assert audio is not None and cross is not None
        if not spec.encoder_cache_tokens:
            sizes = {"encoder_cache_tokens": 2 * cross.num_rows, "max_item_embeds": cross.num_rows}
            spec = msgspec.structs.replace(spec, **sizes)
        self.spec, self._audio, self._cross = spec, audio, cross
        self.store = BlobStore(run_directory / "media", 1 << 26)
        self.worker = self._new_worker()
        self._steps: deque[SchedulerOutput] = deque()
        self.requests: dict[int, ClipRequest] = {}
        self.cached: dict[int, int] = {}  # tokens found at the first admission
        self.num_steps = 0
        self.core_epoch = 0
        self.core = self._new_core()

    def _new_worker(self) -> Worker:
        worker = Worker(self.spec, 0, 0)
        list(worker.load())
        worker.initialize(self.spec.config.num_kv_blocks or 0)
        return worker

    def _new_core(self) -> EngineCore:
        num_blocks = self.spec.config.num_kv_blocks or 0
        return EngineCore(self.spec, num_blocks, self, FakeGrammarHost(), core_epoch=self.core_epoch)

    def send(self, message: SchedulerOutput | TokenMask) -> None:
        assert isinstance(message, SchedulerOutput)
        self._steps.append(message)

    def add(self, key: int, request: ClipRequest) -> None:
        self.requests[key] = request
        self._submit(key)

    def _submit(self, key: int) -> None:
        request, num_samples = self.requests[key], len(self.requests[key].samples)
        grid = (self._audio.num_windows(num_samples), 1, num_samples)
        header = media_header(grid, (1, 1, num_samples, 4))
        span = MediaSpan(
            kind="audio",
            digest=self.store.put(header + request.samples.astype("<f4").tobytes()),
            start=0,
            length=self._cross.num_tokens,
            num_embeds=self._audio.num_embeds(num_samples),
            grid=grid,
        )
        self.core.add_request(
            0,
            EngineCoreRequest(
                children=[CoreChild(key=key, seed=key, output_token_ids=encode_ids(request.outputs))],
                prompt_token_ids=encode_ids([self._audio.audio_token_id] * span.length + request.prompt),
                params=SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True),
                max_tokens=request.max_tokens,
                stop_token_ids=[],
                arrival_time=float(key),
                media=[span],
            ),
        )

    def turn(self) -> None:
        self.core.step()
        if self._steps:
            assert self.worker.runner is not None
            result: ModelRunnerOutput = self.worker.runner.execute(self._steps.popleft())
            self.num_steps += 1
            self.core.on_result(result)
        self.core.scheduler.check_invariants()
        self._take()

    def _take(self) -> None:
        for _, outputs in self.core.take_outputs():
            keys, starts, counts = (
                decode_ids(each).tolist() for each in (outputs.keys, outputs.starts, outputs.counts)
            )
            tokens = decode_ids(outputs.token_ids).tolist()
            for key, start, count in zip(keys, starts, counts, strict=True):
                assert start == len(self.requests[key].outputs), "a token is missing or repeated"
                self.requests[key].outputs += tokens[:count]
                del tokens[:count]
            for started in outputs.started:
                self.cached[started.key] = started.num_cached_tokens
            for finished in outputs.finished:
                self.requests[finished.key].finished = finished

    def run(self) -> None:
        """Run until all requests have ended; then everything is free."""
        for _ in range(MAX_TURNS):
            if not self.core.num_requests and not self._steps:
                kv_cache = self.core.scheduler.kv_cache
                assert kv_cache.pool.num_free == kv_cache.num_usable_blocks, "blocks leaked"
                return
            self.turn()
        raise AssertionError(f"{self.core.num_requests} requests do not end")

    def lose_worker(self) -> None:
        """The worker ends, and another takes its place."""
        self._steps.clear()
        self.core.lose_workers("a test")
        self.worker = self._new_worker()
        self.core.gain_workers(self, 0)

    def lose_core(self) -> None:
        """The core ends; the next one gets the open requests with the tokens that have been delivered."""
        self._steps.clear()
        self.worker.reset()
        self.core_epoch += 1
        self.core = self._new_core()
        for key, request in self.requests.items():
            if request.finished is None:
                self._submit(key)

    @property
    def num_encodes(self) -> int:
        return self.core.scheduler.encodes.totals.num_encodes

    def answers(self, requests: Sequence[ClipRequest]) -> list[list[int]]:
        """Run these requests at once; return their tokens."""
        first = len(self.requests)
        for key, request in enumerate(requests, first):
            self.add(key, request)
        self.run()
        return [request.outputs for request in requests]

"""A worker without a model that answers every step at once, to measure everything else. Started by null_engine.py.

Runs the loop and speaks the whole protocol of workers/process.py; the sampled token is a printable byte. With
NULL_WORKER_STEP_MS in the environment each step sleeps for that time.
"""

from __future__ import annotations

import os
import sys
import time
import types
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tokenloom.ipc.codec import decode_ids
from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.messages.base import Holding, MemoryTag
from tokenloom.ipc.messages.supervisor import Measured, Phase
from tokenloom.ipc.messages.workers import ModelRunnerOutput, SchedulerOutput
from tokenloom.ipc.process.title import set_title
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.workers import process

DEFAULT_BLOCKS = 1 << 16
FIRST_BYTE, NUM_BYTES = 32, 95  # printable ASCII


class NullWorker:
    """Substitute for workers.worker.Worker and its runner. Knows only each row's token counts."""

    class recorder:  # noqa: N801, named like a real worker's attribute, without torch
        """A recorder that records nothing."""

        @staticmethod
        def drop() -> None:
            pass

        @staticmethod
        def switch(records: bool) -> str:
            return "this worker computes nothing"

    def __init__(self, spec: EngineSpec, rank: int = 0, generation: int = 0) -> None:
        self.stage, self.runner = "idle", self
        self.adapters, self.page_supply = None, None  # it has no slots and no memory
        self._rank = rank
        self._answers: deque[ModelRunnerOutput] = deque()
        self._step_s = float(os.environ.get("NULL_WORKER_STEP_MS", "0")) / 1000
        self._num_blocks = spec.config.num_kv_blocks or DEFAULT_BLOCKS
        self._num_known = np.zeros(spec.config.max_num_seqs, np.int64)
        self._num_computed = np.zeros(spec.config.max_num_seqs, np.int64)

    def load(self, folder: Path | None = None, asleep: Sequence[MemoryTag] = ()) -> list[Phase]:
        """Set a title that shows that no model is running; there is nothing to load."""
        set_title(f"tokenloom null worker {self._rank}")
        return []

    def hold(self, holding: Holding) -> None:
        self.reset()

    def measure(self) -> Measured:
        return Measured(pool_bytes=self._num_blocks, block_bytes=(1,), device="none")

    def initialize(self, pool: PoolShape, arena: object = None) -> None:
        self.reset()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Sample a byte for each row; masks are ignored, so requests with a grammar are not supported."""
        begun = time.monotonic()
        for new in output.new_rows:
            self._num_known[new.row] = len(decode_ids(new.token_ids))
            self._num_computed[new.row] = new.num_computed_tokens
        rows, counts = np.frombuffer(output.rows, np.int32), np.frombuffer(output.counts, np.int32)
        ends = self._num_computed[rows] + counts
        self._num_computed[rows] = ends
        sampling = rows[ends >= self._num_known[rows]]
        self._num_known[sampling] += 1
        if self._step_s:
            time.sleep(max(begun + self._step_s - time.monotonic(), 0))
        token_ids = ((output.step + sampling) % NUM_BYTES + FIRST_BYTE).astype(np.int32)
        return ModelRunnerOutput(
            step=output.step,
            core_epoch=output.core_epoch,
            generation=output.generation,
            rows=sampling.tobytes(),
            counts=np.ones(len(sampling), np.int32).tobytes(),
            token_ids=token_ids.tobytes(),
            execute_s=time.monotonic() - begun,
        )

    def start(self, output: SchedulerOutput, receive_mask: object, finish_earlier: object) -> None:
        """Run the whole step before returning."""
        self._answers.append(self.execute(output))

    @property
    def is_next_done(self) -> bool:
        return bool(self._answers)

    @property
    def unfinished_step(self) -> int | None:
        return self._answers[0].step if self._answers else None

    def finish(self) -> ModelRunnerOutput:
        return self._answers.popleft()

    def reset(self) -> None:
        self._answers.clear()
        self._num_known[:] = self._num_computed[:] = 0

    def close(self) -> None:
        """Do nothing: a null worker holds no resources."""


def main() -> int:
    """Run the worker process with this module's worker, and so without torch."""
    module = types.ModuleType("tokenloom.workers.worker")
    module.__dict__["Worker"] = NullWorker
    sys.modules[module.__name__] = module
    return process.main()


if __name__ == "__main__":
    sys.exit(main())

"""The core process of `drafting_engine`: its drafts are those of `recorded_drafts`, from the file that RECORD names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tokenloom.core.process import CoreProcess, main
from tokenloom.ipc.messages.supervisor import Initialize
from tokenloom.tests.system.recorded_drafts import RECORD, proposer_of


class DraftingCore(CoreProcess):
    def _start(self, message: Initialize) -> None:
        super()._start(message)
        self._engine.scheduler.batches.drafting.proposer = proposer_of(Path(os.environ[RECORD]))


if __name__ == "__main__":
    sys.exit(main(DraftingCore))

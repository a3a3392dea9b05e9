"""BatchRecord: a batch as it is stored, and the legal moves of its status."""

from __future__ import annotations

import hashlib

import msgspec

from ...forms.openai.batches.batch import Batch, BatchError, BatchErrors, Status

MAX_FAULTS = 100  # of the input file, in the batch

MOVES: dict[Status, frozenset[Status]] = {
    "validating": frozenset(("in_progress", "failed", "cancelling", "expired")),
    "in_progress": frozenset(("finalizing", "cancelling")),
    "finalizing": frozenset(("completed", "expired")),
    "cancelling": frozenset(("cancelled",)),
    "failed": frozenset(),
    "completed": frozenset(),
    "expired": frozenset(),
    "cancelled": frozenset(),
}


class IllegalMove(Exception):
    """A status that a batch cannot have next."""


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch, with fields that clients do not see."""

    batch: Batch
    nonce: bytes  # from which everything random in its answers is derived
    served_model: str  # name of the model that the engine served when the batch was created
    expires_at: float  # by the clock of the state
    output_expires_s: int | None = None  # life of the output files; None: that of other files
    check_offset: int = 0  # of the next line of the input file to check
    check_number: int = 1
    has_expired: bool = False  # its window ended before its lines

    @property
    def is_open(self) -> bool:
        return bool(MOVES[self.batch.status])

    def move(self, status: Status, now: float) -> None:
        """Change the status, and note the time. IllegalMove, with nothing changed, if it is none of the next ones.
        `now`: unix seconds."""
        if status not in MOVES[self.batch.status]:
            raise IllegalMove(f"a batch that is {self.batch.status} cannot become {status}")
        self.batch.status = status
        setattr(self.batch, f"{status}_at", int(now))

    def add_fault(self, fault: BatchError) -> None:
        """Add a fault of the input file; only the first MAX_FAULTS are kept."""
        if self.batch.errors is None:
            self.batch.errors = BatchErrors([])
        if len(self.batch.errors.data) < MAX_FAULTS:
            self.batch.errors.data.append(fault)

    @property
    def num_faults(self) -> int:
        return 0 if self.batch.errors is None else len(self.batch.errors.data)

    @property
    def num_left(self) -> int:
        """Return how many lines have not ended."""
        counts = self.batch.request_counts
        return counts.total - counts.completed - counts.failed

    def draw(self, purpose: str, num_bytes: int = 16) -> bytes:
        """Return bytes that depend only on the batch and the purpose."""
        return hashlib.blake2b(purpose.encode(), digest_size=num_bytes, key=self.nonce).digest()

    def nonce_of(self, number: int) -> bytes:
        """Return the nonce of the request in a line."""
        return self.draw(f"line {number}")

    def seed_of(self, number: int) -> int:
        """Return the seed of the request in a line, if the line names none."""
        return int.from_bytes(self.draw(f"seed {number}", 8)) >> 1

    def line_id(self, number: int) -> str:
        """Return the id of a line in the output files."""
        return f"batch_req_{self.draw(f'id {number}', 12).hex()}"

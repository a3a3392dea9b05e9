"""OpenRequest: the client's state of one open request: everything that a resubmission needs.

It keeps the delivered tokens, drops duplicate deltas and detects gaps. Only one thread uses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from ...ipc.codec import num_ids
from ...ipc.errors import TokenloomError
from ...ipc.messages.client import Accepted, Child, Delta, Medium, Submit, with_digests
from ...ipc.params.sampling_params import child_seed
from ..forms.media.media_sender import held_media

Update: TypeAlias = Accepted | Delta | TokenloomError  # immutable; after an error nothing follows
Sink: TypeAlias = Callable[[Update], None]  # runs in the transport's thread: must be cheap and never block
DeltaOutcome = Literal["applied", "duplicate", "gap"]


@dataclass(slots=True)
class OpenSequence:
    """One of the n sequences. `chunks` holds exactly the tokens delivered to the sink, as int32 bytes."""

    chunks: list[bytes] = field(default_factory=list)
    num_tokens: int = 0
    is_finished: bool = False

    def joined(self) -> bytes:
        """Return all delivered tokens as int32 bytes, after merging the chunks into one."""
        self.chunks = [b"".join(self.chunks)]
        return self.chunks[0]


class OpenRequest:
    """A request until its last update. Invariant: `sequences` have exactly the tokens delivered to the sink."""

    def __init__(self, submit: Submit, sink: Sink) -> None:
        self._submit = submit
        self.sink = sink
        self.sequences = [OpenSequence() for _ in range(submit.params.n)]
        self._num_prompt_logprobs = 0  # prompt tokens with delivered logprobs, plus the first, which has none
        self._seed = submit.params.seed
        self._num_sent = 0
        self._is_accepted = False  # whether the latest attempt was accepted
        self._begun_at = time.monotonic()
        self.num_gaps = 0  # consecutive deltas that left a gap
        self.is_aborted = False

    @property
    def request_id(self) -> str:
        return self._submit.request_id

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def unfinished(self) -> list[int]:
        """Indices of the sequences that have not finished."""
        return [index for index, sequence in enumerate(self.sequences) if not sequence.is_finished]

    @property
    def was_sent(self) -> bool:
        return self._num_sent > 0

    @property
    def num_bytes(self) -> int:
        """Approximate size of the next Submit in bytes."""
        submit = self._submit
        chat = sum(len(turn.text) for turn in submit.chat or ())
        media = sum(len(medium.data) for medium in held_media(submit.media))
        return len(submit.prompt or "") + len(submit.prompt_token_ids or b"") + chat + media + 4 * self.num_tokens + 200

    @property
    def media(self) -> list[Medium]:
        return self._submit.media

    def next_submit(self) -> Submit:
        """Return the Submit of the next attempt. From the second attempt on it has the delivered tokens, after which
        the engine continues."""
        submit = self._submit
        attempt = self._num_sent
        self._num_sent += 1
        self._is_accepted = False
        if attempt == 0:
            return submit
        children: list[Child] = []
        has_output = self.num_tokens or self._num_prompt_logprobs or len(self.unfinished) < len(self.sequences)
        if has_output and self._seed is not None:
            children = [
                Child(index=index, seed=child_seed(self._seed, index), output_token_ids=self.sequences[index].joined())
                for index in self.unfinished
            ]
        return msgspec.structs.replace(
            submit,
            attempt=attempt,
            children=children,
            waited_s=time.monotonic() - self._begun_at,
            num_prompt_logprobs=self._num_prompt_logprobs,
        )

    def accept(self, accepted: Accepted) -> bool:
        """Keep the prompt tokens, the seed, and the digests of adapter and media of `accepted` for later attempts, and
        return True; False if it replies to an older attempt."""
        if accepted.attempt != self._num_sent - 1:
            return False
        self._is_accepted = True
        if self._seed is None:
            self._seed = accepted.seed
        if self._submit.prompt_token_ids is None and not self._submit.media:  # a resubmission sends tokens, not text
            self._submit = msgspec.structs.replace(
                self._submit, prompt=None, chat=None, prompt_token_ids=accepted.prompt_token_ids
            )
        if accepted.adapter_digest:
            self._submit = msgspec.structs.replace(self._submit, adapter_digest=accepted.adapter_digest)
        media = with_digests(self._submit.media, accepted.media_digests)
        self._submit = msgspec.structs.replace(self._submit, media=media)
        return True

    def forget_adapter(self) -> None:
        """Forget the adapter's digest, so that the next attempt asks for the adapter by name. For another engine: there
        the name may stand for other weights."""
        self._submit = msgspec.structs.replace(self._submit, adapter_digest=b"")

    def apply(self, delta: Delta) -> DeltaOutcome:
        """Append the delta's tokens if they start where the delivered tokens end ("applied"). Drop all other deltas.

        "duplicate": the delta has nothing new, is from an older attempt, or follows the end of its sequence. "gap":
        tokens before it are missing, or it overlaps the delivered tokens and has more than they; only a new attempt can
        deliver the rest."""
        num_new = num_ids(delta.token_ids)
        if not self._is_accepted or not 0 <= delta.index < len(self.sequences):  # it belongs to an older attempt
            return "duplicate"
        sequence = self.sequences[delta.index]
        if sequence.is_finished:
            return "duplicate"
        if delta.start == sequence.num_tokens:
            sequence.chunks.append(delta.token_ids)
            sequence.num_tokens += num_new
            sequence.is_finished = delta.finish_reason is not None
            if delta.prompt_logprobs is not None:
                self._num_prompt_logprobs = delta.prompt_start + num_ids(delta.prompt_logprobs.ranks)
            self.num_gaps = 0
            return "applied"
        if delta.start + num_new <= sequence.num_tokens and delta.finish_reason is None:
            return "duplicate"
        # Tokens are missing, or the delta overlaps in part and its text cannot be cut: both need a new attempt.
        self.num_gaps += 1
        return "gap"

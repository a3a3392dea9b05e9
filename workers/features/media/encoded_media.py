"""EncodedMedia: the embeddings of media that the core has ordered, by entry.

The core decides which entries exist and when they are free. An order computes some pieces of an entry. A medium with a
missing or damaged file fails alone: its entry is reported, and has zeros until the core has ended the requests that
wait for it.
"""

from __future__ import annotations

from torch import Tensor

from ....ipc.blobs.media_file import parse_media_file
from ....ipc.blobs.store import BlobStore
from ....ipc.errors import ProtocolError, TokenloomError
from ....ipc.messages.media import A_MEDIUM, Encode, FailedEntry
from ....ipc.spec.models.model_config import Encoder as EncoderConfig
from ...encoders.blocks import EncoderState
from ...encoders.encoder import Encoder
from ...machine.parallel import ParallelGroup


class EncodedMedia:
    """Owner of the entries. Every rank encodes every medium. If one rank fails at a medium, it fails on all ranks."""

    def __init__(
        self, encoder: Encoder, config: EncoderConfig, width: int, store: BlobStore, group: ParallelGroup
    ) -> None:
        """width: elements of an embedding, those of inner layers included."""
        self._encoder, self._num_stages, self._width = encoder, len(config.stages), width
        self._store, self._group = store, group
        self._encodings = dict[int, EncoderState]()  # entries with pieces left
        self._embeds = dict[int, Tensor]()
        self._failed = set[int]()  # entries with zeros

    @property
    def num_entries(self) -> int:
        return len(self._encodings) + len(self._embeds)

    def clear(self) -> None:
        self._encodings.clear()
        self._embeds.clear()
        self._failed.clear()

    def free(self, entries: list[int]) -> None:
        """Forget entries. ProtocolError if one is not in use."""
        for entry in entries:
            if self._embeds.pop(entry, None) is None and self._encodings.pop(entry, None) is None:
                raise ProtocolError(f"entry {entry} of the encoder cache is freed, but it is not in use")
            self._failed.discard(entry)

    def encode(self, order: Encode) -> FailedEntry | None:
        """Run the pieces of an order. Return None, or a FailedEntry with the reason if the medium cannot be encoded.
        ProtocolError if the order does not continue the orders before it."""
        if order.first_piece == 0 and order.entry in self._failed:
            self.free([order.entry])
        if order.entry in self._failed:
            return None
        self._check(order)
        state, error = self._encodings.pop(order.entry, None), ""
        if state is None:
            state, error = self._begin_everywhere(order)
        if state is not None:
            self._encoder.advance(state, order.num_pieces)
            if state.next_piece < self._num_stages * order.pieces_per_stage:
                self._encodings[order.entry] = state
                return None
            embeds = self._encoder.finish(state)
            if embeds.shape == (order.num_embeds, self._width):
                self._embeds[order.entry] = embeds
                return None
            medium = A_MEDIUM[order.kind]
            error = f"{medium} has {len(embeds)} embeddings and {order.num_embeds} placeholders: send it again"
        self._embeds[order.entry] = self._encoder.zeros(order.num_embeds, self._width)
        self._failed.add(order.entry)
        return FailedEntry(entry=order.entry, error=error)

    def take(self, entry: int, first: int, count: int) -> Tensor:
        """Return embeddings [first, first + count) of an entry. ProtocolError if it is not complete or too short."""
        embeds = self._embeds.get(entry)
        if embeds is None or first + count > len(embeds):
            size = "is not complete" if embeds is None else f"has {len(embeds)} embeddings"
            raise ProtocolError(f"embeddings [{first}, {first + count}) of entry {entry} are needed, which {size}")
        return embeds[first : first + count]

    def _check(self, order: Encode) -> None:
        state, is_first = self._encodings.get(order.entry), order.first_piece == 0
        expected = 0 if state is None else state.next_piece
        last, total = order.first_piece + order.num_pieces, self._num_stages * order.pieces_per_stage
        is_taken = is_first and (state is not None or order.entry in self._embeds)
        is_cut = state is not None and state.num_pieces != order.pieces_per_stage
        if is_taken or is_cut or order.first_piece != expected or not order.first_piece < last <= total:
            raise ProtocolError(
                f"pieces [{order.first_piece}, {last}) of {total} are ordered for entry {order.entry}, which "
                f"{'is in use' if is_taken else f'has {expected}'}"
            )

    def _begin_everywhere(self, order: Encode) -> tuple[EncoderState | None, str]:
        """Begin a medium if all ranks have its file; else return an error."""
        state, error = self._begin(order)
        if self._group.size > 1:
            failures = self._encoder.zeros(1, 1) + (1.0 if error else 0.0)
            if self._group.all_reduce(failures).item() and not error:
                return None, f"a worker could not read {A_MEDIUM[order.kind]}: send it again"
        return state, error

    def _begin(self, order: Encode) -> tuple[EncoderState | None, str]:
        try:
            content = self._store.open(order.digest)
            if content is None:
                medium = A_MEDIUM[order.kind]
                return None, f"{medium} is no longer in the engine's store, or damaged there: send it again"
            with content:
                return self._encoder.begin(parse_media_file(content), order.grid, order.pieces_per_stage), ""
        except (TokenloomError, OSError) as error:
            return None, str(error)

"""MediaInput: how the media of a model are read, and how they are put into prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from .....ipc.blobs.store import BlobStore
from .....ipc.messages.media import MediaKind, MediaSpan
from .....ipc.spec.config.engine_spec import EngineSpec
from ...media.decoder import MediaDecoder
from ...media.model_media import ModelMedia
from ...text.media_marker import MediaMarker
from ...text.tokenizer import Tokenizer


class ReadMedium(Protocol):
    """A medium that has been decoded: the digest of its media file in the store, and its grid."""

    @property
    def digest(self) -> bytes: ...

    @property
    def grid(self) -> tuple[int, int, int]: ...


class ReadPiece(ReadMedium, Protocol):
    """A piece of an audio clip, from `start_s` to `end_s` in the clip."""

    @property
    def start_s(self) -> float: ...

    @property
    def end_s(self) -> float: ...


class MediaReader(Protocol):
    """Decoder of media into media files of the blob store."""

    async def read(self, source: bytes, kind: MediaKind, detail: str, owner: str) -> ReadMedium:
        """Decode the blob with the digest `source`. RequestError if it cannot be read as a medium. `owner`: key of the
        caller, for fair queueing."""

    async def read_pieces(self, source: bytes, piece_s: float, owner: str) -> Sequence[ReadPiece]:
        """Decode an audio clip, as `read` does, into pieces of at most `piece_s` seconds, cut at quiet places."""

    def close(self) -> None: ...


class Placeholders(Protocol):
    """Inserter of media into prompts."""

    @property
    def marker(self) -> MediaMarker:
        """The marker that stands for a medium in the text of a prompt."""

    def before_tokenization(self, text: str) -> str:
        """Return the text of a prompt, changed as the model family requires before tokenization."""

    def expand(self, token_ids: Sequence[int], items: Sequence[ReadMedium]) -> tuple[list[int], list[MediaSpan]]:
        """Return the prompt with the tokens of each medium in place of its marker, and the spans of these tokens.
        RequestError unless there are as many markers as media."""


class MediaInput(NamedTuple):
    """Reader and placeholders for the media of one model."""

    new_reader: Callable[[BlobStore], MediaReader]
    placeholders: Placeholders

    @classmethod
    def load(cls, spec: EngineSpec, tokenizer: Tokenizer | None) -> MediaInput | None:
        """Load reader and placeholders from the model's files. Return None if the model takes only text."""
        media = ModelMedia.load(spec, tokenizer)
        return None if media is None else cls(lambda store: MediaDecoder(spec, media.processor), media.placeholders)

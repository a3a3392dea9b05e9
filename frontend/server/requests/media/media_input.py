"""MediaInput: how the media of a model are read, and where they stand in prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from .....ipc.blobs.store import BlobStore
from .....ipc.messages.media import MediaKind, MediaSpan
from .....ipc.spec.config.engine_spec import EngineSpec
from ...media.host import MediaHost
from ...media.model_media import ModelMedia
from ...text.media_marker import MediaMarker
from ...text.tokenizer import Tokenizer


class ReadMedium(Protocol):
    """A medium that has been decoded: its media file in the store."""

    @property
    def digest(self) -> bytes: ...

    @property
    def grid(self) -> tuple[int, int, int]: ...


class ReadPiece(ReadMedium, Protocol):
    """A piece of an audio clip, and its seconds in the clip."""

    @property
    def start_s(self) -> float: ...

    @property
    def end_s(self) -> float: ...


class MediaReader(Protocol):
    """Decodes media into media files of the blob store."""

    async def read(self, source: bytes, kind: MediaKind, detail: str, owner: str) -> ReadMedium:
        """Decode the blob with the digest `source`; RequestError if it is no readable medium. Owners take turns."""

    async def read_pieces(self, source: bytes, piece_s: float, owner: str) -> Sequence[ReadPiece]:
        """Decode an audio clip in pieces of at most `piece_s`, cut at quiet places; as `read` does."""

    def close(self) -> None: ...


class Placeholders(Protocol):
    """Puts media into prompts."""

    @property
    def marker(self) -> MediaMarker:
        """The text that a prompt has at the place of a medium."""

    def before_tokenization(self, text: str) -> str:
        """Return a prompt as it is to be tokenized."""

    def expand(self, token_ids: Sequence[int], items: Sequence[ReadMedium]) -> tuple[list[int], list[MediaSpan]]:
        """Return the prompt with the tokens of each medium in place of its marker. RequestError unless there are as
        many markers as media."""


class MediaInput(NamedTuple):
    """How the media of a model are read, and where they stand in prompts."""

    new_reader: Callable[[BlobStore], MediaReader]
    placeholders: Placeholders

    @classmethod
    def load(cls, spec: EngineSpec, tokenizer: Tokenizer | None) -> MediaInput | None:
        """Load what the model's files say; None if it takes text alone."""
        media = ModelMedia.load(spec, tokenizer)
        return None if media is None else cls(lambda store: MediaHost(spec, media.processor), media.placeholders)

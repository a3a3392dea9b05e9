"""Vision: how the images of a model are read, and where they stand in prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ...ipc.blobs.store import BlobStore
from ...ipc.config.engine_spec import EngineSpec
from ...ipc.messages.media import MediaKind, MediaSpan
from ..media.host import MediaHost
from ..media.model_images import ModelImages
from ..text.tokenizer import Tokenizer


class ReadMedium(Protocol):
    """A medium that has been decoded: its media file in the store."""

    @property
    def digest(self) -> bytes: ...

    @property
    def grid(self) -> tuple[int, int, int]: ...


class ReadPiece(ReadMedium, Protocol):
    """A piece of a clip that has been cut: its media file in the store."""

    @property
    def start_s(self) -> float:
        """Begin of the piece in the clip, in seconds."""

    @property
    def end_s(self) -> float: ...


class PieceReader(Protocol):
    """Decodes audio clips and cuts them into media files of the blob store."""

    async def read_pieces(self, source: bytes, piece_s: float, owner: str) -> Sequence[ReadPiece]:
        """Decode the blob with the digest `source` and cut it at quiet places into pieces of at most `piece_s` seconds,
        in order; RequestError if it is no readable clip. Owners take turns."""


class MediaReader(PieceReader, Protocol):
    """Decodes media into media files of the blob store."""

    async def read(self, source: bytes, kind: MediaKind, detail: str, owner: str) -> ReadMedium:
        """Decode the blob with the digest `source`; RequestError if it is no readable medium. Owners take turns."""

    def close(self) -> None: ...


class Placeholders(Protocol):
    """Puts media into prompts."""

    @property
    def marker(self) -> str:
        """The text that a prompt has at the place of an image."""

    def before_tokenization(self, text: str) -> str:
        """Return a prompt as it is to be tokenized."""

    def expand(self, token_ids: Sequence[int], items: Sequence[ReadMedium]) -> tuple[list[int], list[MediaSpan]]:
        """Return the prompt with the tokens of each medium in place of its marker. RequestError unless there are as
        many markers as media."""


class Vision(NamedTuple):
    """How the images of a model are read, and where they stand in prompts."""

    new_reader: Callable[[BlobStore], MediaReader]
    placeholders: Placeholders

    @classmethod
    def load(cls, spec: EngineSpec, tokenizer: Tokenizer | None) -> Vision | None:
        """Load what the model's files say; None if it sees no images."""
        images = ModelImages.load(spec, tokenizer)
        return None if images is None else cls(lambda store: MediaHost(spec, images.config), images.placeholders)

"""MediaLimits: refuses media that the model or the operator does not allow, before any of them is read.

It consists of plain values, so that the intake process and the frontend refuse the same media with the same messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec

from ...ipc.errors import RequestError
from ...ipc.messages.client import MediaPart, Medium, Submit
from ...ipc.messages.media import A_MEDIUM, MEDIUM, MediaKind
from ...ipc.spec.config.engine_spec import EngineSpec
from ...ipc.spec.config.gguf_index import GGUF_INDEX_NAME


class MediaLimits(msgspec.Struct, frozen=True):
    """Limits on the media of one prompt."""

    model: str
    kind: MediaKind | None  # kind of media that the model takes; None: it takes only text
    off_by: dict[MediaKind, str]  # kind → the option that turned it off
    max_count: int | None  # most media of a prompt; None: as many as fit
    max_bytes: int  # most bytes of one medium as it is sent
    lacks_mmproj: bool = False  # whether it is a GGUF model without the file that would hold its encoder

    @classmethod
    def of(cls, spec: EngineSpec) -> MediaLimits:
        config, encoder = spec.config, spec.model.encoder
        option = "--language-model-only" if config.language_model_only else "--limit-mm-per-prompt"
        kind = None if encoder is None else encoder.kind
        off_by: dict[MediaKind, str] = {each: option for each in get_args(MediaKind) if config.max_media(each) == 0}
        lacks_mmproj = kind is None and (Path(spec.model_folder) / GGUF_INDEX_NAME).exists()
        if lacks_mmproj and config.mmproj == "none":
            off_by = dict.fromkeys(get_args(MediaKind), "--mmproj none") | off_by
        return cls(
            model=spec.served_model_name,
            kind=kind,
            off_by=off_by,
            max_count=None if kind is None else config.max_media(kind),
            max_bytes=config.max_media_bytes,
            lacks_mmproj=lacks_mmproj,
        )

    @property
    def max_media(self) -> dict[MediaKind, int]:
        """Kind → most media of it in one prompt. Missing: the kind of media that the model takes, if as many as fit are
        allowed, and kinds that it does not take, unless an option turned them off (0)."""
        limits = dict.fromkeys(self.off_by, 0)
        return limits if self.kind is None or self.max_count is None else limits | {self.kind: self.max_count}

    def check_count(self, kind: MediaKind, count: int) -> None:
        """Raise RequestError if the model does not take this kind, or `count` media are too many for one prompt."""
        if kind != self.kind:
            why = f", as {self.off_by[kind]} says" if kind in self.off_by else ""
            if self.lacks_mmproj and not why:
                why = (
                    " without an mmproj file, which a GGUF model of images or audio has beside it (*mmproj*.gguf) or "
                    "gets by --mmproj"
                )
            if kind == "audio":
                raise RequestError(f"the model {self.model!r:.200} does not hear audio{why}: leave it out")
            raise RequestError(f"the model {self.model!r:.200} does not see images{why}: leave them out")
        if self.max_count is not None and count > self.max_count:
            raise RequestError(
                f"the prompt has {count} {MEDIUM[kind]}s, at most {self.max_count} are allowed: send fewer, or raise "
                "--limit-mm-per-prompt"
            )

    def check_media(self, media: Sequence[Medium]) -> None:
        """Raise RequestError unless these media may be in one prompt."""
        for medium in media:
            self.check_count(medium.kind, len(media))
            if medium.kind != "image" and medium.detail not in ("", "auto"):
                raise RequestError(f"the detail {medium.detail} is given for {A_MEDIUM[medium.kind]}: leave it out")

    def check_bytes(self, num_bytes: int) -> None:
        """Raise RequestError if a medium of `num_bytes` is too large."""
        if num_bytes > self.max_bytes:
            name = "a medium" if self.kind is None else A_MEDIUM[self.kind]
            raise RequestError(
                f"{name} has {num_bytes} bytes, at most {self.max_bytes} are read: send a smaller one, or raise "
                "--max-media-bytes"
            )

    def check(self, submit: Submit) -> None:
        """Raise RequestError unless the media of a request are allowed and identified, and the parts of its chat name
        each of them once. A request with media may not have truncate_prompt_tokens."""
        media, chat = submit.media, submit.chat
        self.check_media(media)
        if media and submit.params.truncate_prompt_tokens is not None:
            raise RequestError("truncate_prompt_tokens cannot cut a prompt with media: leave it out")
        parts = [part for turn in chat or () for part in turn.parts if isinstance(part, MediaPart)]
        if chat is not None and sorted(part.index for part in parts) != list(range(len(media))):
            raise RequestError(f"the chat has {len(parts)} parts of media, the request {len(media)} media: give both")
        for medium in media:
            if not (medium.digest or medium.url or medium.uuid) or len(medium.digest) not in (0, 32):
                raise RequestError("a medium needs the SHA-256 of its bytes, a url or a uuid: give one")

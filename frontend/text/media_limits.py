"""MediaLimits: refuses media that the model or the operator does not allow, before any of them is read.

Needs numbers alone, so that the intake process and the frontend refuse with the same words.
"""

from __future__ import annotations

import msgspec

from ...ipc.config.engine_spec import EngineSpec
from ...ipc.errors import RequestError
from ...ipc.messages.client import MediaPart, Submit


class MediaLimits(msgspec.Struct, frozen=True):
    """Limits on the images of one prompt."""

    model: str
    sees_images: bool
    option: str  # that turned images off, if the model could see them
    max_images: int | None  # None: as many as fit
    max_bytes: int  # of one image as it is sent

    @classmethod
    def of(cls, spec: EngineSpec) -> MediaLimits:
        config = spec.config
        is_off = config.max_media("image") == 0
        option = "--language-model-only" if config.language_model_only else "--limit-mm-per-prompt"
        return cls(
            model=spec.served_model_name,
            sees_images=spec.model.vision is not None,
            option=option if is_off else "",
            max_images=config.max_media("image"),
            max_bytes=config.max_media_bytes,
        )

    def check_count(self, num_images: int) -> None:
        """Raise RequestError for images that the model cannot see, or more than one prompt may have."""
        if num_images and not self.sees_images:
            why = f", as {self.option} says" if self.option else ""
            raise RequestError(f"the model {self.model!r:.200} does not see images{why}: leave them out")
        if self.max_images is not None and num_images > self.max_images:
            raise RequestError(
                f"the prompt has {num_images} images, at most {self.max_images} are allowed: send fewer, or raise "
                "--limit-mm-per-prompt"
            )

    def check_bytes(self, num_bytes: int, where: str = "an image") -> None:
        """Raise RequestError for an image of too many bytes."""
        if num_bytes > self.max_bytes:
            raise RequestError(
                f"{where} has {num_bytes} bytes, at most {self.max_bytes} are read: send a smaller one, or raise "
                "--max-media-bytes"
            )

    def check(self, submit: Submit) -> None:
        """Raise RequestError unless the media of a request may be read, and the parts of its chat name each of them
        once."""
        media, chat = submit.media, submit.chat
        self.check_count(len(media))
        if media and submit.params.truncate_prompt_tokens is not None:
            raise RequestError("truncate_prompt_tokens cannot cut a prompt with images: leave it out")
        parts = [part for turn in chat or () for part in turn.parts if isinstance(part, MediaPart)]
        if chat is not None and sorted(part.index for part in parts) != list(range(len(media))):
            raise RequestError(f"the chat has {len(parts)} parts of media, the request {len(media)} media: give both")
        for medium in media:
            if not (medium.digest or medium.url or medium.uuid) or len(medium.digest) not in (0, 32):
                raise RequestError("a medium needs the SHA-256 of its bytes, a url or a uuid: give one")

"""Puts the media of a prompt into its tokens, for commands that name a prompt without a request."""

from __future__ import annotations

from collections.abc import Callable

from .....ipc.errors import TokenloomError
from .....ipc.messages.client import Medium
from ....forms.media_limits import MediaLimits
from ...helpers.thread_pool import Then
from ...prompts.prompt import Prompt
from .media_desk import MediaDesk
from .media_input import ReadMedium


class MediaExpansion:
    """Reads media at the desk, and places them by `placed`."""

    def __init__(
        self, desk: MediaDesk, limits: MediaLimits, placed: Callable[[Prompt, list[ReadMedium]], Prompt]
    ) -> None:
        self._desk, self._limits, self._placed = desk, limits, placed

    def expand(self, token_ids: bytes, media: list[Medium], then: Then[Prompt]) -> None:
        """Call `then` with a prompt and the tokens of its media in it, or with an error."""

        def on_read(read: list[ReadMedium] | TokenloomError) -> None:
            self._desk.release(job)
            if isinstance(read, TokenloomError):
                then(read)
                return
            try:
                prompt = self._placed(Prompt(token_ids, None), read)
            except TokenloomError as error:
                then(error)
            else:
                then(prompt)

        try:
            self._limits.check_media(media)
        except TokenloomError as error:
            then(error)
        else:
            job = self._desk.read(media, on_read)

"""RequestReader: finds the adapter of a request, reads its media and its prompt, and checks it.

Adapter and media are released when the request is closed, even if reading has not finished. Knows no core.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from ....ipc.codec import decode_ids, encode_ids, num_ids
from ....ipc.messages.client import Medium, NeedMedia
from ....ipc.process.faults import maybe_fail
from ..adapters.manager import AdapterManager
from ..prompts.prompt import ProcessedRequest, Prompt
from ..prompts.prompt_reader import PromptReader
from .media.media_input import Placeholders, ReadMedium
from .media.media_manager import MediaManager
from .request_state import RequestState


@dataclass(eq=False)
class RequestReader:
    """Reader of everything that requests refer to: adapters, media and prompts."""

    _adapters: AdapterManager
    _media: MediaManager
    _placeholders: Placeholders | None  # None if the model takes only text
    _prompts: PromptReader  # turns text into tokens
    _unix_time: Callable[[], float]

    async def read(self, request: RequestState) -> ProcessedRequest:
        """Read and check a request; return it ready for a core. Raises the error with which the request is to end."""
        submit = request.submit
        if submit.adapter:
            await self._find_adapter(request)
        media = await self._read_media(request) if submit.media else []
        prompt = await self._read_prompt(request)
        maybe_fail("frontend.open", num_ids(prompt.token_ids))
        return self._prompts.inputs.process(submit, self._placed(prompt, media), self._unix_time())

    async def _find_adapter(self, request: RequestState) -> None:
        """Find the adapter of a request and keep it in use until the request is closed."""
        adapter = await self._adapters.resolve(request.submit)
        if adapter is not None:
            request.adapter = adapter
            request.at_close(partial(self._adapters.release, adapter))

    async def _read_media(self, request: RequestState) -> list[ReadMedium]:
        """Read the media of a request and keep them until the request is closed; return them in their order."""
        submit, session = request.submit, request.session

        def need(digests: list[bytes]) -> None:
            session.send(NeedMedia(request_id=submit.request_id, attempt=submit.attempt, digests=digests))

        job = self._media.read(
            submit.media,
            need=need if session.can_repeat else None,
            owner=session.owner_of(submit.request_id),
            scope=submit.params.cache_salt or "",
            wait_s=request.expires_at - self._unix_time(),
        )
        request.at_close(partial(self._media.release, job))
        read = await job.reply
        request.media_digests = job.sources
        return read

    def _read_prompt(self, request: RequestState) -> Awaitable[Prompt]:
        """Return the prompt of a request as tokens, which are ready at once if the prompt is short."""
        question = self._prompts.inputs.question_of(request.submit)
        owner = request.session.owner_of(request.request_id)
        return self._prompts.read(question, owner=owner, wait_s=request.expires_at - self._unix_time())

    async def expand(self, token_ids: bytes, media: list[Medium]) -> Prompt:
        """Return a prompt with the tokens of its media in place of their markers, for commands that have a prompt but
        no request."""
        self._prompts.inputs.media_limits.check_media(media)
        job = self._media.read(media)
        try:
            return self._placed(Prompt(token_ids, None), await job.reply)
        finally:
            self._media.release(job)

    def _placed(self, prompt: Prompt, media: list[ReadMedium]) -> Prompt:
        """Return a prompt with the tokens of `media` in place of their markers. RequestError unless there are as many
        markers as media."""
        if self._placeholders is None:
            return prompt
        token_ids, spans = self._placeholders.expand(decode_ids(prompt.token_ids), media)
        return Prompt(encode_ids(token_ids), prompt.text, spans)

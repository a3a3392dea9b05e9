"""Transcriber: the requests of `transcribe`, and their answers joined to transcripts.

Prompts, checks and readers of answers are those of /v1/audio/transcriptions (`frontend/transcriptions/`). It submits
nothing: the clients do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ....ipc.codec import encode_ids
from ....ipc.errors import RequestError
from ....ipc.messages.client import ChatForm, Delta, Info, Submit
from ...openai.forms.transcription_body import AudioForm, TranscriptionRequest, TranslationRequest
from ...transcriptions.families import CHATS, PROMPTS
from ...transcriptions.form_task import check_form, params_of, task_of
from ...transcriptions.transcript import Transcript
from ..call_options import TranscribeOptions, check_options, with_priority
from ..outputs import RequestOutput, SpokenSegment, TranscriptionOutput
from ..prompts import CheckedChat, check_params
from .clip_pieces import Piece, pieces_of


class Transcriber:
    """What one call asks of the model for each piece of its clips."""

    def __init__(self, info: Info, options: TranscribeOptions) -> None:
        """RequestError if the model hears no audio, or for options that it cannot take."""
        check_options("transcribe", options, TranscribeOptions)
        if not info.audio_family:
            raise RequestError(f"the model {info.model!r:.200} does not hear audio: choose one that does")
        form = _form(options)
        check_form(form)
        self._info, self._task, self._prompts = info, task_of(form), PROMPTS.get(info.audio_family, CHATS)
        self._turns, self._text = self._prompts.prompt(self._task)
        given = options.get("sampling_params")
        params = params_of(form, info.default_sampling_params) if given is None else check_params(given)
        if params.n != 1:
            raise RequestError(f"transcribe() gives one transcript of a clip, n is {params.n}: leave it out")
        if self._prompts.keeps_special_tokens:
            params = params.replace(skip_special_tokens=False)
        (self._params,) = with_priority([params], options)

    def pieces(self, audio: object) -> list[Piece]:
        """Decode and cut a clip; RequestError if it cannot be read."""
        return list(pieces_of(audio, self._info.audio_piece_s))

    def submit(self, new_submit: Callable[..., Submit], piece: Piece) -> Submit:
        """Make the request of a piece; `new_submit` is that of a client, with the adapter of the call."""
        if self._turns:
            form = ChatForm(answer=self._text) if self._text else None
            return new_submit(CheckedChat([*self._turns], [piece.medium]), self._params, form=form)
        prompt = {"prompt": self._text, "multi_modal_data": {"audio": piece.medium}}
        return msgspec.structs.replace(new_submit(prompt, self._params), add_special_tokens=False)

    def output(self, pieces: Sequence[Piece], answers: Sequence[RequestOutput]) -> TranscriptionOutput:
        """Join the answers to the pieces of a clip. RequestError if one of them was ended amid its transcript."""
        transcript = Transcript(pieces, lambda: self._prompts.new_reader(self._task), self._info.eos_token_ids)
        for place, (answer, piece) in enumerate(zip(answers, pieces, strict=True)):
            (found,) = answer.outputs
            if found.finish_reason in ("abort", "timeout"):
                raise RequestError(
                    f"the audio from {piece.start_s:.2f} to {piece.end_s:.2f} s ended with {found.finish_reason} amid "
                    "its transcript: transcribe it again"
                )
            ids, reason = encode_ids(found.token_ids), found.finish_reason
            transcript.add(
                place, Delta(request_id=answer.request_id, token_ids=ids, text=found.text, finish_reason=reason)
            )
        transcript.take()
        language = self._task.language or transcript.language
        return TranscriptionOutput(
            text=transcript.text,
            language=None if language is None else language.code,
            duration_s=transcript.duration_s,
            segments=[
                SpokenSegment(start_s=each.start_s, end_s=each.end_s, text=each.text) for each in transcript.segments()
            ],
        )


def _form(options: TranscribeOptions) -> AudioForm:
    """Return the fields of the HTTP API for these options."""
    language, prompt, to_language = (options.get(name) for name in ("language", "prompt", "to_language"))
    given = {"language": language, "prompt": prompt, "to_language": to_language}
    if wrong := [name for name, value in given.items() if not isinstance(value, str | None)]:
        raise RequestError(f"{wrong[0]} is {given[wrong[0]]!r:.80}: it must be text")
    shape = "verbose_json" if options.get("return_timestamps") else "json"
    if to_language is None:
        return TranscriptionRequest(file="", response_format=shape, language=language, prompt=prompt)
    return TranslationRequest(file="", response_format=shape, language=language, to_language=to_language, prompt=prompt)

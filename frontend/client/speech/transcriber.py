"""Transcriber: makes the requests of `transcribe`, and joins their answers to transcripts.

Prompts, checks and readers of answers are those of /v1/audio/transcriptions (`frontend/forms/speech/`). The clients
submit the requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from ....ipc.codec import encode_ids
from ....ipc.errors import RequestError
from ....ipc.messages.client import ChatForm, Delta, Info, Medium, Submit
from ....ipc.params.sampling_params import SamplingParams
from ....ipc.spec.models.audio_config import SAMPLE_RATE
from ...forms.call_options import TranscribeOptions, check_options, with_priority
from ...forms.media.held_medium import bytes_of, to_medium
from ...forms.openai.transcription_body import ResponseFormat, TranscriptionRequest, TranslationRequest
from ...forms.prompts import CheckedChat, check_params
from ...forms.speech.families import prompts_of
from ...forms.speech.form_task import check_form, params_of, task_of
from ...forms.speech.prompts import Task, TaskPrompt, TranscriptionPrompts
from ...forms.speech.transcript import Transcript
from ...sound.decode import decode_audio
from ...sound.quiet_cuts import cut_at_quiet_places
from ..outputs import CompletionOutput, RequestOutput, SpokenSegment, TranscriptionOutput

NewSubmit = Callable[..., Submit]  # a client's _new_submit, with the adapter of the call


class Transcriber:
    """The task, prompts and parameters of one call, which are the same for all its clips."""

    def __init__(self, info: Info, options: TranscribeOptions) -> None:
        """Check the options. RequestError if the model does not transcribe audio, or if an option is invalid or not
        supported by the model."""
        check_options("transcribe", options, TranscribeOptions)
        if info.speech is None:
            raise RequestError(f"the model {info.model!r:.200} does not hear audio: choose one that does")
        form = _form(options)
        check_form(form)
        self._piece_s, self._prompts, self._end_ids = info.speech.piece_s, prompts_of(info.speech), info.eos_token_ids
        self._task = task_of(form)
        given = options.get("sampling_params")
        params = params_of(form, info.default_sampling_params) if given is None else check_params(given)
        if params.n != 1:
            raise RequestError(f"transcribe() gives one transcript of a clip, n is {params.n}: leave it out")
        (self._params,) = with_priority([params], options)
        question = self._prompts.language_question
        language = self._task.language or (question and question.any_language)  # until it is detected
        self.context = self._prompts.prompt(self._task._replace(language=language)).context

    def clip(self, audio: object) -> SpokenClip:
        """Decode a clip, cut it into pieces, and return the SpokenClip; RequestError if the clip cannot be read."""
        return SpokenClip(list(pieces_of(audio, self._piece_s)), self._prompts, self._task, self._params, self._end_ids)


class SpokenClip:
    """The requests for a clip: one to detect its language, if the caller has named none, and then one for each
    piece."""

    def __init__(
        self,
        pieces: list[Piece],
        prompts: TranscriptionPrompts,
        task: Task,
        params: SamplingParams,
        end_ids: Sequence[int],
    ) -> None:
        self.pieces, self._prompts, self._task = pieces, prompts, task
        self._params, self._end_ids = params, end_ids

    def question(self, new_submit: NewSubmit) -> Submit | None:
        """Return the request that detects the clip's language; None if no detection is needed. Pass its answer to
        `name_language`."""
        question = self._prompts.language_question
        if self._task.language is not None or question is None or not self.pieces:
            return None
        ids = sorted(question.languages)
        params = self._params.replace(temperature=0.0, max_tokens=1, logprobs=None, allowed_token_ids=ids)
        return self._submit(new_submit, TaskPrompt(text=question.text), self.pieces[0], params)

    def name_language(self, answer: RequestOutput) -> None:
        found, question = _completion(answer), self._prompts.language_question
        if not found.token_ids or question is None:
            raise RequestError(
                f"the detection of the audio's language ended with {found.finish_reason}: try again, or give language"
            )
        self._task = self._task._replace(language=question.languages[found.token_ids[0]])

    def submits(self, new_submit: NewSubmit, context: str = "") -> list[Submit]:
        """Return the requests for the pieces. `context`: text at the start of each prompt."""
        prompt = self._prompts.prompt(self._task)
        params = self._params.replace(skip_special_tokens=not prompt.keeps_special_tokens)
        prompt = prompt._replace(text=context + prompt.text)
        return [self._submit(new_submit, prompt, piece, params) for piece in self.pieces]

    def _submit(self, new_submit: NewSubmit, prompt: TaskPrompt, piece: Piece, params: SamplingParams) -> Submit:
        if prompt.turns:
            form = ChatForm(answer=prompt.text) if prompt.text else None
            return new_submit(CheckedChat([*prompt.turns], [piece.medium]), params, form=form)
        given = {"prompt": prompt.text, "multi_modal_data": {"audio": piece.medium}}
        return msgspec.structs.replace(new_submit(given, params), add_special_tokens=False)

    def output(self, answers: Sequence[RequestOutput]) -> TranscriptionOutput:
        """Return the transcript joined from the answers to the pieces. RequestError if an answer was aborted or timed
        out."""
        transcript = Transcript(self.pieces, lambda: self._prompts.new_reader(self._task), self._end_ids)
        for place, (answer, piece) in enumerate(zip(answers, self.pieces, strict=True)):
            found = _completion(answer)
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


def _completion(answer: RequestOutput) -> CompletionOutput:
    (found,) = answer.outputs
    return found


def _form(options: TranscribeOptions) -> TranscriptionRequest | TranslationRequest:
    """Return the options as the form of the HTTP API; RequestError if one has a wrong type."""
    given = {name: options.get(name) for name in ("language", "prompt", "to_language")}
    for name, value in given.items():
        if not isinstance(value, str | None):
            raise RequestError(f"{name} is {value!r:.80}: it must be text")
    language, prompt, to_language = options.get("language"), options.get("prompt"), options.get("to_language")
    form: ResponseFormat = "verbose_json" if options.get("return_timestamps") else "json"
    if to_language is None:
        return TranscriptionRequest(file="", response_format=form, language=language, prompt=prompt)
    return TranslationRequest(file="", response_format=form, language=language, to_language=to_language, prompt=prompt)


class Piece(NamedTuple):
    """A piece of a clip, with its start and end in the clip in seconds."""

    medium: Medium
    start_s: float
    end_s: float


def pieces_of(audio: object, piece_s: float) -> Iterator[Piece]:
    """Decode a clip and yield its pieces, cut at quiet places as by the HTTP API, of at most `piece_s` seconds each.
    `audio`: (samples, rate), the bytes of a file, or a path. RequestError, possibly between pieces, if the clip cannot
    be read."""
    if audio is None or (isinstance(audio, str) and audio[:5].lower() in ("http:", "https", "file:")):
        raise RequestError(
            f"the audio {audio!r:.200} is not read here: give (samples, rate), bytes of a file or a path"
        )
    start, blocks = 0, decode_audio(memoryview(bytes_of(audio, "audio")), math.inf)
    for samples in cut_at_quiet_places(blocks, int(piece_s * SAMPLE_RATE)):
        end = start + len(samples)
        yield Piece(to_medium((samples, SAMPLE_RATE), "audio"), start / SAMPLE_RATE, end / SAMPLE_RATE)
        start = end

"""Transcription: the response of /v1/audio/transcriptions and /v1/audio/translations, as a whole or as events.

A clip is cut into pieces, and each piece becomes a request; at most MAX_OPEN_PIECES of a clip run at a time. The first
error of a piece ends the whole response with that error. A stream sends the pieces' texts in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple

from starlette.responses import Response

from .....ipc.codec import JsonObject, decode_ids, encode_ids, num_ids
from .....ipc.errors import RequestError
from .....ipc.messages.client import Medium, Submit
from .....ipc.messages.intake import BodyInput
from .....ipc.params.sampling_params import SamplingParams
from ....forms.openai.errors import encode_json
from ....forms.openai.logprobs import token_logprob
from ....forms.openai.params import errors_about, prompt_errors_about
from ....forms.openai.prompts import answer_id
from ....forms.openai.transcription_body import TranscriptionRequest, TranslationRequest
from ....forms.speech.form_task import check_form, params_of, task_of
from ....forms.speech.languages import Language
from ....forms.speech.piece_answer import Token
from ....forms.speech.prompts import LanguageQuestion, Task, TaskPrompt, TranscriptionPrompts
from ....forms.speech.subtitles import srt, vtt
from ....forms.speech.transcript import Segment, Transcript
from ...bodies.body_parser import ParsedBody
from ..continuation import current
from ..openai.choices import EngineResponse
from ..openai.events import DONE, event
from ..openai.local_engine import LocalEngine
from ..openai.run import ChoiceDeltas, Run

MAX_OPEN_PIECES = 16  # requests of one clip that run at a time
FRAMES_PER_S = 100  # the unit of a segment's `seek`


class Hearing(NamedTuple):
    """Properties of a model that accepts audio."""

    piece_s: float  # length of the longest piece in seconds
    prompts: TranscriptionPrompts
    defaults: Mapping[str, object]  # the model's sampling parameters
    on_heard: Callable[[float], None]  # called with the seconds of each transcribed clip


class Transcription(EngineResponse):
    """Response to one form with an audio clip. Only one of `whole` and `events` may be called, once. Created by
    `start`."""

    prompt_field, max_open, goes_on = "file", MAX_OPEN_PIECES, True

    def __init__(
        self,
        engine: LocalEngine,
        hearing: Hearing,
        parsed: ParsedBody[TranscriptionRequest] | ParsedBody[TranslationRequest],
        model: str,
        task: Task,
        params: SamplingParams,
        prompt_ids: bytes,
    ) -> None:
        super().__init__(engine, model, answer_id("trsc", parsed.body.request_id, current().digits("id")), [])
        self._hearing, self._body, self._task = hearing, parsed.body, task
        self._params, self._prompt_ids = params, prompt_ids
        self._clip = parsed.inputs[0].media[0]
        self._has_logprobs = bool(getattr(parsed.body, "include", None))
        self._last_event = b""

    @classmethod
    async def start(
        cls,
        engine: LocalEngine,
        hearing: Hearing,
        parsed: ParsedBody[TranscriptionRequest] | ParsedBody[TranslationRequest],
        model: str,
    ) -> Transcription:
        """Check all fields, make the prompt and return the response; `whole` or `events` reads the clip."""
        body, question = parsed.body, hearing.prompts.language_question
        check_form(body)
        task, params = task_of(body), params_of(body, hearing.defaults)
        language = task.language or (question and question.any_language)  # until the model has detected it
        prompt = hearing.prompts.prompt(task._replace(language=language))
        engine.put(parsed.inputs[0].media)
        prompt_ids = await prompt_tokens(engine, prompt)
        params = params.replace(skip_special_tokens=not prompt.keeps_special_tokens)
        return cls(engine, hearing, parsed, model, task, params, prompt_ids)

    @contextlib.asynccontextmanager
    async def _transcribing(self) -> AsyncIterator[tuple[Run, Transcript]]:
        """Read the clip, cut it into pieces and submit them; the context's value is their run and an empty
        transcript."""
        inputs, prompts = self._engine.inputs, self._hearing.prompts
        async with contextlib.AsyncExitStack() as stack:
            reading = self._engine.pieces(self._clip, self._hearing.piece_s, inputs.wait_s(self._params))
            with errors_about("file: ", ""):
                pieces = await stack.enter_async_context(reading)
            if self._task.language is None and prompts.language_question is not None and pieces:
                await self._detect_language(pieces[0].digest, prompts.language_question)
            self._submits = [
                Submit(
                    request_id=self.id if len(pieces) == 1 else f"{self.id}/{place}",
                    params=self._params,
                    prompt_token_ids=self._prompt_ids,
                    media=[Medium(kind="audio", digest=piece.digest)],
                )
                for place, piece in enumerate(pieces)
            ]
            self.pin_adapter(self._engine.adapter_digest(self.model))  # so that all pieces use the same adapter
            transcript = Transcript(pieces, lambda: prompts.new_reader(self._task), inputs.eos_token_ids)
            with self.run() as run:
                yield run, transcript

    async def _detect_language(self, piece: bytes, question: LanguageQuestion) -> None:
        """Let the model detect the language of one piece, and use it for the whole clip."""
        with prompt_errors_about(self.prompt_field):
            language = await detect_language(self._engine, question, f"{self.id}/language", piece, self._params)
        self._task = self._task._replace(language=language)
        self._prompt_ids = await prompt_tokens(self._engine, self._hearing.prompts.prompt(self._task))

    def _add(self, transcript: Transcript, deltas: ChoiceDeltas) -> None:
        for place, delta in deltas:
            if delta.finish_reason in ("abort", "timeout"):
                piece, reason = f"piece {place + 1} of {len(self._submits)}", delta.finish_reason
                raise RequestError(f"file: {piece} ended with {reason} amid its transcript: send the file again")
            transcript.add(place, delta)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events; the caller sends the `end`."""
        tokens = list[Token]()
        async with self._transcribing() as (run, transcript):
            async for deltas in run.deltas():
                self._add(transcript, deltas)
                text, new = transcript.take()
                if text:
                    yield event({"type": "transcript.text.delta", "delta": text} | self._logprobs(new))
                    tokens += new
            done: JsonObject = {"type": "transcript.text.done", "text": transcript.text}
            self._last_event = event(done | self._logprobs(tokens) | {"usage": self._usage(run)})
            self._hearing.on_heard(transcript.duration_s)

    def end(self) -> bytes:
        """Return the events after those of `events`."""
        return self._last_event + DONE

    async def whole(self) -> bytes | Response:
        async with self._transcribing() as (run, transcript):
            async for deltas in run.deltas():
                self._add(transcript, deltas)
            _, tokens = transcript.take()
            self._hearing.on_heard(transcript.duration_s)
            match self._body.response_format:
                case "text":
                    return Response(transcript.text + "\n", media_type="text/plain")
                case "srt":
                    return Response(srt(transcript.segments()), media_type="text/plain")
                case "vtt":
                    return Response(vtt(transcript.segments()), media_type="text/vtt")
                case "verbose_json":
                    return encode_json(self._verbose(transcript))
                case _:
                    return encode_json({"text": transcript.text} | self._logprobs(tokens) | {"usage": self._usage(run)})

    def _verbose(self, transcript: Transcript) -> JsonObject:
        spoken = self._task.language or transcript.language
        language = self._task.to_language if self._task.kind == "translate" else spoken
        return {
            "task": self._task.kind,
            "language": "unknown" if language is None else language.name.lower(),
            "duration": transcript.duration_s,
            "text": transcript.text,
            "segments": [self._segment(place, each) for place, each in enumerate(transcript.segments())],
            "usage": {"type": "duration", "seconds": transcript.duration_s},
        }

    def _segment(self, place: int, segment: Segment) -> JsonObject:
        return {
            "id": place,
            "seek": int(segment.start_s * FRAMES_PER_S),
            "start": segment.start_s,
            "end": segment.end_s,
            "text": segment.text,
            "tokens": [token.token_id for token in segment.tokens],
            "temperature": self._params.temperature,
            "avg_logprob": segment.mean_logprob,
            "compression_ratio": segment.compression_ratio,
            "no_speech_prob": 0.0,  # no model here gives it
        }

    def _logprobs(self, tokens: Sequence[Token]) -> JsonObject:
        """Return the field `logprobs` for `tokens`; {} unless the request asks for it."""
        if not self._has_logprobs:
            return {}
        token_bytes = self._engine.inputs.token_bytes
        shown = [token_logprob(each.token_id, each.text, each.logprob, token_bytes) for each in tokens]
        return {"logprobs": shown}

    def _usage(self, run: Run) -> JsonObject:
        """Return OpenAI's usage. The tokens of the prompts, without the audio's marker, are text; all other input is
        audio."""
        num_input, num_output = run.num_prompt_tokens, run.num_completion_tokens
        num_text = run.num_choices * (num_ids(self._prompt_ids) - self._hearing.prompts.has_marker)
        return {
            "type": "tokens",
            "input_tokens": num_input,
            "input_token_details": {"text_tokens": num_text, "audio_tokens": num_input - num_text},
            "output_tokens": num_output,
            "total_tokens": num_input + num_output,
        }


async def prompt_tokens(engine: LocalEngine, prompt: TaskPrompt) -> bytes:
    """Return the token ids of a prompt, preceded by the end of its context, if it has one."""
    text = (await engine.rendered([*prompt.turns]) if prompt.turns else "") + prompt.text
    token_ids = await engine.text_tokens(BodyInput(text=text), False)
    if prompt.context is None:
        return token_ids
    mark = await engine.text_tokens(BodyInput(text=prompt.context.mark), False)
    words = decode_ids(await engine.text_tokens(BodyInput(text=prompt.context.text), False, "left"))
    return mark + encode_ids(words[-prompt.context.max_tokens :]) + token_ids


async def detect_language(
    engine: LocalEngine, question: LanguageQuestion, request_id: str, clip: bytes, params: SamplingParams
) -> Language:
    """Return the language that the model detects in a clip: one greedy token among `question.languages`.

    `clip`: the digest of its media file; `params`: those of the transcription. RequestError if no token is generated.
    """
    submit = Submit(
        request_id=request_id,
        params=params.replace(
            temperature=0.0, max_tokens=1, logprobs=None, allowed_token_ids=sorted(question.languages)
        ),
        prompt_token_ids=await engine.text_tokens(BodyInput(text=question.text), False),
        media=[Medium(kind="audio", digest=clip)],
    )
    token_ids, reason = list[int](), None
    with engine.run([submit]) as run:
        async for deltas in run.deltas():
            for _, delta in deltas:
                token_ids += decode_ids(delta.token_ids).tolist()
                reason = delta.finish_reason
    if not token_ids:
        raise RequestError(f"file: the detection of its language ended with {reason}: send it again, or give language")
    return question.languages[token_ids[0]]

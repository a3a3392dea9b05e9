"""Convert the form of a transcription or translation to a Task, and to SamplingParams for the pieces of its clip."""

from __future__ import annotations

from collections.abc import Mapping

from ....ipc.errors import RequestError
from ....ipc.params.sampling_params import LENGTH, SamplingParams
from ..openai.params import given_params, refuse_unserved
from ..openai.transcription_body import AudioForm, TranscriptionRequest, TranslationRequest
from .languages import ENGLISH, Language, find_language
from .prompts import Task

MAX_PROMPT_CHARACTERS = 16 << 10
STREAMED = ("json", "text")  # values of response_format
TIMED = ("verbose_json", "srt", "vtt")


def check_form(body: AudioForm) -> None:
    """Raise RequestError if fields are not served, or contradict each other."""
    refuse_unserved(body)
    form = body.response_format or "json"
    if body.stream and form not in STREAMED:
        raise RequestError(f"response_format is {form}, which is not streamed: choose json, or leave stream out")
    if body.prompt is not None and len(body.prompt) > MAX_PROMPT_CHARACTERS:
        raise RequestError(
            f"prompt has {len(body.prompt)} characters, at most {MAX_PROMPT_CHARACTERS} are taken: shorten it"
        )
    if not isinstance(body, TranscriptionRequest):
        return
    if body.timestamp_granularities and form != "verbose_json":
        raise RequestError(f"timestamp_granularities needs response_format verbose_json, which is {form}: change it")
    if "word" in (body.timestamp_granularities or ()):
        raise RequestError(
            "timestamp_granularities has word, but this model gives no times of words: ask for segment alone"
        )
    if body.include and form != "json":
        raise RequestError(f"include needs response_format json, which is {form}: change it, or leave include out")


def task_of(body: TranscriptionRequest | TranslationRequest) -> Task:
    """Return the task that a form describes; RequestError if a language is unknown."""
    language, prompt = _language("language", body.language), (body.prompt or "").strip()
    has_times = body.response_format in TIMED
    if isinstance(body, TranslationRequest):
        return Task("translate", language, _language("to_language", body.to_language) or ENGLISH, prompt, has_times)
    return Task("transcribe", language, prompt=prompt, has_times=has_times)


def params_of(body: AudioForm, defaults: Mapping[str, object]) -> SamplingParams:
    """Return the parameters of each piece's request; RequestError if one is invalid. `defaults`: the model's sampling
    defaults. Those for the temperature and for max_tokens do not apply: here the temperature is 0 by default, and the
    length what the model allows."""
    most = body.max_completion_tokens
    if most is not None:
        LENGTH.check("max_completion_tokens", most)
    own: dict[str, object] = {name: value for name, value in defaults.items() if getattr(body, name, None) is None}
    own |= {"temperature": body.temperature or 0.0, "max_tokens": most}
    own["logprobs"] = 0 if body.response_format == "verbose_json" or getattr(body, "include", None) else None
    params = given_params(body, **own)
    return params if most is not None else params.replace(max_tokens=None)  # up to the model's length


def _language(field: str, given: str | None) -> Language | None:
    if not given or not given.strip():
        return None
    found = find_language(given)
    if found is None:
        raise RequestError(
            f"{field} is {given!r:.80}, which is no language of ISO 639-1: give a code such as en, or a name"
        )
    return found

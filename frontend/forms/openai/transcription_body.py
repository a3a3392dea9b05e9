"""Define the forms of transcriptions and translations: OpenAI's fields and further ones under vLLM's names.

A form is sent as multipart/form-data (`bodies/form_data.py`). The struct has the SHA-256 of its file, which is put into
the blob store.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta

from ..field import means, ours, unused
from .generation import Scheduled

FORM_TYPE = "multipart/form-data"
ResponseFormat: TypeAlias = Literal["json", "text", "srt", "verbose_json", "vtt"]
Granularity: TypeAlias = Literal["segment", "word"]
Upload: TypeAlias = Annotated[str, Meta(extra_json_schema={"format": "binary"})]


class Form(Scheduled, frozen=True, kw_only=True):
    """Base of the bodies that are sent as multipart/form-data. Fields of type Upload hold the SHA-256 of a file in
    hex."""

    FILES: ClassVar[tuple[str, ...]] = ()  # names of the fields that are files


class AudioForm(Form, frozen=True, kw_only=True):
    """Fields of transcriptions and translations."""

    FILES = ("file",)
    NOT_SERVED = Scheduled.NOT_SERVED | {
        "n": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "truncate_prompt_tokens": (),
        "truncation_side": (),
    }

    EXAMPLE: ClassVar = {"response_format": "json"}  # beside the file

    file: Annotated[Upload, means("The clip: a file of audio, such as WAV, FLAC, MP3 or OGG.")]
    prompt: Annotated[str | None, means("Names and words that may occur.", "none")] = None
    response_format: Annotated[
        ResponseFormat | None, means("Plain text, JSON, JSON with segments and times, or subtitles.", "json")
    ] = None
    temperature: Annotated[float | None, means("How freely tokens are drawn; 0 takes the likeliest.", 0)] = None
    # beyond OpenAI
    stream: Annotated[  # beyond OpenAI only for translations
        bool | None, means("Send the text piece by piece, as server-sent events.", False)
    ] = None
    stream_include_usage: Annotated[bool | None, unused("The last event always has the usage.")] = None
    stream_continuous_usage_stats: Annotated[bool | None, unused("Only the last event has the usage.")] = None
    top_p: Annotated[
        float | None, ours("Draw only from the likeliest tokens whose probabilities first reach this sum.")
    ] = None
    top_k: Annotated[int | None, ours("Draw only from this many of the likeliest tokens; 0 or -1: from all.")] = None
    min_p: Annotated[float | None, ours("Draw only tokens at least this likely, relative to the likeliest.")] = None
    seed: Annotated[int | None, ours("Equal seeds draw equal tokens.", "a new one for each request")] = None
    frequency_penalty: Annotated[
        float | None, ours("Subtracted from the logit of a token for each time that the text has it.")
    ] = None
    presence_penalty: Annotated[float | None, ours("Subtracted from the logit of each token that the text has.")] = None
    repetition_penalty: Annotated[
        float | None, ours("Above 1, tokens that the text has become less likely; 1: off.")
    ] = None
    max_completion_tokens: Annotated[
        int | None, ours("The longest text of a piece, in tokens.", "what the model allows")
    ] = None
    n: Annotated[int | None, ours("Number of transcripts; only one is made.", 1)] = None
    use_beam_search: Annotated[bool | None, ours("Beam search, which only the Python library has.", False)] = None
    length_penalty: Annotated[float | None, ours("Of beam search, which only the Python library has.", 1)] = None


class TranscriptionRequest(AudioForm, frozen=True, kw_only=True):
    """POST /v1/audio/transcriptions."""

    NOT_SERVED = AudioForm.NOT_SERVED | {
        "chunking_strategy": ("auto",),
        "languages": ([],),
        "keywords": ([],),
        "known_speaker_names": ([],),
        "known_speaker_references": ([],),
    }

    language: Annotated[
        str | None, means("The spoken language: a code of ISO 639-1 or an English name.", "the model finds it")
    ] = None
    timestamp_granularities: Annotated[
        list[Granularity] | None, means("What has times in verbose_json; only segment is served.", "segment")
    ] = None
    include: Annotated[
        list[Literal["logprobs"]] | None, means("Return the logprobs of the text's tokens.", "not returned")
    ] = None
    chunking_strategy: Annotated[
        str | None, means("How long clips are cut; auto is the only way: at quiet places.", "auto")
    ] = None
    languages: Annotated[list[str] | None, means("Languages that may occur; give one as language.", "none")] = None
    keywords: Annotated[list[str] | None, means("Words that may occur; give them in prompt.", "none")] = None
    known_speaker_names: Annotated[
        list[str] | None, means("Names of speakers to tell apart, which no model here does.", "none")
    ] = None
    known_speaker_references: Annotated[
        list[str] | None, means("Clips of those speakers, which no model here reads.", "none")
    ] = None


class TranslationRequest(AudioForm, frozen=True, kw_only=True):
    """POST /v1/audio/translations."""

    # beyond OpenAI
    language: Annotated[str | None, ours("The spoken language.", "the model finds it")] = None
    to_language: Annotated[str | None, ours("Language of the translation, where the model has more.", "English")] = None

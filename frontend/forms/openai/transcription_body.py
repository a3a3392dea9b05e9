"""Define the forms of transcriptions and translations: OpenAI's fields and further ones under vLLM's names.

A form is sent as multipart/form-data (`bodies/form_data.py`). The struct has the SHA-256 of its file, which is put into
the blob store.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta

from .schema import Scheduled

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

    file: Upload
    prompt: str | None = None
    response_format: ResponseFormat | None = None
    temperature: float | None = None
    # beyond OpenAI
    stream: bool | None = None  # beyond OpenAI only for translations
    stream_include_usage: bool | None = None  # the last event always has it
    stream_continuous_usage_stats: bool | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None


class TranscriptionRequest(AudioForm, frozen=True, kw_only=True):
    """POST /v1/audio/transcriptions."""

    NOT_SERVED = AudioForm.NOT_SERVED | {
        "chunking_strategy": ("auto",),
        "languages": ([],),
        "keywords": ([],),
        "known_speaker_names": ([],),
        "known_speaker_references": ([],),
    }

    language: str | None = None
    timestamp_granularities: list[Granularity] | None = None
    include: list[Literal["logprobs"]] | None = None
    chunking_strategy: str | None = None
    languages: list[str] | None = None
    keywords: list[str] | None = None
    known_speaker_names: list[str] | None = None
    known_speaker_references: list[str] | None = None


class TranslationRequest(AudioForm, frozen=True, kw_only=True):
    """POST /v1/audio/translations."""

    # beyond OpenAI
    language: str | None = None  # the spoken language
    to_language: str | None = None  # language of the translation; null: English

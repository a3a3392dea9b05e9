"""TranscriptionPrompts: prompts with which a model family transcribes or translates a clip, and readers of its answers.

Each piece of a clip gets the same prompt. For families without a prompt format of their own, it is a chat.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol, TypeAlias

from ....ipc.errors import RequestError
from ....ipc.messages.client import ChatMessage, MediaPart, TextPart
from .languages import ENGLISH, LANGUAGES, Language

SPECIAL = re.compile(r"<\|[^<|>]*\|>")  # a special token, as most models write it
TaskKind: TypeAlias = Literal["transcribe", "translate"]


class Task(NamedTuple):
    """The task that a caller sets for a clip."""

    kind: TaskKind
    language: Language | None = None  # the spoken language; None: unknown
    to_language: Language = ENGLISH  # language of a translation
    prompt: str = ""  # names and words that may occur
    has_times: bool = False  # return times of the parts of a piece, if the model gives them


class Context(NamedTuple):
    """A text before the prompt, preceded by the token `mark`. Only its last `max_tokens` tokens are kept."""

    mark: str
    text: str
    max_tokens: int


class TaskPrompt(NamedTuple):
    """Prompt of a piece: the context, the turns of a chat rendered by the model's template, and then `text`."""

    turns: tuple[ChatMessage, ...] = ()
    text: str = ""
    context: Context | None = None
    keeps_special_tokens: bool = False  # the text of answers has its special tokens


class LanguageQuestion(NamedTuple):
    """A prompt, `text`, to which a model answers with one of its tokens for languages."""

    text: str
    languages: Mapping[int, Language]  # by token id

    @property
    def any_language(self) -> Language:
        return next(iter(self.languages.values()))


class Spoken(NamedTuple):
    """A part of an answer with times. [begin, end): its characters in the answer; times are seconds from the start of
    the piece."""

    text: str
    begin: int
    end: int
    start_s: float
    end_s: float


class AnswerReader(Protocol):
    """Interface of a reader of the growing answer to one piece."""

    @property
    def language(self) -> Language | None:
        """The language that the answer names; None if it names none."""

    @property
    def begin(self) -> int:
        """Number of characters before the transcript in the answer."""

    def append(self, text: str) -> str:
        """Read the next text of the answer, and return the text that it adds to the transcript."""

    def finish(self) -> str:
        """Return the last text of the transcript, after the end of the answer."""

    def spoken(self) -> list[Spoken]:
        """Return the parts of the finished answer that have times; [] if the answer has no times."""


class TranscriptionPrompts(Protocol):
    """Interface of a family's prompts, and of the readers of its answers."""

    has_marker: bool  # prompts have a token in place of the clip
    language_question: LanguageQuestion | None  # for the first piece, if the caller names no language

    def prompt(self, task: Task) -> TaskPrompt:
        """Return the prompt for each piece. RequestError, which begins with the name of a field, if the family does not
        support the task."""

    def new_reader(self, task: Task) -> AnswerReader:
        """Return a reader for the answer to a piece."""


class PlainReader:
    """Reader of answers that contain only the transcript."""

    language: Language | None = None
    begin = 0

    def append(self, text: str) -> str:
        return text

    def finish(self) -> str:
        return ""

    def spoken(self) -> list[Spoken]:
        return []


class ChatPrompts:
    """Prompts of a model that takes audio in chats: the clip, and an instruction."""

    has_marker = True
    language_question: LanguageQuestion | None = None

    def prompt(self, task: Task) -> TaskPrompt:
        return TaskPrompt((ChatMessage("user", [MediaPart(0), TextPart(instruction(task))]),))

    def new_reader(self, task: Task) -> AnswerReader:
        return PlainReader()


def instruction(task: Task) -> str:
    """Return the task as an instruction for a chat model."""
    if task.kind == "translate":
        sentences = [f"Translate the speech into {task.to_language.name}. Answer with the translation alone."]
    else:
        sentences = ["Transcribe the speech word for word. Answer with the transcript alone."]
    if task.language is not None:
        sentences.append(f"The speech is in {task.language.name}.")
    if task.prompt:
        sentences.append(f"For context: {task.prompt}")
    return " ".join(sentences)


def refuse_language(language: Language, known: list[Language]) -> RequestError:
    """Return the error for a language that a family does not support."""
    codes = ", ".join(f"{each.code} ({each.name})" for each in known)
    return RequestError(
        f"language is {language.code} ({language.name}), this model transcribes {codes}: choose another"
    )


def languages(codes: str) -> list[Language]:
    """Return the languages of codes that are separated by blanks."""
    return [LANGUAGES[code] for code in codes.split()]

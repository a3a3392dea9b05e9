"""TranscriptionPrompts: how a family of models is asked to transcribe or translate a clip, and how it answers.

The same prompt goes with each piece of a clip. Families without a form of their own are asked in a chat.
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
    """What a caller wants of a clip."""

    kind: TaskKind
    language: Language | None = None  # of the speech; None: unknown
    to_language: Language = ENGLISH  # of a translation
    prompt: str = ""  # names and words that may occur
    has_times: bool = False  # of the parts of a piece, if the model gives them


class Context(NamedTuple):
    """A text before the prompt, behind a token `mark`. At most `max_tokens` of it are kept, the last ones."""

    mark: str
    text: str
    max_tokens: int


class TaskPrompt(NamedTuple):
    """Prompt of a piece: the context, the turns of a chat as the model's template shows them, and then `text`."""

    turns: tuple[ChatMessage, ...] = ()
    text: str = ""
    context: Context | None = None
    keeps_special_tokens: bool = False  # in the text of answers


class LanguageQuestion(NamedTuple):
    """A prompt `text` that a model answers with one of the tokens that name a language."""

    text: str
    languages: Mapping[int, Language]  # by their tokens

    @property
    def any_language(self) -> Language:
        return next(iter(self.languages.values()))


class Spoken(NamedTuple):
    """A part of an answer with times: [begin, end) in characters of the answer, seconds from the begin of its piece."""

    text: str
    begin: int
    end: int
    start_s: float
    end_s: float


class AnswerReader(Protocol):
    """Reader of the answer to one piece, as it grows."""

    @property
    def language(self) -> Language | None:
        """The language that the answer names."""

    @property
    def begin(self) -> int:
        """Where the transcript begins in the answer, in characters."""

    def append(self, text: str) -> str:
        """Take the next text of the answer and return the next text of the transcript."""

    def finish(self) -> str:
        """Return the last text of the transcript, after the end of the answer."""

    def spoken(self) -> list[Spoken]:
        """Return the parts of the finished answer that have times; without any, the piece is one."""


class TranscriptionPrompts(Protocol):
    """Prompts of a family, and readers of its answers."""

    has_marker: bool  # prompts have a token at the place of the clip
    language_question: LanguageQuestion | None  # asked about the first piece if the caller names no language

    def prompt(self, task: Task) -> TaskPrompt:
        """Return the prompt of each piece. RequestError, which begins with the name of a field, for a task that the
        family does not know."""

    def new_reader(self, task: Task) -> AnswerReader:
        """Return a reader for the answer to a piece."""


class PlainReader:
    """Reader of answers that are transcripts."""

    language: Language | None = None
    begin = 0

    def append(self, text: str) -> str:
        return text

    def finish(self) -> str:
        return ""

    def spoken(self) -> list[Spoken]:
        return []


class ChatPrompts:
    """Prompts of a model that hears audio in chats: the clip, and an instruction."""

    has_marker = True
    language_question: LanguageQuestion | None = None

    def prompt(self, task: Task) -> TaskPrompt:
        return TaskPrompt((ChatMessage("user", [MediaPart(0), TextPart(instruction(task))]),))

    def new_reader(self, task: Task) -> AnswerReader:
        return PlainReader()


def instruction(task: Task) -> str:
    """Return the order to a model that follows instructions."""
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
    """Return the error of a language that a family does not know."""
    codes = ", ".join(f"{each.code} ({each.name})" for each in known)
    return RequestError(
        f"language is {language.code} ({language.name}), this model transcribes {codes}: choose another"
    )


def languages(codes: str) -> list[Language]:
    """Return the languages of codes with blanks between them."""
    return [LANGUAGES[code] for code in codes.split()]

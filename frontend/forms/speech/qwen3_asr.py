"""Qwen3-ASR's prompts, a chat with the context as system turn, and its answers: `language NAME<asr_text>transcript`.

If the caller names the language, the answer's head («language NAME<asr_text>») is part of the prompt. The model
transcribes and does not translate.
"""

from __future__ import annotations

from ....ipc.errors import RequestError
from ....ipc.messages.client import ChatMessage, MediaPart
from .languages import Language, find_language
from .prompts import AnswerReader, LanguageQuestion, PlainReader, Spoken, Task, TaskPrompt, languages, refuse_language

MARK = "<asr_text>"
HEAD = "language "
MAX_HEAD_CHARACTERS = 64  # an answer without the mark in its first characters is all transcript
KNOWN = languages(
    "ar yue zh cs da nl en fil fi fr de el hi hu id it ja ko mk ms fa pl pt ro ru es sv th tr vi"  # as in its card
)


class Qwen3AsrPrompts:
    """Prompts of Qwen3-ASR."""

    has_marker = True
    language_question: LanguageQuestion | None = None

    def prompt(self, task: Task) -> TaskPrompt:
        if task.kind == "translate":
            raise RequestError("file cannot be translated by this model, which only transcribes: transcribe it")
        if task.language is not None and task.language not in KNOWN:
            raise refuse_language(task.language, KNOWN)
        system = (ChatMessage("system", task.prompt),) if task.prompt else ()
        head = "" if task.language is None else f"{HEAD}{task.language.name}{MARK}"
        return TaskPrompt((*system, ChatMessage("user", [MediaPart(0)])), head)

    def new_reader(self, task: Task) -> AnswerReader:
        return HeadReader() if task.language is None else PlainReader()


class HeadReader:
    """Reader of answers with a head. It holds the text back until the head is complete."""

    def __init__(self) -> None:
        self.language: Language | None = None
        self.begin = 0
        self._head: str | None = ""  # the head so far; None after its end

    def append(self, text: str) -> str:
        if self._head is None:
            return text
        self._head += text
        head, mark, transcript = self._head.partition(MARK)
        if mark:
            self._head, self.begin = None, len(head) + len(MARK)
            self.language = find_language(head.strip().removeprefix(HEAD))
            return transcript
        return self.finish() if len(self._head) > MAX_HEAD_CHARACTERS else ""

    def finish(self) -> str:
        rest, self._head = self._head or "", None
        return rest

    def spoken(self) -> list[Spoken]:
        return []

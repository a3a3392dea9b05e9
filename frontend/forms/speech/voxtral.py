"""Voxtral's prompts: for transcripts in a format of its own, as mistral-common writes it, for translations as a
chat."""

from __future__ import annotations

from ....ipc.errors import RequestError
from .prompts import AnswerReader, LanguageQuestion, PlainReader, Task, TaskPrompt, instruction

CLIP = "[BEGIN_AUDIO][AUDIO]"


class VoxtralPrompts:
    """Prompts of Voxtral."""

    has_marker = True
    language_question: LanguageQuestion | None = None

    def prompt(self, task: Task) -> TaskPrompt:
        if task.kind == "translate":
            return TaskPrompt(text=f"<s>[INST]{CLIP}{instruction(task)}[/INST]")
        if task.prompt:
            raise RequestError("prompt has no place in this model's transcriptions: leave it out")
        language = "" if task.language is None else f"lang:{task.language.code}"
        return TaskPrompt(text=f"<s>[INST]{CLIP}[/INST]{language}[TRANSCRIBE]")

    def new_reader(self, task: Task) -> AnswerReader:
        return PlainReader()

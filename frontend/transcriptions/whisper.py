"""Whisper's prompts: tokens that name language and task, behind the clip that each request begins with.

The caller names the language, since nothing here detects it. Answers have no times, so that a piece is a segment.
"""

from __future__ import annotations

from ...ipc.errors import RequestError
from .languages import ENGLISH
from .prompts import AnswerReader, PlainReader, Task, TaskPrompt


class WhisperPrompts:
    """Prompts of Whisper, which translates into English alone."""

    keeps_special_tokens = False
    has_marker = False

    def prompt(self, task: Task) -> TaskPrompt:
        if task.language is None:
            raise RequestError("language is missing, this model does not detect it here: name that of the speech")
        if task.kind == "translate" and task.to_language != ENGLISH:
            raise RequestError(f"to_language is {task.to_language.code}, this model translates into en: leave it out")
        before = f"<|startofprev|> {task.prompt.strip()}" if task.prompt.strip() else ""
        begin = f"<|startoftranscript|><|{task.language.code}|><|{task.kind}|><|notimestamps|>"
        return TaskPrompt(text=before + begin)

    def new_reader(self, task: Task) -> AnswerReader:
        return PlainReader()

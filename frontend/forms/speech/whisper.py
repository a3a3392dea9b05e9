"""Whisper's prompts: tokens that name language and task, after the clip with which each request starts.

If the caller names no language, the model detects it: its token after <|startoftranscript|> names it. Answers have
times if the task asks for them: `<|0.00|> Hello there.<|1.50|><|1.50|> General Kenobi.<|2.84|>`.
"""

from __future__ import annotations

import math
import re

from ....ipc.errors import RequestError
from ....ipc.messages.client import SpeechModel
from .languages import ENGLISH, Language, find_language
from .prompts import SPECIAL, AnswerReader, Context, LanguageQuestion, Spoken, Task, TaskPrompt, refuse_language

BEGIN = "<|startoftranscript|>"
OTHER_CODES = {"jw": "jv"}  # code in a token → code of ISO 639-1
TIME = re.compile(r"<\|(\d+\.\d\d)\|>")


class WhisperPrompts:
    """Prompts of a Whisper model, which translates only into English. Some models know only English, and have no tokens
    for languages and tasks in their prompts."""

    has_marker = False

    def __init__(self, model: SpeechModel) -> None:
        ids = model.language_ids
        self._max_context_tokens, self._has_times = model.max_context_tokens, model.has_times
        self._is_english = ids == {}
        known = {code: find_language(OTHER_CODES.get(code, code)) for code in ids or ()}
        self._codes = {language: code for code, language in known.items() if language is not None}
        by_id = {(ids or {})[code]: language for language, code in self._codes.items()}
        self.language_question = LanguageQuestion(BEGIN, by_id) if by_id else None

    def prompt(self, task: Task) -> TaskPrompt:
        text = BEGIN + self._order(task) + ("" if self._are_timed(task) else "<|notimestamps|>")
        context = Context("<|startofprev|>", f" {task.prompt}", self._max_context_tokens) if task.prompt else None
        return TaskPrompt(text=text, context=context, keeps_special_tokens=self._are_timed(task))

    def _order(self, task: Task) -> str:
        """Return the tokens of language and task; "" for a model that knows only English. RequestError if the model
        does not support these."""
        if task.kind == "translate" and task.to_language != ENGLISH:
            raise RequestError(f"to_language is {task.to_language.code}, this model translates into en: leave it out")
        if self._is_english:
            if task.kind == "translate":
                raise RequestError("file cannot be translated by this model, which knows English: transcribe it")
            if task.language not in (None, ENGLISH):
                raise refuse_language(task.language, [ENGLISH])
            return ""
        if task.language is None:
            raise RequestError("language is missing, this model does not detect it: name that of the speech")
        if self._codes and task.language not in self._codes:
            raise refuse_language(task.language, list(self._codes))
        return f"<|{self._codes.get(task.language, task.language.code)}|><|{task.kind}|>"

    def _are_timed(self, task: Task) -> bool:
        return task.has_times and self._has_times

    def new_reader(self, task: Task) -> AnswerReader:
        return TimedReader(ENGLISH if self._is_english else None)


class TimedReader:
    """Reader of answers with times. A time is one token, so its text arrives at once. Times and other special tokens
    are left out of the transcript, even if no times were requested."""

    begin = 0

    def __init__(self, language: Language | None = None) -> None:
        self.language = language
        self._answer = ""

    def append(self, text: str) -> str:
        self._answer += text
        return SPECIAL.sub("", text)

    def finish(self) -> str:
        return ""

    def spoken(self) -> list[Spoken]:
        """Return the texts between times. The last one may have no end (inf), for example if the answer was cut off."""
        parts, begin, start_s = list[Spoken](), 0, 0.0
        for time in TIME.finditer(self._answer):
            parts.append(self._part(begin, time.start(), start_s, float(time[1])))
            begin, start_s = time.end(), float(time[1])
        return [*parts, self._part(begin, len(self._answer), start_s, math.inf)]

    def _part(self, begin: int, end: int, start_s: float, end_s: float) -> Spoken:
        return Spoken(SPECIAL.sub("", self._answer[begin:end]), begin, end, start_s, end_s)

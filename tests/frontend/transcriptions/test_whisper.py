"""Whisper is asked by the tokens of its own prompts."""

from __future__ import annotations

import pytest

from tokenloom.frontend.transcriptions.languages import LANGUAGES
from tokenloom.frontend.transcriptions.prompts import Task
from tokenloom.frontend.transcriptions.whisper import WhisperPrompts
from tokenloom.ipc.errors import RequestError

GERMAN = LANGUAGES["de"]


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (Task("transcribe", GERMAN), "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"),
        (Task("translate", GERMAN), "<|startoftranscript|><|de|><|translate|><|notimestamps|>"),
        (
            Task("transcribe", GERMAN, prompt="Aachen, Köln "),
            "<|startofprev|> Aachen, Köln<|startoftranscript|><|de|><|transcribe|><|notimestamps|>",
        ),
    ],
)
def test_language_task_and_context_are_tokens_of_the_prompt(task: Task, expected: str) -> None:
    prompt = WhisperPrompts().prompt(task)
    assert (prompt.turns, prompt.text) == ((), expected)


def test_a_task_without_a_language_or_into_another_one_is_refused() -> None:
    with pytest.raises(RequestError, match="language is missing"):
        WhisperPrompts().prompt(Task("transcribe"))
    with pytest.raises(RequestError, match="to_language is fr, this model translates into en"):
        WhisperPrompts().prompt(Task("translate", GERMAN, to_language=LANGUAGES["fr"]))

"""Whisper is asked by the tokens of its own prompts, and the times in its answers are read."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.frontend.forms.speech.languages import LANGUAGES
from tokenloom.frontend.forms.speech.prompts import Context, Spoken, Task
from tokenloom.frontend.forms.speech.whisper import TimedReader, WhisperPrompts
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import SpeechModel

ENGLISH, GERMAN, JAVANESE = LANGUAGES["en"], LANGUAGES["de"], LANGUAGES["jv"]
IDS = {"en": 51, "de": 52, "jw": 53, "no such code": 54}


def prompts_of(language_ids: dict[str, int] | None, has_times: bool = True) -> WhisperPrompts:
    return WhisperPrompts(
        SpeechModel(
            family="whisper", piece_s=30.0, language_ids=language_ids, has_times=has_times, max_context_tokens=223
        )
    )


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (Task("transcribe", GERMAN), "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"),
        (Task("translate", GERMAN), "<|startoftranscript|><|de|><|translate|><|notimestamps|>"),
        (Task("transcribe", JAVANESE), "<|startoftranscript|><|jw|><|transcribe|><|notimestamps|>"),
        (Task("transcribe", GERMAN, has_times=True), "<|startoftranscript|><|de|><|transcribe|>"),
    ],
)
def test_language_and_task_are_tokens_of_the_prompt(task: Task, expected: str) -> None:
    prompt = prompts_of(IDS).prompt(task)
    assert (prompt.turns, prompt.text, prompt.context) == ((), expected, None)
    assert prompt.keeps_special_tokens == task.has_times


def test_half_of_the_positions_but_one_are_for_context() -> None:
    prompt = prompts_of(IDS).prompt(Task("transcribe", GERMAN, prompt="Aachen, Köln"))
    assert prompt.context == Context("<|startofprev|>", " Aachen, Köln", 223)


def test_the_model_is_asked_for_a_language_of_its_own() -> None:
    question = prompts_of(IDS).language_question
    assert question is not None and question.text == "<|startoftranscript|>"
    assert question.languages == {51: ENGLISH, 52: GERMAN, 53: JAVANESE}
    assert prompts_of(None).language_question is None and prompts_of({}).language_question is None


def test_a_model_without_times_is_asked_for_none() -> None:
    prompts, task = prompts_of(IDS, has_times=False), Task("transcribe", GERMAN, has_times=True)
    assert prompts.prompt(task).text.endswith("<|notimestamps|>")


def test_a_model_of_english_has_no_tokens_of_language_and_task() -> None:
    prompts = prompts_of({})
    assert prompts.prompt(Task("transcribe")).text == "<|startoftranscript|><|notimestamps|>"
    assert prompts.prompt(Task("transcribe", ENGLISH, has_times=True)).text == "<|startoftranscript|>"
    assert prompts.new_reader(Task("transcribe")).language == ENGLISH
    with pytest.raises(RequestError, match=r"language is de \(German\), this model transcribes en"):
        prompts.prompt(Task("transcribe", GERMAN))
    with pytest.raises(RequestError, match="file cannot be translated"):
        prompts.prompt(Task("translate"))


def test_other_languages_and_a_missing_one_are_refused() -> None:
    with pytest.raises(RequestError, match="language is missing"):
        prompts_of(None).prompt(Task("transcribe"))
    assert "<|fr|>" in prompts_of(None).prompt(Task("transcribe", LANGUAGES["fr"])).text, "nobody knows better"
    with pytest.raises(RequestError, match=r"language is fr \(French\), this model transcribes en"):
        prompts_of(IDS).prompt(Task("transcribe", LANGUAGES["fr"]))
    with pytest.raises(RequestError, match="to_language is fr, this model translates into en"):
        prompts_of(IDS).prompt(Task("translate", GERMAN, to_language=LANGUAGES["fr"]))


# ── answers with times ───────────────────────────────────────────────────────────────────────────────────────────────

TIMES = st.floats(0, 30).map(lambda seconds: (f"<|{seconds:.2f}|>", True))
TEXTS = st.text("ab <>.0é", max_size=5).map(lambda text: (text, False))


@given(st.lists(st.one_of(TIMES, TEXTS), max_size=9))
def test_the_transcript_is_the_answer_without_its_times(tokens: list[tuple[str, bool]]) -> None:
    reader = TimedReader()
    shown = "".join(reader.append(token) for token, _ in tokens) + reader.finish()
    assert shown == "".join(token for token, is_time in tokens if not is_time)


def test_each_text_is_between_two_times_and_the_last_may_have_no_end() -> None:
    reader = TimedReader()
    texts = ("<|0.00|>", " Hello", "<|en|>", " there.", "<|1.50|>", "<|1.62|>", " General", " Kenobi.")
    assert "".join(map(reader.append, texts)) == " Hello there. General Kenobi."
    found = [(each.text, each.start_s, each.end_s) for each in reader.spoken() if each.text]
    assert found == [(" Hello there.", 0.0, 1.5), (" General Kenobi.", 1.62, math.inf)]
    assert all(a.end <= b.begin for a, b in itertools.pairwise(reader.spoken()))


def test_an_answer_without_times_is_one_part() -> None:
    reader = TimedReader()
    reader.append("no times")
    assert reader.spoken() == [Spoken("no times", 0, 8, 0.0, math.inf)]

"""Each family is asked in its published form, and its answers are read as transformers reads them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_asr.processing_qwen3_asr import (
    LANGUAGE_CODE_TO_NAME,
    Qwen3ASRProcessor,
    _parse_single_output,
)

from tokenloom.frontend.forms.speech.languages import LANGUAGES, find_language
from tokenloom.frontend.forms.speech.prompts import AnswerReader, ChatPrompts, Task
from tokenloom.frontend.forms.speech.qwen3_asr import MAX_HEAD_CHARACTERS, HeadReader, Qwen3AsrPrompts
from tokenloom.frontend.forms.speech.voxtral import VoxtralPrompts
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import ChatMessage, MediaPart, TextPart

ENGLISH, FRENCH = LANGUAGES["en"], LANGUAGES["fr"]


@pytest.mark.parametrize(("text", "code"), [("en", "en"), ("EN", "en"), (" French ", "fr"), ("mandarin", "zh")])
def test_a_language_is_found_by_code_or_name_in_any_case(text: str, code: str) -> None:
    assert find_language(text) == LANGUAGES[code]


@pytest.mark.parametrize("text", ["", "xx", "en-US", "Klingon", "none"])
def test_other_texts_are_no_language(text: str) -> None:
    assert find_language(text) is None


def test_every_code_of_iso_639_1_is_known_once() -> None:
    short = [code for code in LANGUAGES if len(code) == 2]
    assert len(short) == 183 and len({each.name for each in LANGUAGES.values()}) == len(LANGUAGES)
    assert all(find_language(each.name) == each for each in LANGUAGES.values())


# ── Qwen3-ASR ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("language", [None, "en", "yue"])
@pytest.mark.parametrize("prompt", ["", "Obi-Wan, Kenobi"])
def test_qwen3_asr_is_asked_as_its_processor_asks(language: str | None, prompt: str) -> None:
    asked: list[Any] = []
    processor: Any = SimpleNamespace(apply_chat_template=lambda turns, **_: asked.extend(turns[0]))
    audio = np.zeros(16000, dtype=np.float32)
    Qwen3ASRProcessor.apply_transcription_request(processor, audio, language=language, prompt=prompt or None)
    *turns, answer = asked
    found = Qwen3AsrPrompts().prompt(Task("transcribe", LANGUAGES.get(language or ""), prompt=prompt))
    assert found.text == answer["content"][0]["text"]
    assert [turn.role for turn in found.turns] == [turn["role"] for turn in turns]
    assert found.turns[-1].content == [MediaPart(0)] and [each["type"] for each in turns[-1]["content"]] == ["audio"]
    assert [turn.content for turn in found.turns[:-1]] == [turn["content"][0]["text"] for turn in turns[:-1]]


def test_qwen3_asr_knows_the_languages_of_its_card_and_refuses_others() -> None:
    prompts, texts = Qwen3AsrPrompts(), {}
    for code, language in LANGUAGES.items():
        try:
            texts[code] = prompts.prompt(Task("transcribe", language)).text
        except RequestError as error:
            assert str(error).startswith(f"language is {code} (") and "yue (Cantonese)" in str(error)
    assert texts == {code: f"language {name}<asr_text>" for code, name in LANGUAGE_CODE_TO_NAME.items()}
    with pytest.raises(RequestError, match="file cannot be translated by this model"):
        prompts.prompt(Task("translate"))


def read(reader: AnswerReader, *texts: str) -> str:
    return "".join([reader.append(text) for text in texts] + [reader.finish()])


HEADS = st.sampled_from(["language English<asr_text>", "language None<asr_text>", "language Cantonese<asr_text>", ""])


@given(HEADS, st.text("abc <>_é漢", max_size=30), st.lists(st.integers(0, 60), max_size=6))
def test_an_answer_of_qwen3_asr_is_read_as_transformers_reads_it_however_it_is_cut(
    head: str, text: str, cuts: list[int]
) -> None:
    answer = head + text
    places = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    reader = HeadReader()
    found = read(reader, *(answer[a:b] for a, b in itertools.pairwise(places)))
    expected = _parse_single_output(answer)
    assert found.strip() == expected["transcription"]
    assert (None if reader.language is None else reader.language.name) == expected["language"]
    assert answer[reader.begin :] == found


def test_text_of_qwen3_asr_is_given_out_behind_its_head_or_when_it_can_have_none() -> None:
    reader = HeadReader()
    assert [reader.append(each) for each in ("language ", "English", "<asr", "_text>A", " b")] == [
        "",
        "",
        "",
        "A",
        " b",
    ]
    plain = "x" * (MAX_HEAD_CHARACTERS + 1)
    assert HeadReader().append(plain) == plain and read(HeadReader(), "short") == "short"


# ── Voxtral, and chats ───────────────────────────────────────────────────────────────────────────────────────────────


def test_voxtral_is_asked_in_the_form_of_mistral_common() -> None:
    prompts = VoxtralPrompts()
    assert prompts.prompt(Task("transcribe")).text == "<s>[INST][BEGIN_AUDIO][AUDIO][/INST][TRANSCRIBE]"
    assert prompts.prompt(Task("transcribe", FRENCH)).text == "<s>[INST][BEGIN_AUDIO][AUDIO][/INST]lang:fr[TRANSCRIBE]"
    translation = prompts.prompt(Task("translate", FRENCH, prompt="Paris")).text
    assert translation.startswith("<s>[INST][BEGIN_AUDIO][AUDIO]Translate the speech into English.")
    assert translation.endswith("The speech is in French. For context: Paris[/INST]")
    with pytest.raises(RequestError, match="prompt has no place"):
        prompts.prompt(Task("transcribe", prompt="Paris"))


def test_other_models_get_the_clip_and_an_instruction_in_a_chat() -> None:
    (turn,), text, *_ = ChatPrompts().prompt(Task("translate", to_language=FRENCH))
    assert text == "" and turn == ChatMessage("user", turn.content)
    clip, order = turn.content
    assert clip == MediaPart(0) and isinstance(order, TextPart) and "Translate the speech into French" in order.text
    (turn,), *_ = ChatPrompts().prompt(Task("transcribe", ENGLISH, prompt="Kenobi"))
    assert turn.text.startswith("Transcribe") and turn.text.endswith("in English. For context: Kenobi")
    assert read(ChatPrompts().new_reader(Task("transcribe")), "a", " b") == "a b"

"""The requests of `transcribe` hold the pieces of a clip and the family's prompt; their answers are joined in order."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tokenloom import RequestError, SamplingParams
from tokenloom.frontend.client.outputs import CompletionOutput, RequestOutput
from tokenloom.frontend.client.speech.transcriber import Transcriber, pieces_of
from tokenloom.frontend.forms.media.held_medium import HeldMedium
from tokenloom.frontend.forms.prompts import list_clips, new_submit
from tokenloom.frontend.forms.speech.prompts import Context
from tokenloom.ipc.messages.base import FinishReason
from tokenloom.ipc.messages.client import ChatForm, Info, MediaPart, SpeechModel, Submit

RATE = 16_000
EOS = 2


IDS = {"en": 51, "de": 52}


def info_of(family: str) -> Info:
    speech = SpeechModel(family=family, piece_s=2.0, language_ids=IDS, has_times=True, max_context_tokens=9)
    return Info(
        query_id=0,
        version="",
        run_id="",
        model="m",
        max_model_len=100,
        vocab_size=9,
        block_size=8,
        num_kv_blocks=9,
        tensor_parallel_size=1,
        eos_token_ids=[EOS],
        speech=speech if family else None,
        default_sampling_params={"temperature": 0.7, "top_p": 0.5},
    )


def speech() -> Any:
    """Return 5 s of noise with pauses of 0.2 s from 1.5 and from 3 s on."""
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, 5 * RATE).astype(np.float32)
    for start_s in (1.5, 3.0):
        start = int(start_s * RATE)
        samples[start : start + RATE // 5] = 0.0
    return samples


def new(prompt: Any, params: SamplingParams, **options: Any) -> Submit:
    return new_submit("r", prompt, params, **options)


def submits_of(transcriber: Transcriber, audio: object) -> list[Submit]:
    return transcriber.clip(audio).submits(new)


def answer(text: str, finish_reason: FinishReason = "stop", token_id: int = 5) -> RequestOutput:
    completion = CompletionOutput(index=0, text=text, token_ids=[token_id, EOS], finish_reason=finish_reason)
    return RequestOutput(request_id="r", prompt="", prompt_token_ids=[], outputs=[completion], finished=True)


def test_pieces_are_the_clip_cut_at_its_pauses() -> None:
    samples = speech()
    pieces = list(pieces_of((samples, RATE), 2.0))
    assert [(piece.start_s, piece.end_s) for piece in pieces] == [(0.0, 1.65), (1.65, 3.15), (3.15, 5.0)]
    data = b"".join(cast("HeldMedium", piece.medium).data[44:] for piece in pieces)
    assert np.array_equal(np.frombuffer(data, "<f4"), samples)


def test_files_and_paths_are_read(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(np.zeros(8000, "<i2").tobytes())
    path = tmp_path / "silence.wav"
    path.write_bytes(buffer.getvalue())
    for given in (buffer.getvalue(), path, str(path)):
        assert [piece.end_s for piece in pieces_of(given, 30.0)] == [1.0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("https://example.com/a.wav", "give .samples, rate., bytes of a file or a path"),
        (None, "give .samples, rate."),
        ("/no/such/file.wav", "cannot be read: No such file"),
        (b"RIFF no sound", "WAV"),
        ((np.array([np.nan], np.float32), RATE), "a sample of nan"),
    ],
)
def test_other_audio_is_refused(given: object, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        list(pieces_of(given, 30.0))


def test_a_pair_with_a_rate_is_one_clip_and_a_list_is_many() -> None:
    clip = (speech(), RATE)
    assert list_clips(clip) == [clip] and list_clips([clip, "a.wav"]) == [clip, "a.wav"]
    assert list_clips(("a.wav", "b.wav")) == ["a.wav", "b.wav"] and list_clips("a.wav") == ["a.wav"]


def test_each_family_is_asked_in_its_own_way() -> None:
    clip = (speech(), RATE)
    whisper = submits_of(Transcriber(info_of("whisper"), {"language": "german"}), clip)
    assert [each.prompt for each in whisper] == ["<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"] * 3
    assert not whisper[0].add_special_tokens and len({each.media[0].digest for each in whisper}) == 3
    (qwen3, *_) = submits_of(Transcriber(info_of("qwen3_asr"), {"language": "en"}), clip)
    assert qwen3.chat is not None and qwen3.chat[-1].parts == [MediaPart(0)]
    assert qwen3.chat_form == ChatForm(answer="language English<asr_text>")
    (chat, *_) = submits_of(Transcriber(info_of("qwen2_audio"), {"to_language": "fr"}), clip)
    assert chat.chat is not None and "into French" in chat.chat[0].text and chat.chat_form is None


def test_whisper_names_the_language_and_gets_a_context_and_times() -> None:
    options: Any = {"prompt": "Köln", "return_timestamps": True}
    transcriber = Transcriber(info_of("whisper"), options)
    assert transcriber.context == Context("<|startofprev|>", " Köln", 9)
    clip = transcriber.clip((speech(), RATE))
    question = clip.question(new)
    assert question is not None and question.prompt == "<|startoftranscript|>"
    assert question.params.allowed_token_ids == [51, 52] and question.params.max_tokens == 1
    clip.name_language(answer("", "length", 52))
    assert clip.question(new) is None
    submits = clip.submits(new, "<|startofprev|> Köln")
    assert {each.prompt for each in submits} == {"<|startofprev|> Köln<|startoftranscript|><|de|><|transcribe|>"}
    assert not any(each.params.skip_special_tokens for each in submits)
    output = clip.output([answer("<|0.10|> A<|0.50|><|0.60|> B<|1.00|>"), answer("<|0.00|>"), answer("<|0.00|> C")])
    assert (output.text, output.language) == ("A B C", "de")
    assert [(round(each.start_s, 2), round(each.end_s, 2), each.text) for each in output.segments] == [
        (0.1, 0.5, "A"),
        (0.6, 1.0, "B"),
        (3.15, 5.0, "C"),
    ]


def test_parameters_are_the_models_with_a_temperature_of_0_or_the_callers() -> None:
    (own, *_) = submits_of(Transcriber(info_of("voxtral"), {"priority": 3}), (speech(), RATE))
    assert (own.params.temperature, own.params.top_p, own.params.max_tokens) == (0.0, 0.5, None)
    assert own.params.priority == 3
    given = SamplingParams(temperature=0.3, max_tokens=7)
    (asked, *_) = submits_of(Transcriber(info_of("voxtral"), {"sampling_params": given}), (speech(), RATE))
    assert (asked.params.temperature, asked.params.top_p, asked.params.max_tokens) == (0.3, 1.0, 7)


def test_answers_are_joined_with_the_times_of_their_pieces() -> None:
    clip = Transcriber(info_of("qwen3_asr"), {}).clip((speech(), RATE))
    texts = ["language English<asr_text>One,", "language English<asr_text> two ", "language German<asr_text>drei."]
    output = clip.output([answer(text) for text in texts])
    assert (output.text, output.language, output.duration_s) == ("One, two drei.", "en", 5.0)
    assert [(each.start_s, each.end_s, each.text) for each in output.segments] == [
        (0.0, 1.65, "One,"),
        (1.65, 3.15, "two"),
        (3.15, 5.0, "drei."),
    ]
    with pytest.raises(RequestError, match=r"from 1\.65 to 3\.15 s ended with abort"):
        clip.output([answer("a"), answer("b", "abort"), answer("c")])


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("", {}, "does not hear audio"),
        ("whisper", {"language": "klingon"}, "no language of ISO 639-1"),
        ("whisper", {"language": 3}, "language is 3: it must be text"),
        ("voxtral", {"sampling_params": SamplingParams(n=2)}, "n is 2"),
        ("voxtral", {"prompt": "x" * 20_000}, "at most 16384"),
        ("qwen3_asr", {"to_language": "fr"}, "only transcribes"),
    ],
)
def test_what_the_model_cannot_do_is_refused(family: str, options: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Transcriber(info_of(family), options)
    with pytest.raises(TypeError, match="has no keyword 'lang': did you mean language"):
        Transcriber(info_of("whisper"), {"lang": "en"})  # type: ignore[typeddict-unknown-key]

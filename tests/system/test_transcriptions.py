"""OpenAI's client transcribes and translates clips by real engines in every format, as transformers does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from tokenloom import BeamSearchParams, Client, RequestError
from tokenloom.frontend.forms.speech.languages import LANGUAGES
from tokenloom.frontend.forms.speech.prompts import Task
from tokenloom.frontend.forms.speech.qwen3_asr import Qwen3AsrPrompts
from tokenloom.tests.support.audio_checkpoints import audio_checkpoint
from tokenloom.tests.support.audio_oracle import SAMPLE_RATE, AudioOracle, Samples, random_clip
from tokenloom.tests.support.faults import inject
from tokenloom.tests.support.whisper_checkpoints import IDS, whisper_checkpoint
from tokenloom.tests.support.whisper_oracle import WhisperOracle
from tokenloom.tests.system.launched import LaunchedEngine, serve
from tokenloom.tests.system.media_engine import num_encodes
from tokenloom.tests.system.test_audio import samples, wav

NUM_ROWS, LONGEST = 100, 96  # of Whisper, with a window of two seconds
FIRST_TIME = IDS["<|notimestamps|>"] + 1
MAX_TOKENS = 24
DEADLINE_S = 60.0
FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
deprecated = pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # translations, by OpenAI's client


class Part(NamedTuple):
    """Text tokens of an answer, and their times."""

    start_s: float
    end_s: float
    token_ids: list[int]


def parts_of(answer: Sequence[int], duration_s: float) -> list[Part]:
    """Return the parts of an answer with timestamps."""
    parts, start_s, tokens = list[Part](), 0.0, list[int]()
    for token in [*answer, None]:
        if token is None or token >= FIRST_TIME:
            seconds = duration_s if token is None else (token - FIRST_TIME) * 0.02
            parts += [Part(min(start_s, duration_s), min(seconds, duration_s), tokens)] * bool(tokens)
            start_s, tokens = seconds, []
        elif token != IDS["<|endoftext|>"]:
            tokens.append(token)
    return parts


def spoken(seed: int, count: int) -> Samples:
    """Return a clip that 16 bits a sample hold."""
    return (np.round(random_clip(seed, count) * 32767) / 32768).astype(np.float32)


def whisper_launch(folder: Path, *options: str) -> LaunchedEngine:
    limits = ["--block-size", "8", "--max-num-batched-tokens", "64", "--dtype", "float32", "--http", "0"]
    runtime = folder / "run"
    runtime.mkdir()
    return LaunchedEngine(runtime, "--model", str(folder / "model"), *limits, *options)


class Served(NamedTuple):
    """A running Whisper: `client` is OpenAI's."""

    engine: LaunchedEngine
    oracle: WhisperOracle
    client: openai.OpenAI

    def prompt(self, language: str, task: str = "transcribe", *, has_times: bool) -> list[int]:
        names = ["<|startoftranscript|>", f"<|{language}|>", f"<|{task}|>", *["<|notimestamps|>"] * (not has_times)]
        return [IDS[name] for name in names]

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        shown = [token for token in token_ids if token < IDS["<|endoftext|>"]]
        return str(self.oracle.tokenizer.decode(shown, skip_special_tokens=True)).strip()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("whisper")
    whisper_checkpoint(folder / "model", seed=2, max_source_positions=NUM_ROWS, max_target_positions=LONGEST)
    oracle = WhisperOracle(folder / "model")
    for engine in serve(whisper_launch(folder)):
        assert isinstance(engine, LaunchedEngine)
        yield Served(engine, oracle, openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0))


def create(served: Served, clip: Samples, form: str, **fields: Any) -> Any:
    """Transcribe a clip; a field `to` of "en" translates it."""
    resource: Any = served.client.audio.translations if fields.pop("to", "") else served.client.audio.transcriptions
    fields["extra_body"] = {"max_completion_tokens": MAX_TOKENS, **fields.get("extra_body", {})}
    model = served.client.models.list().data[0].id
    return resource.create(model=model, file=("speech.wav", wav(clip)), response_format=form, **fields)


@deprecated
@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_whisper_answers_in_every_format_as_transformers_does(task: str, served: Served) -> None:
    more: dict[str, Any] = (
        {"language": "de"} if task == "transcribe" else {"to": "en", "extra_body": {"language": "de"}}
    )
    clip, duration_s = samples(3, 1.9), 1.9
    plain = served.oracle.generate(clip, served.prompt("de", task, has_times=False), MAX_TOKENS)
    timed = served.oracle.generate(clip, served.prompt("de", task, has_times=True), MAX_TOKENS)
    parts = parts_of(timed, duration_s)
    assert len(parts) >= 2, "this clip shows nothing of segments: take another"
    found = {form: create(served, clip, form, **more) for form in FORMATS}
    assert found["json"].text == served.text(plain) != ""
    assert found["text"] == f"{served.text(plain)}\n"
    verbose = found["verbose_json"]
    assert (verbose.language, verbose.duration) == ("german" if task == "transcribe" else "english", duration_s)
    assert verbose.text == " ".join(served.text(timed).split(" ")), "the times are no part of the text"
    texts = [served.text(part.token_ids) for part in parts]
    assert [segment.text for segment in verbose.segments] == texts
    for segment, part in zip(verbose.segments, parts, strict=True):
        assert (segment.start, segment.end) == pytest.approx((part.start_s, part.end_s), abs=1e-6)
        assert segment.tokens == part.token_ids and segment.avg_logprob < 0
    for form in ("srt", "vtt"):
        lines = [" ".join(text.split()) for text in texts]
        assert found[form].count(" --> ") == len(parts)
        assert all(line in found[form].replace("&lt;", "<").replace("&gt;", ">") for line in lines)


@deprecated
def test_whisper_names_the_language_as_transformers_does(served: Served) -> None:
    languages = set()
    with Client(served.engine.address) as client:
        num_before = num_encodes(client)
    for seed, count in enumerate((31_000, 9000, 3000, 20_000, 24_000)):
        clip, duration_s = spoken(seed, count), count / SAMPLE_RATE
        rows = served.oracle.rows(clip)[None]
        with torch.inference_mode():
            theirs = served.oracle.model.detect_language(
                encoder_outputs=BaseModelOutput(last_hidden_state=rows), num_segment_frames=2 * NUM_ROWS
            )
        code = next(code for code in ("en", "de") if IDS[f"<|{code}|>"] == int(theirs[0]))
        found = create(served, clip, "verbose_json")
        timed = served.oracle.generate(clip, served.prompt(code, has_times=True), MAX_TOKENS)
        assert found.language == LANGUAGES[code].name.lower()
        assert [each.tokens for each in found.segments] == [each.token_ids for each in parts_of(timed, duration_s)]
        languages.add(code)
        if len(languages) > 1:
            continue
        translated = served.oracle.generate(clip, served.prompt(code, "translate", has_times=True), MAX_TOKENS)
        found = create(served, clip, "verbose_json", to="en")
        assert [each.tokens for each in found.segments] == [each.token_ids for each in parts_of(translated, duration_s)]
    assert len(languages) == 2, "each clip has the same language: take others"
    with Client(served.engine.address) as client:
        assert num_encodes(client, num_before + 5) == num_before + 5, "a clip is encoded once for both questions"


@pytest.mark.parametrize(
    "role", ["media", *(pytest.param(role, marks=pytest.mark.nightly) for role in ("core", "worker 0"))]
)
def test_a_killed_process_changes_no_transcript(role: str, served: Served) -> None:
    """A clip of five pieces and more; each loss comes after some tokens, or while the clip is cut."""
    clip, point = spoken(50 + len(role), 9 * SAMPLE_RATE), "media.read" if role == "media" else "worker.sample"
    rank = None if role == "media" else 0
    inject(served.engine.faults, point, "delay 30" if role == "media" else "delay 0.5", rank)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(create, served, clip, "verbose_json")
        assert served.engine.wait_struck(point, rank, DEADLINE_S)
        if role != "media":
            for _ in range(3):
                assert served.engine.inject(point, "delay 0.1", rank, DEADLINE_S)
        lost = served.engine.child(role)
        lost.kill()
        assert not future.done(), "the transcript was there before the loss"
        found = future.result(DEADLINE_S)
    assert served.engine.child(role).pid != lost.pid
    calm = create(served, clip, "verbose_json")
    assert len(found.segments) >= 5
    each, other = ([(part.start, part.end, part.tokens) for part in said.segments] for said in (found, calm))
    assert each == other


def test_whisper_refuses_beams_and_prompts_without_a_clip(served: Served) -> None:
    text = "<|startoftranscript|>"
    prompt: Any = {"prompt": text, "multi_modal_data": {"audio": (samples(1, 1.0), SAMPLE_RATE)}}
    with Client(served.engine.address) as client:
        with pytest.raises(RequestError, match="beam search does not keep"):
            client.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=4))
        with pytest.raises(RequestError, match="0 audio clips, this model answers to one"):
            client.generate(text, use_tqdm=False)


@pytest.mark.nightly
def test_qwen3_asr_answers_in_every_format_as_transformers_does(tmp_path: Path) -> None:
    folder = audio_checkpoint(tmp_path / "model", "qwen3_asr")
    oracle, clip = AudioOracle(folder), samples(5, 1.7)
    prompt = Qwen3AsrPrompts().prompt(Task("transcribe", LANGUAGES["nl"]))
    chat = oracle.chat([{"role": "user", "content": [{"type": "audio"}]}]) + prompt.text
    text = oracle.tokenizer.decode(oracle.generate(chat, [clip], MAX_TOKENS), skip_special_tokens=True).strip()
    (tmp_path / "run").mkdir()
    options = ["--model", str(folder), "--max-model-len", "512", "--dtype", "float32", "--http", "0"]
    for engine in serve(LaunchedEngine(tmp_path / "run", *options)):
        client = openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0)
        served: Any = Served(engine, oracle, client)  # type: ignore[arg-type]
        found = {form: create(served, clip, form, language="nl") for form in FORMATS}
        assert found["json"].text == text and found["text"] == f"{text}\n"
        (segment,) = found["verbose_json"].segments
        assert (segment.start, segment.end, segment.text) == (0.0, 1.7, text)
        assert found["verbose_json"].language == "dutch"
        assert all("00:00:01" in found[form] for form in ("srt", "vtt"))

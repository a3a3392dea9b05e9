"""`transcribe` of the client library gives the same as /v1/audio/transcriptions, for each family of prompts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tokenloom import AsyncClient, Client, RequestError, SamplingParams
from tokenloom.frontend.forms.speech.languages import LANGUAGES
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support.audio_checkpoints import audio_checkpoint
from tokenloom.tests.support.audio_oracle import SAMPLE_RATE
from tokenloom.tests.support.today import some
from tokenloom.tests.support.whisper_checkpoints import whisper_checkpoint
from tokenloom.tests.system.http_engine import open_http
from tokenloom.tests.system.test_audio import samples, wav

GREEDY = SamplingParams(temperature=0, max_tokens=5)
CASES = {  # fields of the form, by model
    "qwen2_audio": {"prompt": "names"},
    "qwen3_asr": {"language": "en", "prompt": "names"},
    "voxtral": {"language": "German"},
    "whisper": {"prompt": "names and words"},
    "whisper without times": {"language": "de", "prompt": "many words " * 20},
}


def checkpoint(folder: Path, name: str) -> Path:
    if name.startswith("whisper"):
        return whisper_checkpoint(folder, has_rules=name == "whisper")
    return audio_checkpoint(folder, name)


@pytest.mark.parametrize("name", some(list(CASES), 1))
def test_transcripts_are_those_of_the_http_api(name: str, tmp_path: Path) -> None:
    fields: Any = CASES[name]
    folder, long, short = checkpoint(tmp_path / "model", name), samples(1, 3.1), samples(2, 0.5)
    path = tmp_path / "short.wav"
    path.write_bytes(wav(short))
    (tmp_path / "run").mkdir()
    command = ["--model", str(folder), "--http", "0", "--device", "cpu", "--dtype", "float32", "--num-threads", "1"]
    with Engine(tmp_path / "run", command) as engine:
        engine.wait_ready()
        expected = []
        with open_http(engine.url) as http:
            form = {"response_format": "verbose_json", "max_completion_tokens": "5", **fields}
            for clip in (long, short):
                files = {"file": ("speech.wav", wav(clip))}
                expected.append(http.post("/v1/audio/transcriptions", data=form, files=files).raise_for_status().json())
        options: Any = {"sampling_params": GREEDY, "return_timestamps": True, **fields}
        with Client(engine.address) as client:
            found = client.transcribe([wav(long), path], **options)
            assert client.transcribe((short, SAMPLE_RATE), **options) == [found[1]]
            assert client.transcribe([], **options) == []
            with pytest.raises(RequestError, match="is no language"):
                client.transcribe(path, language="klingon")
        again = asyncio.run(transcribe_async(engine.address, wav(long), options))
    assert again == found[0]
    for output, right in zip(found, expected, strict=True):
        assert output.text == right["text"]
        assert output.language is None or LANGUAGES[output.language].name.lower() == right["language"]
        assert output.duration_s == pytest.approx(right["duration"])
        spoken = [(each.start_s, each.end_s, each.text) for each in output.segments]
        assert spoken == [(each["start"], each["end"], each["text"]) for each in right["segments"]]
    assert found[0].text and found[0].text != found[1].text


async def transcribe_async(address: str, clip: bytes, options: Any) -> object:
    async with AsyncClient(address) as client:
        return await client.transcribe(clip, **options)

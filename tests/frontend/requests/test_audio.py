"""A request with audio reaches the core with the tokens and media files of its clips, read by a real media process."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tokenloom.frontend.client.prompts import new_submit
from tokenloom.frontend.media.audio.audio_processor_config import AudioProcessorConfig
from tokenloom.frontend.media.host import MediaHost
from tokenloom.frontend.media.placeholders import Placeholders
from tokenloom.frontend.requests.media.media_input import MediaInput
from tokenloom.ipc.blobs.media_file import parse_media_file
from tokenloom.ipc.codec import decode_ids
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.messages.client import Deltas, FrontendMessage, GetInfo, Info, PutMedium
from tokenloom.ipc.messages.core import EngineCoreRequest
from tokenloom.ipc.sampling_params import SamplingParams
from tokenloom.tests.frontend.bench import TOKENIZER, Bench, ids
from tokenloom.tests.frontend.media.audio.encoders import ENCODERS
from tokenloom.tests.frontend.media.audio.sound_files import tone
from tokenloom.tests.support.engine_specs import in_folder, new_spec

MARKER = "#"  # one token of the tokenizer
(PLACEHOLDER,) = ids(MARKER)
ENCODER = msgspec.structs.replace(ENCODERS["qwen2_audio"], audio_token_id=PLACEHOLDER)


class HearingBench(Bench):
    def __init__(self, folder: Path, **config: Any) -> None:
        options = EngineConfig(**{"media_processes": 1, **config})
        spec = in_folder(new_spec(config=options, max_model_len=4096), folder)
        spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, audio=ENCODER))
        processor = AudioProcessorConfig(encoder=ENCODER, max_audio_s=options.max_audio_s)
        placeholders = Placeholders.load(processor, ENCODER, TOKENIZER)
        super().__init__(media=MediaInput(lambda store: MediaHost(spec, processor), placeholders), seeing=spec)

    def ask(self, prompt: str, audio: object) -> list[FrontendMessage]:
        """Send a prompt with clips as the client library does; return the answers of this turn."""
        submit = new_submit("r", {"prompt": prompt, "multi_modal_data": {"audio": audio}}, SamplingParams())
        for medium in submit.media:
            data: bytes = medium.data  # type: ignore[attr-defined]
            assert medium.digest == hashlib.sha256(data).digest()
            self.say(PutMedium(digest=medium.digest, data=memoryview(data)))
        return self.say(submit)

    def error_of(self, prompt: str, audio: object) -> str:
        messages = self.ask(prompt, audio)
        while not messages:
            self.wait_for_wakeup()
            messages = self.heard()
        (last,) = messages
        assert isinstance(last, Deltas) and last.deltas[0].error is not None
        assert last.deltas[0].error.kind == "request"
        return last.deltas[0].error.message


@contextlib.contextmanager
def hearing(folder: Path, **config: Any) -> Iterator[HearingBench]:
    bench = HearingBench(folder, **config)
    try:
        yield bench
    finally:
        bench.frontend.stop("the test is over")


def test_clips_reach_the_core_as_spans_and_media_files(tmp_path: Path) -> None:
    with hearing(tmp_path) as bench:
        clips = [(tone(1.0, 16_000), 16_000), (tone(2.0, 48_000), 48_000)]
        bench.ask(f"a{MARKER}b{MARKER}", clips)
        while not bench.to_core:
            bench.wait_for_wakeup()
        (request,) = bench.to_core
        assert isinstance(request, EngineCoreRequest)
        first, second = request.media
        assert [span.kind for span in request.media] == ["audio", "audio"]
        assert (first.num_embeds, second.num_embeds) == (25, 50)
        assert (first.start, first.length, second.start, second.length) == (1, 25, 27, 50)
        assert (first.grid, second.grid) == ((1, 1, 16_000), (1, 1, 32_000))
        tokens = decode_ids(request.prompt_token_ids).tolist()
        assert tokens == [*ids("a"), *[PLACEHOLDER] * 25, *ids("b"), *[PLACEHOLDER] * 50]
        for span, seconds in zip(request.media, (1.0, 2.0), strict=True):
            content = bench.frontend.media.store.open(span.digest)
            assert content is not None
            samples = np.frombuffer(parse_media_file(content).data, "<f4")
            np.testing.assert_allclose(samples[1000:-1000], tone(seconds, 16_000)[1000:-1000], atol=1e-5)


def test_bad_clips_end_their_request_alone(tmp_path: Path) -> None:
    with hearing(tmp_path, max_audio_s=60.0, limit_mm_per_prompt={"audio": 2}) as bench:
        assert bench.error_of(MARKER, b"\0\0\0\x18ftypisom" + bytes(99)).startswith(
            "the audio clip 1 of 1 cannot be taken: the audio clip is a video container (MP4 or another of ISO)"
        )
        assert "lasts 61.0 s, at most 60 s are read" in bench.error_of(MARKER, (np.zeros(61_000, "f4"), 1000))
        assert "lasts 31.00 s or longer, the model takes at most 30 s" in bench.error_of(
            MARKER, (np.zeros(31_000, "f4"), 1000)
        )
        assert "needs at least 321" in bench.error_of(MARKER, (np.zeros(1, "f4"), 16_000))
        assert "has a sample of nan" in bench.error_of(MARKER, (np.full(999, np.nan, "f4"), 16_000))
        assert "has 0 placeholders of audio clips (#) for 1 audio clip" in bench.error_of("a", (tone(1, 8000), 8000))
        assert "has 3 audio clips, at most 2 are allowed" in bench.error_of(MARKER * 3, [(tone(1, 8000), 8000)] * 3)
        bench.ask(MARKER, (np.zeros(8000, "f4"), 16_000))  # silence is audio
        while not bench.to_core:
            bench.wait_for_wakeup()
        assert len(bench.to_core) == 1


def test_info_names_the_kind_and_its_limits(tmp_path: Path) -> None:
    with hearing(tmp_path, limit_mm_per_prompt={"audio": 2}, max_media_bytes=1000) as bench:
        (info,) = bench.say(GetInfo(query_id=1))
        assert isinstance(info, Info)
        assert (info.modalities, info.max_media, info.max_media_bytes) == (["audio"], {"audio": 2}, 1000)


@pytest.mark.parametrize("data", [bytes(1001)])
def test_too_many_bytes_are_refused(tmp_path: Path, data: bytes) -> None:
    with hearing(tmp_path, max_media_bytes=1000) as bench:
        assert "an audio clip has 1001 bytes, at most 1000 are read" in bench.error_of(MARKER, data)

"""Prompts with audio have the tokens that transformers' processors give them; Voxtral's those of its publisher."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.frontend.server.media.placeholders import Placeholders
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.spec.models.audio_config import AudioFamily
from tokenloom.ipc.spec.processors.audio_processor_config import AudioProcessorConfig
from tokenloom.tests.frontend.server.media.audio.encoders import ENCODERS
from tokenloom.tests.frontend.server.media.test_placeholders import DIGEST, Item, texts
from tokenloom.tests.support.media_checkpoints import DEMO

QWEN_NAMES = ("audio_token", "audio_bos_token", "audio_eos_token")
TOKENS: dict[AudioFamily, dict[str, str]] = {  # by their names in the tokenizer's config
    "qwen2_audio": dict(zip(QWEN_NAMES, ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"), strict=True)),
    "voxtral": {"audio_token": "[AUDIO]", "begin_audio_token": "[BEGIN_AUDIO]"},
    "qwen3_asr": dict(zip(QWEN_NAMES, ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"), strict=True)),
}
FRAMED = {
    "qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "voxtral": "[AUDIO]",
    "qwen3_asr": "<|audio_start|><|audio_pad|><|audio_end|>",
}


class Model(NamedTuple):
    """A checkpoint without weights: our placeholders, and transformers' tokenizer."""

    placeholders: Placeholders
    tokenizer: Any


@cache
def model_of(family: AudioFamily) -> Model:
    folder = Path(mkdtemp())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(DEMO / "tokenizer.json"), pad_token="<|pad|>", extra_special_tokens=dict(TOKENS[family])
    )
    tokenizer.save_pretrained(folder)
    ours = Tokenizer.load(folder)
    assert ours is not None
    token_id = tokenizer.convert_tokens_to_ids(TOKENS[family]["audio_token"])
    encoder = type(ENCODERS[family])(**{**fields_of(family), "audio_token_id": token_id})
    config = AudioProcessorConfig(encoder=encoder, max_audio_s=600.0)
    return Model(Placeholders.load(config, encoder, ours), tokenizer)


def fields_of(family: AudioFamily) -> dict[str, Any]:
    encoder = ENCODERS[family]
    return {name: getattr(encoder, name) for name in encoder.__struct_fields__}


@cache
def processor_of(family: AudioFamily) -> Any:
    tokenizer = model_of(family).tokenizer
    if family == "qwen2_audio":
        return transformers.Qwen2AudioProcessor(transformers.WhisperFeatureExtractor(feature_size=8), tokenizer)
    return transformers.Qwen3ASRProcessor(transformers.Qwen3ASRFeatureExtractor(feature_size=8), tokenizer)


def our_ids(family: AudioFamily, text: str, lengths: list[int]) -> list[int]:
    ours = model_of(family).placeholders
    items = [Item(DIGEST, ours.config.grid(length)) for length in lengths]  # type: ignore[union-attr]
    ids, spans = ours.expand(ours.tokenizer.encode(ours.before_tokenization(text)), items)
    covered = np.zeros(len(ids), bool)
    for span, item in zip(spans, items, strict=True):
        assert span.kind == "audio" and span.grid == item.grid
        assert span.num_embeds == span.length == ours.config.num_embeds(item.grid)
        covered[span.start : span.start + span.length] = True
    assert [token == ours.placeholder_id for token in ids] == covered.tolist()
    return ids


lengths = st.integers(321, 64_000)


@settings(max_examples=10, deadline=None)
@given(first=texts, parts=st.lists(st.tuples(lengths, texts), min_size=1, max_size=3))
def test_expanded_prompts_of_qwen2_audio_are_those_of_transformers(first: str, parts: list[tuple[int, str]]) -> None:
    text = first + "".join(f"{FRAMED['qwen2_audio']}{after}" for _, after in parts)
    clips = [np.zeros(length, np.float32) for length, _ in parts]
    expected = processor_of("qwen2_audio")(text=text, audio=clips, sampling_rate=16_000)["input_ids"]
    assert our_ids("qwen2_audio", text, [length for length, _ in parts]) == list(np.ravel(expected))


@settings(max_examples=10, deadline=None)
@given(before=texts, length=st.integers(1, 64_000), after=texts)
def test_expanded_prompts_of_qwen3_asr_are_those_of_transformers(before: str, length: int, after: str) -> None:
    text = f"{before}{FRAMED['qwen3_asr']}{after}"
    expected = processor_of("qwen3_asr")(text=[text], audio=[np.zeros(length, np.float32)])["input_ids"]
    assert our_ids("qwen3_asr", text, [length]) == expected[0].tolist()


@pytest.mark.parametrize(
    "text", ["[BEGIN_AUDIO][AUDIO]a[BEGIN_AUDIO][AUDIO]", "[AUDIO]a[AUDIO]", "[BEGIN_AUDIO][AUDIO]a[AUDIO]"]
)
def test_clips_of_voxtral_begin_with_one_token_of_their_own(text: str) -> None:
    begin, audio, a = model_of("voxtral").tokenizer.convert_tokens_to_ids(["[BEGIN_AUDIO]", "[AUDIO]", "a"])
    first, second = [audio] * 375, [audio] * 750
    assert our_ids("voxtral", text, [16_000, 480_001])[1:] == [begin, *first, a, begin, *second]


@pytest.mark.parametrize("family", TOKENS)
def test_markers_are_those_of_the_family(family: AudioFamily) -> None:
    marker = model_of(family).placeholders.marker
    assert (marker.kind, marker.text, marker.framed) == ("audio", TOKENS[family]["audio_token"], FRAMED[family])

"""The tiny checkpoints that hear are fit to test the engine: samples and their order decide the tokens, and
placeholders stand where the families' own processors put them. These tests know nothing of the engine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tokenloom.tests.support.audio_checkpoints import audio_checkpoint
from tokenloom.tests.support.audio_configs import AUDIO_MODELS
from tokenloom.tests.support.audio_oracle import AudioOracle, random_clip
from tokenloom.tests.support.today import some

CLIPS = [random_clip(1, 6000), random_clip(2, 17_000), random_clip(3, 31_000), random_clip(4, 17_000)]
PROCESSORS = {"qwen2_audio": "Qwen2AudioProcessor", "qwen3_asr": "Qwen3ASRProcessor"}


@pytest.mark.parametrize("name", some(list(AUDIO_MODELS), num_today=1))
def test_other_samples_or_another_order_of_clips_give_other_tokens(name: str, tmp_path: Path) -> None:
    oracle, marker = AudioOracle(audio_checkpoint(tmp_path, name)), AUDIO_MODELS[name].audio
    prompt = f"{marker}\nWhat is this?"
    for count in (6000, 30_000):
        answers = {tuple(oracle.generate(prompt, [random_clip(seed, count)], max_tokens=6)) for seed in range(6)}
        assert len(answers) >= 4
    pair = f"{marker} and {marker}: which is louder? The"
    first, second = (oracle.generate(pair, clips) for clips in (CLIPS[1::2], CLIPS[3:0:-2]))
    assert first != second
    assert oracle.generate(oracle.tokenizer(pair)["input_ids"], CLIPS[1::2]) == first
    oracle.check(pair, CLIPS[1::2], first)
    with pytest.raises(AssertionError, match="misses by"):
        oracle.check(pair, CLIPS[3:0:-2], first)


@pytest.mark.parametrize("name", some(list(PROCESSORS), num_today=1))
def test_the_expansion_is_that_of_the_familys_processor(name: str, tmp_path: Path) -> None:
    oracle = AudioOracle(audio_checkpoint(tmp_path, name))
    extractor = transformers.AutoFeatureExtractor.from_pretrained(tmp_path)
    processor = getattr(transformers, PROCESSORS[name])(feature_extractor=extractor, tokenizer=oracle.tokenizer)
    for clip in CLIPS:
        prompt = f"Listen: {AUDIO_MODELS[name].audio}\nWhat?"
        theirs = processor(text=[prompt], audio=[clip], sampling_rate=16_000, return_tensors="pt")
        ours = oracle.expand(prompt, [clip])
        assert ours.token_ids == theirs["input_ids"][0].tolist()
        assert all((theirs[name] == given).all() for name, given in ours.inputs.items())


@pytest.mark.parametrize("name", some(list(AUDIO_MODELS), num_today=1))
def test_chats_have_a_marker_for_each_audio(name: str, tmp_path: Path) -> None:
    oracle = AudioOracle(audio_checkpoint(tmp_path, name))
    content = [{"type": "text", "text": "Hear "}, {"type": "audio"}, {"type": "audio"}, {"type": "text", "text": "?"}]
    prompt = oracle.chat([{"role": "user", "content": content}])
    assert prompt.count(f"Hear {AUDIO_MODELS[name].audio * 2}?") == 1
    start, end = oracle.span(prompt, CLIPS[:2])
    num_embeds = sum(map(oracle.num_placeholders, CLIPS[:2]))
    assert end - start >= num_embeds == oracle.expand(prompt, CLIPS[:2]).token_ids.count(oracle.placeholder_id)

"""Greedy answers of transformers to prompts with audio, in float32: the oracle of the engine's audio tests.

    oracle = AudioOracle(folder)
    tokens = oracle.generate("<|audio_bos|><|AUDIO|><|audio_eos|>What is it?", [samples], max_tokens=12)

Samples are float32 at 16 kHz. Each audio is prepared by transformers' processor as the only one of its prompt: together
with others Qwen3-ASR's pads them all to the longest, which changes the last frames of the shorter ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .media_oracle import Expanded, MediaOracle

Samples: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

SAMPLE_RATE = 16_000
MARK = "<audio>"


class AudioOracle(MediaOracle[Samples]):
    """Transformers' model, processor and tokenizer of a checkpoint."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        import transformers

        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        architecture = config["architectures"][0]
        self.model = getattr(transformers, architecture).from_pretrained(folder, dtype=dtype).eval()
        processor_class = getattr(transformers, architecture.replace("ForConditionalGeneration", "Processor"))
        self._processor = object.__new__(processor_class)  # without a tokenizer, which it would want to be its own
        self._processor.feature_extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
        self._processor.audio_token = MARK
        self._kind = str(config["model_type"])

    @torch.inference_mode()
    def embeds(self, clip: Samples) -> Tensor:
        """Return the embeddings [n, hidden] that the model puts in the place of an audio's placeholders."""
        expanded, given = self.expand([self.placeholder_id, 0], [clip]), list[Tensor]()  # Qwen2-Audio needs two tokens
        ids = torch.tensor([expanded.token_ids])
        inner = self.model.model.language_model
        hook = inner.register_forward_pre_hook(
            lambda module, args, kwargs: given.append(kwargs["inputs_embeds"]), with_kwargs=True
        )
        try:
            self.model(input_ids=ids, attention_mask=torch.ones_like(ids), **expanded.inputs)
        finally:
            hook.remove()
        return given[0][0, :-1]

    def num_placeholders(self, clip: Samples) -> int:
        """Return the number of embeddings of an audio."""
        return self._prepared(clip)[0]

    def expand(self, prompt: str | Sequence[int], clips: Sequence[Samples]) -> Expanded:
        """Return the token ids with all placeholders and the inputs of the clips. A prompt, text or token ids, holds
        one placeholder a clip."""
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        assert ids.count(self.placeholder_id) == len(clips), f"{ids} has no marker for each of {len(clips)} clips"
        prepared = [self._prepared(clip) for clip in clips]
        counts, token_ids = iter(count for count, _ in prepared), list[int]()
        for token in ids:
            token_ids += [token] * (next(counts) if token == self.placeholder_id else 1)
        return Expanded(token_ids, _stacked([inputs for _, inputs in prepared]))

    @property
    def placeholder_id(self) -> int:
        return int(self.model.config.audio_token_id)

    def _prepared(self, clip: Samples) -> tuple[int, dict[str, Tensor]]:
        """Return the number of embeddings of an audio, and its inputs."""
        processor, tower = self._processor, self.model.config.audio_config
        if self._kind == "voxtral":
            num_frames = 2 * tower.max_source_positions
            options = {
                **processor.audio_kwargs,
                "max_source_positions": num_frames,
                "pad_to_multiple_of": 160 * num_frames,
            }
            features = processor._retrieve_input_features([clip], **options)
            num_rows = len(features) * tower.max_source_positions
            return num_rows * tower.hidden_size // tower.intermediate_size, {"input_features": features}
        options = processor.audio_kwargs if self._kind == "qwen3_asr" else {"sampling_rate": SAMPLE_RATE}
        inputs, (text,) = processor._process_audio([clip], **options)
        names = [name for name in inputs if name != "num_audio_tokens"]
        return text.count(MARK), {name: torch.as_tensor(np.asarray(inputs[name])) for name in names}


def _stacked(inputs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the inputs of several clips, with zeros behind the frames of shorter ones."""
    stacked = dict[str, Tensor]()
    for name in inputs[0] if inputs else ():
        length = max(each[name].shape[-1] for each in inputs)
        padded = [torch.nn.functional.pad(each[name], (0, length - each[name].shape[-1])) for each in inputs]
        stacked[name] = torch.cat(padded)
    return stacked


def random_clip(seed: int, count: int) -> Samples:
    """Return samples of changing tones and noise, with quiet stretches."""
    rng = np.random.default_rng(seed)
    times = np.arange(count) / SAMPLE_RATE
    pitch = 2 * np.pi * np.cumsum(rng.uniform(80, 4000, -(-count // 800)).repeat(800)[:count]) / SAMPLE_RATE
    samples = 0.3 * np.sin(pitch) + 0.02 * rng.standard_normal(count)
    samples[(times % 0.7) > 0.6] *= 1e-4
    return samples.astype(np.float32)

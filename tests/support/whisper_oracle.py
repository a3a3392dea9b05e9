"""Greedy answers of transformers' Whisper to audio clips, in float32: the oracle of the engine's tests of Whisper.

    oracle = WhisperOracle(folder)
    tokens = oracle.generate(samples, PROMPT_IDS, max_tokens=12)

Samples are float32 at 16 kHz, at most a window of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)
from transformers.modeling_outputs import BaseModelOutput

from .audio_oracle import SAMPLE_RATE, Samples
from .media_oracle import NEAR_TIE


class WhisperOracle:
    """Transformers' model, feature extractor and tokenizer of a checkpoint."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        import transformers

        self.tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        self.model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
        self._extractor: Any = transformers.WhisperFeatureExtractor.from_pretrained(folder)
        self._extractor.n_samples = round(self._extractor.n_samples)  # of windows shorter than a second
        self._extractor.nb_max_frames = self._extractor.n_samples // self._extractor.hop_length
        self._rows: dict[bytes, Tensor] = {}  # of the encoder, by the samples' bytes

    @torch.inference_mode()
    def rows(self, samples: Samples) -> Tensor:
        """Return the encoder's rows [n, hidden] of a clip."""
        key = samples.tobytes()
        if key not in self._rows:
            features = self._extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
            self._rows[key] = self.model.model.encoder(features).last_hidden_state[0]
        return self._rows[key]

    def ids(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, without those that the tokenizer puts around a text."""
        ids: list[int] = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return ids

    def generate(self, samples: Samples, prompt: Sequence[int], max_tokens: int = 12) -> list[int]:
        """Return greedy tokens without the prompt's, by transformers' own generate. A prompt without the token for no
        timestamps gets timestamps."""
        config = self.model.generation_config
        no_timestamps = getattr(config, "no_timestamps_token_id", None)
        features = self._extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
        with torch.inference_mode():
            output = self.model.generate(
                input_features=features,
                decoder_input_ids=torch.tensor([list(prompt)]),
                return_timestamps=no_timestamps is not None and no_timestamps not in prompt,
                do_sample=False,
                num_beams=1,
                max_new_tokens=max_tokens,
                return_dict_in_generate=True,
                force_unique_generate_call=True,
            )
        return [int(token) for token in output.sequences[0, len(prompt) :]]

    @torch.inference_mode()
    def check(self, samples: Samples, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Check that each token of the answer has the highest score given all before it, up to near ties, in one
        forward pass: the answer is then that of `generate`, by induction."""
        ids = torch.tensor([[*prompt, *answer]])
        logits = self.model(
            decoder_input_ids=ids, encoder_outputs=BaseModelOutput(last_hidden_state=self.rows(samples)[None])
        ).logits[0, len(prompt) - 1 : -1]
        processors = self._processors(prompt)
        for place, token in enumerate(answer):
            scores = processors(ids[:, : len(prompt) + place], logits[place : place + 1].float())[0]
            miss = float(scores.max() - scores[token])
            assert miss <= NEAR_TIE, (
                f"token {place} of {len(answer)} misses by {miss:.5f}: {list(answer)}, {int(scores.argmax())} expected"
            )

    def _processors(self, prompt: Sequence[int]) -> LogitsProcessorList:
        config, begin = self.model.generation_config, len(prompt)
        processors = LogitsProcessorList()
        if config.begin_suppress_tokens:
            processors.append(SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin))
        if config.suppress_tokens:
            processors.append(SuppressTokensLogitsProcessor(config.suppress_tokens))
        no_timestamps = getattr(config, "no_timestamps_token_id", None)
        if no_timestamps is not None and no_timestamps not in prompt:
            processors.append(WhisperTimeStampLogitsProcessor(config, begin))
        return processors

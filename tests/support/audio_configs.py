"""The files beside the weights of tiny models that hear audio: config.json, preprocessor_config.json, marker tokens.

Each is spelled as the family's published files spell it, but for their sizes: Whisper's windows are of two seconds, and
Qwen3-ASR attends to two of its windows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .vision_configs import MediaModel, text_config

Config = dict[str, Any]

NUM_MEL_BINS = 20
WINDOW_S = 2  # of Whisper's encoders


@dataclass(frozen=True, kw_only=True)
class AudioModel(MediaModel):
    audio: str  # the text of an audio in a prompt, before the expansion


def extractor_config(kind: str, **fields: Any) -> Config:
    return {
        "feature_extractor_type": kind,
        "dither": 0.0,
        "feature_size": NUM_MEL_BINS,
        "hop_length": 160,
        "n_fft": 400,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "sampling_rate": 16000,
        **fields,
    }


QWEN2_AUDIO = AudioModel(
    config={
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "audio_token_index": "<|AUDIO|>",
        "text_config": text_config("qwen2"),
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "d_model": 32,
            "encoder_layers": 3,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 56,
            "num_mel_bins": NUM_MEL_BINS,
            "max_source_positions": 50 * WINDOW_S,
        },
    },
    preprocessor=extractor_config(
        "WhisperFeatureExtractor", chunk_length=WINDOW_S, processor_class="Qwen2AudioProcessor"
    ),
    markers={"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
    audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
    processor={"processor_class": "Qwen2AudioProcessor"},
)
VOXTRAL = AudioModel(
    config={
        "architectures": ["VoxtralForConditionalGeneration"],
        "model_type": "voxtral",
        "audio_token_id": "[AUDIO]",
        "projector_hidden_act": "gelu",
        "text_config": text_config("llama", head_dim=24),
        "audio_config": {
            "model_type": "voxtral_encoder",
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "num_mel_bins": NUM_MEL_BINS,
            "max_source_positions": 50 * WINDOW_S,
        },
    },
    preprocessor=extractor_config("WhisperFeatureExtractor", chunk_length=WINDOW_S, processor_class="VoxtralProcessor"),
    markers={"audio_token": "[AUDIO]", "audio_bos_token": "[BEGIN_AUDIO]"},
    audio="[BEGIN_AUDIO][AUDIO]",
    processor={"processor_class": "VoxtralProcessor"},
)
QWEN3_ASR = AudioModel(
    config={
        "architectures": ["Qwen3ASRForConditionalGeneration"],
        "model_type": "qwen3_asr",
        "audio_token_id": "<|audio_pad|>",
        "tie_word_embeddings": True,
        "text_config": text_config("qwen3", head_dim=24, tie_word_embeddings=True),
        "audio_config": {
            "model_type": "qwen3_asr_encoder",
            "d_model": 32,
            "encoder_layers": 3,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 56,
            "num_mel_bins": NUM_MEL_BINS,
            "n_window": 50,
            "n_window_infer": 200,
            "downsample_hidden_size": 8,
            "output_dim": 64,
        },
    },
    markers={"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"},
    audio="<|audio_start|><|audio_pad|><|audio_end|>",
    processor={
        "processor_class": "Qwen3ASRProcessor",
        "feature_extractor": extractor_config(
            "Qwen3ASRFeatureExtractor", chunk_length=30, min_length=8000, n_window=50
        ),
    },
)
AUDIO_MODELS = {"qwen2_audio": QWEN2_AUDIO, "voxtral": VOXTRAL, "qwen3_asr": QWEN3_ASR}

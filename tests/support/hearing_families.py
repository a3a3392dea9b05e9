"""The config.json of tiny models that hear audio, for `families.CONFIGS`, as published files spell them.

They test the language models: what audio becomes is given to them as embeddings. `audio_configs.py` has models with
encoders.
"""

from __future__ import annotations

from .seeing_families import IMAGE_ID, TEXT, Config

AUDIO_ID = IMAGE_ID  # the placeholder
WHISPER: Config = {"num_mel_bins": 8, "max_source_positions": 20}

HEARING: dict[str, Config] = {
    "qwen2_audio": {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "audio_token_index": AUDIO_ID,
        "text_config": {
            **TEXT,
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
        },
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            **WHISPER,
            "d_model": 32,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
        },
    },
    "voxtral": {
        "architectures": ["VoxtralForConditionalGeneration"],
        "model_type": "voxtral",
        "audio_token_id": AUDIO_ID,
        "text_config": {**TEXT, "model_type": "llama", "head_dim": 24},
        "audio_config": {
            "model_type": "voxtral_encoder",
            **WHISPER,
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    },
    "qwen3_asr": {
        "architectures": ["Qwen3ASRForConditionalGeneration"],
        "model_type": "qwen3_asr",
        "audio_token_id": AUDIO_ID,
        "text_config": {**TEXT, "model_type": "qwen3", "head_dim": 24},
        "tie_word_embeddings": True,
        "audio_config": {
            "model_type": "qwen3_asr_encoder",
            "num_mel_bins": 8,
            "d_model": 32,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "downsample_hidden_size": 4,
            "output_dim": 64,
        },
    },
}

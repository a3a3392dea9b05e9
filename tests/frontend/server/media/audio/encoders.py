"""AudioConfigs of each family, with windows of their published sizes."""

from __future__ import annotations

from typing import Any

from tokenloom.ipc.spec.models.audio_config import AudioConfig, AudioFamily

COMMON: dict[str, Any] = {"audio_token_id": 7, "hidden_size": 32, "num_layers": 2, "num_mel_bins": 128}
WINDOW = {"window_frames": 3000, "window_rows": 1500}
ENCODERS: dict[AudioFamily, AudioConfig] = {
    "qwen2_audio": AudioConfig(family="qwen2_audio", rows_per_embed=2, max_windows=1, **WINDOW, **COMMON),
    "voxtral": AudioConfig(family="voxtral", rows_per_embed=4, **WINDOW, **COMMON),
    "qwen3_asr": AudioConfig(
        family="qwen3_asr",
        window_frames=100,
        window_rows=13,
        windows_together=8,
        num_halvings=3,
        min_samples=8000,
        **COMMON,
    ),
}

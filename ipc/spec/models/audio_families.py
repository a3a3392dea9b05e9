"""AUDIO_FAMILIES: the models that take audio, by architecture, with their language models and their AudioConfig.

Fields that a file leaves out have transformers' defaults.
"""

from __future__ import annotations

from .audio_config import AudioConfig, AudioFamily, halved
from .config_file import ConfigFile
from .multimodal import MultimodalFamily, encoder_fields
from .text_families import QWEN3_ASR as QWEN3_ASR_TEXT

FRAMES_PER_ROW = 2  # the second of Whisper's convolutions has this stride
QWEN3_WINDOW = 100  # frames; transformers counts rows only for windows of this length
QWEN3_HALVINGS = 3
QWEN3_MIN_SAMPLES = 8000
CONVOLVED = 9  # elements of a convolution's kernel: 3 frames × 3 mel bins
WHISPER = {  # default fields of Whisper's encoder and of two like it, under each family's own names
    "whisper": {"d_model": 384, "encoder_layers": 4, "num_mel_bins": 80, "max_source_positions": 1500},
    "qwen2_audio": {"d_model": 1280, "encoder_layers": 32, "num_mel_bins": 128, "max_source_positions": 1500},
    "voxtral": {"hidden_size": 1280, "num_hidden_layers": 32, "num_mel_bins": 128, "max_source_positions": 1500},
}
QWEN3_ASR = {
    "d_model": 1024,
    "encoder_layers": 24,
    "num_mel_bins": 128,
    "n_window": 50,
    "n_window_infer": 800,
    "downsample_hidden_size": 480,
}


def _hidden_size(tower: ConfigFile) -> int:
    return tower.positive("d_model" if "d_model" in tower else "hidden_size")


def _whisper(family: AudioFamily, tower: ConfigFile, token_id: int, **more: int) -> AudioConfig:
    """Return the config of an encoder like Whisper's."""
    rows = tower.positive("max_source_positions")
    return AudioConfig(
        family=family,
        audio_token_id=token_id,
        hidden_size=_hidden_size(tower),
        num_layers=tower.positive("encoder_layers" if "encoder_layers" in tower else "num_hidden_layers"),
        num_mel_bins=tower.positive("num_mel_bins"),
        window_frames=FRAMES_PER_ROW * rows,
        window_rows=rows,
        **more,
    )


def _encoder_decoder(file: ConfigFile) -> AudioConfig:
    """Return the config of Whisper's own encoder, whose fields are on one level with the decoder's."""
    start_id = file.whole("decoder_start_token_id", 50257)  # begins every prompt
    config = _whisper("whisper", file.with_defaults(WHISPER["whisper"]), start_id, max_windows=1)
    longest = file.positive("max_target_positions", 448)
    if config.window_rows < longest:
        file.refuse(f"max_source_positions {config.window_rows} is below max_target_positions {longest}")
    return config


def _qwen2_audio(file: ConfigFile) -> AudioConfig:
    tower = encoder_fields(file, "audio_config", WHISPER["qwen2_audio"])
    token_id = file.whole("audio_token_index" if "audio_token_index" in file else "audio_token_id", 151646)
    return _whisper("qwen2_audio", tower, token_id, rows_per_embed=2, max_windows=1)


def _voxtral(file: ConfigFile) -> AudioConfig:
    tower = encoder_fields(file, "audio_config", WHISPER["voxtral"])
    inner = tower.positive("encoder_ffn_dim" if "encoder_ffn_dim" in tower else "intermediate_size", 5120)
    config = _whisper("voxtral", tower, file.positive("audio_token_id"))
    rows = inner // config.hidden_size
    if inner % config.hidden_size or config.window_rows % rows:
        file.refuse(
            f"intermediate_size {inner} of audio_config must be a multiple of its hidden_size {config.hidden_size}, "
            f"by a divisor of its max_source_positions {config.window_rows}: the projector takes as many rows at once"
        )
    return _whisper("voxtral", tower, config.audio_token_id, rows_per_embed=rows)


def _qwen3_asr(file: ConfigFile) -> AudioConfig:
    tower = encoder_fields(file, "audio_config", QWEN3_ASR)
    frames, together = 2 * tower.positive("n_window"), tower.positive("n_window_infer")
    if frames != QWEN3_WINDOW:
        file.refuse(f"n_window of audio_config must be {QWEN3_WINDOW // 2}, it is {frames // 2}")
    if together % frames:
        file.refuse(f"n_window_infer {together} of audio_config must be a multiple of 2 × n_window, {frames}")
    return AudioConfig(
        family="qwen3_asr",
        audio_token_id=file.whole("audio_token_id", 151676),
        hidden_size=_hidden_size(tower),
        num_layers=tower.positive("encoder_layers" if "encoder_layers" in tower else "num_hidden_layers"),
        num_mel_bins=tower.positive("num_mel_bins"),
        window_frames=frames,
        window_rows=halved(frames, QWEN3_HALVINGS),
        num_halvings=QWEN3_HALVINGS,
        convolution_products=_qwen3_products(tower),
        windows_together=together // frames,
        min_samples=QWEN3_MIN_SAMPLES,
    )


def _qwen3_products(tower: ConfigFile) -> int:
    """Return the number of multiplications per row, of the convolutions over frames and mel bins and of the matrix
    after them."""
    size, channels, inputs, bins, total = _hidden_size(tower), tower.positive("downsample_hidden_size"), 1, 0, 0
    for number in range(1, QWEN3_HALVINGS + 1):
        bins = halved(tower.positive("num_mel_bins"), number)
        total += 2 ** (QWEN3_HALVINGS - number) * bins * CONVOLVED * inputs * channels
        inputs = channels
    return total + bins * channels * size


AUDIO_FAMILIES: dict[str, MultimodalFamily] = {
    "WhisperForConditionalGeneration": MultimodalFamily(_encoder_decoder, "whisper", has_own_text=True, is_tied=True),
    "Qwen2AudioForConditionalGeneration": MultimodalFamily(_qwen2_audio, "qwen2"),
    "VoxtralForConditionalGeneration": MultimodalFamily(_voxtral, "voxtral_text", has_own_text=True),
    "Qwen3ASRForConditionalGeneration": MultimodalFamily(
        _qwen3_asr, "qwen3", is_tied=True, missing_text=QWEN3_ASR_TEXT, defaults={"eos_token_id": [151643, 151645]}
    ),
}

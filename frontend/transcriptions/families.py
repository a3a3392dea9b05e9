"""prompts_of: the TranscriptionPrompts of a model."""

from __future__ import annotations

from ...ipc.models.model_config import ModelConfig
from .prompts import ChatPrompts, TranscriptionPrompts
from .qwen3_asr import Qwen3AsrPrompts
from .voxtral import VoxtralPrompts
from .whisper import WhisperPrompts


def prompts_of(model: ModelConfig) -> TranscriptionPrompts:
    match model.audio and model.audio.family:
        case "qwen3_asr":
            return Qwen3AsrPrompts()
        case "voxtral":
            return VoxtralPrompts()
        case "whisper":
            return WhisperPrompts(model)
        case _:
            return ChatPrompts()

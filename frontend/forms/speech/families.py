"""The choice of the TranscriptionPrompts for a model's family."""

from __future__ import annotations

from ....ipc.messages.client import SpeechModel
from .prompts import ChatPrompts, TranscriptionPrompts
from .qwen3_asr import Qwen3AsrPrompts
from .voxtral import VoxtralPrompts
from .whisper import WhisperPrompts


def prompts_of(model: SpeechModel) -> TranscriptionPrompts:
    match model.family:
        case "qwen3_asr":
            return Qwen3AsrPrompts()
        case "voxtral":
            return VoxtralPrompts()
        case "whisper":
            return WhisperPrompts(model)
        case _:
            return ChatPrompts()

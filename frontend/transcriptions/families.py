"""prompts_of: the TranscriptionPrompts of a model."""

from __future__ import annotations

from ...ipc.models.audio_config import AudioConfig
from .prompts import ChatPrompts, TranscriptionPrompts
from .qwen3_asr import Qwen3AsrPrompts
from .voxtral import VoxtralPrompts
from .whisper import WhisperPrompts

PROMPTS: dict[str, TranscriptionPrompts] = {
    "qwen3_asr": Qwen3AsrPrompts(),
    "voxtral": VoxtralPrompts(),
    "whisper": WhisperPrompts(),
}
CHATS = ChatPrompts()  # of all other families


def prompts_of(audio: AudioConfig) -> TranscriptionPrompts:
    return PROMPTS.get(audio.family, CHATS)

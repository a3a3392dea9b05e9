"""LoRARequest: the reference to an adapter in the Python API, as in vLLM."""

from __future__ import annotations

import msgspec

from .public_struct import PublicStruct


class LoRARequest(msgspec.Struct, frozen=True, metaclass=PublicStruct):
    """An adapter for a request: the name of a loaded adapter, or the folder to load it from."""

    lora_name: str
    lora_int_id: int = 0  # accepted for vLLM's callers and not used: the content identifies an adapter
    lora_path: str = ""

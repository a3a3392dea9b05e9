"""AdapterConfig: the fields of PEFT's adapter_config.json that change how the tensors are applied."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from ..errors import RequestError

CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 4 << 20


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the tensors of an adapter are applied. The patterns' keys stand in the order of the file."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}

    def canonical_bytes(self) -> bytes:
        """Return the fields in a form in which equal configs are equal bytes."""
        return msgspec.json.encode(self)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module. module: its path without "base_model.model."."""
        return next((rank for key, rank in self.rank_pattern.items() if _matches(key, module)), self.r)

    def scale_of(self, module: str) -> float:
        """Return the factor of B @ A."""
        alpha = next((alpha for key, alpha in self.alpha_pattern.items() if _matches(key, module)), self.lora_alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _matches(key: str, module: str) -> bool:
    return module == key or module.endswith(f".{key}")


def read_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json in `folder`; RequestError if it is missing, damaged or asks for something else."""
    path = folder / CONFIG_NAME
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES)
        fields: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
        return msgspec.convert({name: value for name, value in fields.items() if value is not None}, AdapterConfig)
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}): give the folder of a PEFT adapter") from None
    except msgspec.MsgspecError as error:
        raise RequestError(f"{path} is no config of a LoRA adapter ({error}): save the adapter again") from None

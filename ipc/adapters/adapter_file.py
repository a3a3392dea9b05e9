"""AdapterFile: the tensors of a PEFT LoRA adapter, each with the module of the model that it updates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..config.model_config import ModelConfig
from ..errors import RequestError
from .adapter_config import read_config
from .targets import AdapterTarget, targets_of
from .tensor_header import TENSORS_NAME, TensorPlace, read_header

ROOT = "base_model.model."


class AdapterModule(msgspec.Struct, frozen=True, kw_only=True):
    """The update of one module: scale · B @ A, with a [rank, num_inputs] and b [num_outputs, rank].

    Of all experts of a layer (`target.num_experts` E): a [E · rank, num_inputs], where row e · rank + i is row i of
    expert e, and b [num_outputs, rank · E], where column i · E + e is column i of expert e.
    """

    target: AdapterTarget
    expert: int | None = None  # as target.expert
    rank: int
    scale: float
    a: TensorPlace
    b: TensorPlace
    magnitude: TensorPlace | None = None  # [num_outputs], of DoRA


class AdapterFile(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter whose header fits the model."""

    folder: str
    rank: int  # the largest of its modules
    modules: list[AdapterModule]
    num_bytes: int  # of the tensors


def read_adapter(
    folder: Path, model: ModelConfig, *, max_rank: int, target_modules: Sequence[str] | None = None
) -> AdapterFile:
    """Read the config and the header of the adapter in `folder`, and check them against the model.

    `target_modules`: the only names (last parts of a path) of modules that adapters may update; None: all. RequestError
    names the first thing that does not fit.
    """
    config, places = read_config(folder), read_header(folder / TENSORS_NAME)
    targets, modules = targets_of(model), []
    for name, a in places.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix(ROOT).removesuffix(".lora_A.weight")
        b = places.get(f"{ROOT}{module}.lora_B.weight")
        if module not in targets or b is None:
            raise RequestError(f"{folder}: tensor {name} fits no module of {model.architecture}: use its own adapters")
        target = targets[module]
        magnitude = places.get(f"{ROOT}{module}.lora_magnitude_vector")
        fields = {"rank": config.rank_of(module), "scale": config.scale_of(module)}
        modules.append(
            AdapterModule(target=target, expert=target.expert, a=a, b=b, magnitude=magnitude, **fields)  # type: ignore[arg-type]
        )
    num_bytes = sum(place.num_bytes for place in places.values())
    return AdapterFile(
        folder=str(folder), rank=max(each.rank for each in modules), modules=modules, num_bytes=num_bytes
    )

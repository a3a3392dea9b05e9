"""AdapterFile: the tensors of a PEFT LoRA adapter, each with the module of the model that it updates.

PEFT names a tensor "base_model.model.<path of the module>.<part>". If all experts of a layer are one module with
several parameters, ".base_layer" follows the path of all parameters but the last, and only shapes show which parameter
it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from ...errors import RequestError
from ..models.model_config import ModelConfig
from .adapter_config import CONFIG_NAME, MERGE, AdapterConfig, read_config
from .name_pattern import PatternError, StepBudget
from .pattern_table import PatternTable
from .targets import AdapterTarget, ModulePaths, is_chosen, targets_of
from .tensor_header import TENSORS_NAME, TensorHeader, TensorPlace, load_header, parse_header

ROOT = "base_model.model."
Part: TypeAlias = Literal["a", "b", "magnitude", "base"]
PART_BY_END: dict[str, Part] = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".base_layer.weight": "base",
}
EMBEDDING_A = ".lora_embedding_A"
WRAPPER = ".base_layer"
OTHER_MODEL = "the adapter belongs to another model, or updates a part that is not served"
COPY_BOTH = "copy both files again"


class AdapterModule(msgspec.Struct, frozen=True, kw_only=True):
    """The update of one module: scale · b @ a, with a [rank, num_inputs] and b [num_outputs, rank].

    For all experts of a layer (`target.num_experts` = E): a [E · rank, num_inputs], where row e · rank + i is row i of
    expert e, and b [num_outputs, rank · E], where column i · E + e is column i of expert e.
    """

    target: AdapterTarget
    expert: int | None = None  # equal to target.expert
    rank: int
    scale: float
    a: TensorPlace
    b: TensorPlace
    are_swapped: bool = False  # all experts: a [E · rank, num_outputs] is B transposed, b [num_inputs, rank · E] is A
    magnitude: TensorPlace | None = None  # [num_outputs]; None without DoRA

    @property
    def places(self) -> list[TensorPlace]:
        return [self.a, self.b] if self.magnitude is None else [self.a, self.b, self.magnitude]


class BaseCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Copy of a base weight that PEFT saved together with an update of its module. Training may have changed it."""

    target: AdapterTarget
    place: TensorPlace


class AdapterFile(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that fits the model, by its config and the header of its tensors."""

    folder: str
    rank: int  # the largest rank of its modules
    modules: list[AdapterModule]
    copies: list[BaseCopy]
    num_bytes: int  # of the tensors


def read_adapter(
    folder: Path, model: ModelConfig, *, max_rank: int, target_modules: Sequence[str] | None = None
) -> AdapterFile:
    """Read and check the adapter in `folder` with a new AdapterReader. RequestError if it cannot be read or does not
    fit the model; Overloaded if the system is short of something."""
    return AdapterReader(model, max_rank=max_rank, target_modules=target_modules).read(folder)


class AdapterReader:
    """Reader of a model's adapters. It keeps the last result: adapters from one training script, and copies of one
    adapter, have equal configs and headers, and checking these takes milliseconds."""

    def __init__(self, model: ModelConfig, *, max_rank: int, target_modules: Sequence[str] | None = None) -> None:
        """`target_modules`: adapters may update only modules with a path that ends with one of these; None: all."""
        self._model, self._max_rank, self._target_modules = model, max_rank, target_modules
        self._last: tuple[bytes, TensorHeader, AdapterFile] | None = None

    def read(self, folder: Path, pause: Callable[[], None] = lambda: None) -> AdapterFile:
        """Read the config and the header of the adapter in `folder`, and check them against the model. RequestError if
        they are unreadable or do not fit; Overloaded if the system is short of descriptors or memory. `pause` is called
        between pieces of the work."""
        if self._model.implementation != "native":
            raise RequestError(
                f"{self._model.architecture} runs by transformers' layers, which take no adapters: merge {folder} into "
                "the base with PEFT's merge_and_unload"
            )
        config, header = read_config(folder), load_header(folder / TENSORS_NAME)
        fields = config.canonical_bytes()
        if self._last is not None and self._last[:2] == (fields, header):
            return msgspec.structs.replace(self._last[2], folder=str(folder))
        file = self._check(_Reader(folder, config, header, self._model, self._max_rank), pause)
        self._last = fields, header, file
        return file

    def _check(self, reader: _Reader, pause: Callable[[], None]) -> AdapterFile:
        modules, copies = list[AdapterModule](), list[BaseCopy]()
        for parts in reader.parts:
            module = reader.module_of(parts)
            if not is_chosen(module.target, self._target_modules):
                raise RequestError(
                    f"{reader.path}: tensor {module.a.name} updates a module that --lora-target-modules leaves out, it "
                    f"has {', '.join(self._target_modules or ())}: add the module there"
                )
            modules.append(module)
            if parts.base is not None:
                copies.append(reader.copy_of(module.target, parts.base))
            pause()
        reader.check_experts(modules)
        return AdapterFile(
            folder=str(reader.path.parent),
            rank=max(each.rank for each in modules),
            modules=modules,
            copies=copies,
            num_bytes=reader.num_bytes,
        )


class _Parts(msgspec.Struct):
    """The tensors of one module in the file. Each parameter of an experts module counts as a module here."""

    module: str  # its path in the file, without ROOT
    a: TensorPlace | None = None
    b: TensorPlace | None = None
    magnitude: TensorPlace | None = None
    base: TensorPlace | None = None


class _Reader:
    """Reader of one adapter: finds the model's module for each tensor, and checks the shapes. RequestError if one does
    not fit."""

    def __init__(
        self, folder: Path, config: AdapterConfig, header: TensorHeader, model: ModelConfig, max_rank: int
    ) -> None:
        self.path = folder / TENSORS_NAME
        self._max_rank, self._architecture = max_rank, model.architecture
        self._config = config
        places = parse_header(self.path, header)
        self.num_bytes = sum(place.num_bytes for place in places.values())
        self._targets, self._paths = targets_of(model), ModulePaths(model)
        try:
            budget = StepBudget()
            self._ranks = PatternTable(config.rank_pattern, budget)
            self._alphas = PatternTable(config.alpha_pattern, budget)
        except PatternError as error:
            raise self._pattern_error(error) from None
        self.parts = self._parts_of(places)
        self._are_swapped = any(self._is_only_swapped(parts) for parts in self.parts)
        self._tensor_by_module: dict[str, str] = {}

    def module_of(self, parts: _Parts) -> AdapterModule:
        """Return the update that `parts`, the tensors of one module in the file, make in the model."""
        if parts.a is None or parts.b is None:
            there = parts.a or parts.b or parts.magnitude or parts.base
            assert there is not None
            lacking = "A and B" if parts.a is parts.b else "A" if parts.a is None else "B"
            raise self._error(f"tensor {there.name} has no {lacking} beside it", "save the adapter again with PEFT")
        target, are_swapped = self._target_of(parts, parts.a, parts.b)
        other = self._tensor_by_module.setdefault(target.module, parts.a.name)
        if other != parts.a.name:
            raise self._error(f"tensors {other} and {parts.a.name} update the same module", "remove one of them")
        rank, alpha = self._rank_and_alpha(parts, target)
        self._check_shapes(target, parts.a, parts.b, rank, are_swapped=are_swapped)
        self._check_magnitude(target, parts.a, parts.magnitude)
        return AdapterModule(
            target=target,
            expert=target.expert,
            rank=rank,
            scale=self._config.scale(rank, alpha),
            a=parts.a,
            b=parts.b,
            are_swapped=are_swapped,
            magnitude=parts.magnitude,
        )

    def copy_of(self, target: AdapterTarget, place: TensorPlace) -> BaseCopy:
        shape = (target.num_inputs, target.num_outputs)
        shape = shape if target.kind == "embedding" else shape[::-1]
        if target.kind not in ("embedding", "head"):
            raise self._error(f"tensor {place.name} replaces a weight of the base", MERGE)
        if place.shape != shape:
            raise self._error(
                f"tensor {place.name} has shape {list(place.shape)}, the model's has {list(shape)}",
                "an adapter may not add tokens: merge it into its base",
            )
        return BaseCopy(target=target, place=place)

    def check_experts(self, modules: Sequence[AdapterModule]) -> None:
        """Raise RequestError if a layer has updates of single experts and of all experts in one tensor."""
        stacked = {each.target.layer: each for each in modules if each.target.num_experts}
        for each in modules:
            if each.expert is not None and each.target.layer in stacked:
                names = f"{each.a.name} and {stacked[each.target.layer].a.name}"
                raise self._error(f"tensors {names} update the same experts", "remove one of them")

    def _parts_of(self, places: Mapping[str, TensorPlace]) -> list[_Parts]:
        """Return the tensors by module of the file, in the order of their first bytes."""
        by_module: dict[str, _Parts] = {}
        for name, place in places.items():
            end = next((end for end in PART_BY_END if name.endswith(end)), None)
            if end is None:
                raise self._error(f"tensor {name} is neither A, B nor magnitude of a module", MERGE)
            module, part = name.removeprefix(ROOT).removesuffix(end), PART_BY_END[end]
            parts = by_module.setdefault(module, _Parts(module))
            there = getattr(parts, part)
            if there is not None:
                raise self._error(
                    f"tensors {there.name} and {name} are the same part of a module", "remove one of them"
                )
            setattr(parts, part, place)
        return list(by_module.values())

    def _target_of(self, parts: _Parts, a: TensorPlace, b: TensorPlace) -> tuple[AdapterTarget, bool]:
        """Return the model's module that `parts` update, and whether A and B are swapped."""
        target = self._find(parts.module)
        if target is not None:
            if (target.kind == "embedding") != a.name.endswith(EMBEDDING_A):
                raise self._error(f"tensor {a.name} is of another kind than its module", OTHER_MODEL)
            return target, False
        block = self._experts_of(parts.module)
        if block is None:
            raise self._error(f"tensor {a.name} updates a module that {self._architecture} does not have", OTHER_MODEL)
        for are_swapped in (self._are_swapped, not self._are_swapped):
            for target in block:
                if _fits(target, a, b, are_swapped=are_swapped):
                    return target, are_swapped
        raise self._error(
            f"tensor {a.name} has shape {list(a.shape)} and its B {list(b.shape)}, which fit neither gate_up_proj nor "
            f"down_proj of {block[0].num_experts} experts with {block[0].num_inputs} inputs and {block[1].num_inputs} "
            "inner ones",
            OTHER_MODEL,
        )

    def _is_only_swapped(self, parts: _Parts) -> bool:
        """Return whether A and B of all experts fit the model only if A is B transposed and B is A transposed. Some
        versions of PEFT exchange the inputs and the outputs of GPT-OSS's experts."""
        block = self._experts_of(parts.module)
        if block is None or parts.a is None or parts.b is None:
            return False
        fits = {
            are_swapped: any(_fits(target, parts.a, parts.b, are_swapped=are_swapped) for target in block)
            for are_swapped in (False, True)
        }
        return fits[True] and not fits[False]

    def _find(self, module: str) -> AdapterTarget | None:
        return next((self._targets[each] for each in self._paths.spellings(module) if each in self._targets), None)

    def _experts_of(self, module: str) -> tuple[AdapterTarget, AdapterTarget] | None:
        """Return the targets gate_up and down of all experts if `module` is a layer's experts, else None."""
        block = _without_wrappers(module)
        up, down = (self._find(f"{block}.{name}") for name in ("gate_up_proj", "down_proj"))
        return None if up is None or down is None or not up.num_experts else (up, down)

    def _rank_and_alpha(self, parts: _Parts, target: AdapterTarget) -> tuple[int, float]:
        path = _without_wrappers(parts.module)  # the path that PEFT matches with the patterns
        if target.num_experts:
            path = f"{path}.{target.module.rpartition('.')[2]}"
        elif any(f"{path}.weight".endswith((f".{name}", name)) for name in self._config.target_parameters):
            path = f"{path}.weight"
        try:
            rank, alpha = self._ranks.find(path), self._alphas.find(path)
        except PatternError as error:
            raise self._pattern_error(error) from None
        return rank or self._config.r, self._config.lora_alpha if alpha is None else alpha

    def _check_shapes(
        self, target: AdapterTarget, a: TensorPlace, b: TensorPlace, rank: int, *, are_swapped: bool
    ) -> None:
        inputs, outputs = (target.num_inputs, target.num_outputs)[:: -1 if are_swapped else 1]
        if len(a.shape) != 2 or len(b.shape) != 2 or (a.shape[1], b.shape[0]) != (inputs, outputs):
            raise self._error(
                f"tensor {a.name} has shape {list(a.shape)} and its B {list(b.shape)}, the module has {inputs} inputs "
                f"and {outputs} outputs",
                OTHER_MODEL,
            )
        found = [size // max(target.num_experts, 1) for size in (a.shape[0], b.shape[1])]
        if found != [rank, rank]:
            raise self._error(
                f"tensor {a.name} has rank {found[0]} and its B {found[1]}, {CONFIG_NAME} says {rank}",
                COPY_BOTH,
            )
        if rank > self._max_rank:
            raise self._error(
                f"tensor {a.name} has rank {rank}, --max-lora-rank is {self._max_rank}",
                "raise it, or train with a lower rank",
            )

    def _check_magnitude(self, target: AdapterTarget, a: TensorPlace, magnitude: TensorPlace | None) -> None:
        if not self._config.use_dora:
            if magnitude is not None:
                raise self._error(f"tensor {magnitude.name} is of DoRA, {CONFIG_NAME} has no use_dora", COPY_BOTH)
        elif target.num_experts or target.kind == "embedding":
            raise self._error(f"tensor {a.name} is of DoRA, which embeddings and experts in one tensor lack", MERGE)
        elif magnitude is None:
            raise self._error(f"tensor {a.name} has no lora_magnitude_vector, use_dora is true", COPY_BOTH)
        elif magnitude.shape != (target.num_outputs,):
            raise self._error(
                f"tensor {magnitude.name} has shape {list(magnitude.shape)}, the module has {target.num_outputs} "
                "outputs",
                OTHER_MODEL,
            )

    def _error(self, reason: str, mend: str) -> RequestError:
        return RequestError(f"{self.path}: {reason}: {mend}")

    def _pattern_error(self, error: PatternError) -> RequestError:
        path = self.path.with_name(CONFIG_NAME)
        return RequestError(f"{path}: keys of rank_pattern or alpha_pattern cannot be used, {error}: {error.mend}")


def _without_wrappers(module: str) -> str:
    """Return a path without the ".base_layer" endings that PEFT adds if several parameters of a module are updated."""
    while module.endswith(WRAPPER):
        module = module.removesuffix(WRAPPER)
    return module


def _fits(target: AdapterTarget, a: TensorPlace, b: TensorPlace, *, are_swapped: bool) -> bool:
    """Return whether A and B of all experts have equal ranks, and the inputs and outputs of `target`."""
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or a.shape[0] % target.num_experts:
        return False
    inputs, outputs = (target.num_inputs, target.num_outputs)[:: -1 if are_swapped else 1]
    return (a.shape[1], b.shape[0]) == (inputs, outputs)

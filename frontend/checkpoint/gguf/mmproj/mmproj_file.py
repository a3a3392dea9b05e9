"""MmprojFile: an mmproj file as the encoder of one language model: its config, its processor and its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from .....ipc.errors import ConfigError
from .....ipc.spec.config.gguf_index import MMPROJ_LINK, GgufTensor
from ..metadata import Metadata
from ..reader import read_gguf
from .projector import Fields, num_layers
from .projectors import TEXT_ALONE, UnknownProjector, projector_of

ARCHITECTURE = "clip"
WHOLE = ("dtype", "quantization_config", "bos_token_id", "eos_token_id", "tie_word_embeddings")  # beside text_config
SECTIONS = "rope.dimension_sections"
SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
QKV = ("attn_q", "attn_k", "attn_v")
FIRST_FRAME, SECOND_FRAME = "v.patch_embd.weight", "v.patch_embd.weight.1"


MEND = "--no-mmproj serves text alone"


class OtherProjector(ConfigError):
    """An mmproj file of another model."""


@contextlib.contextmanager
def mmproj_errors() -> Iterator[None]:
    """Add to a ConfigError about an mmproj file how the model is served without it."""
    try:
        yield
    except (UnknownProjector, OtherProjector):
        raise
    except ConfigError as error:
        raise ConfigError(f"{error}; {MEND}") from None


class MmprojFile:
    """The encoder in the file at `path`. ConfigError if the file is damaged, lacks a tensor or has invalid metadata;
    UnknownProjector if its family is not served."""

    def __init__(self, path: Path) -> None:
        self._data = Metadata(read_gguf(path, MMPROJ_LINK), {MMPROJ_LINK: path})
        self._path = path
        if self._data.architecture != ARCHITECTURE:
            found = self._data.architecture
            self._data.refuse(f"general.architecture is {found!r:.100}, that of an mmproj file is {ARCHITECTURE}")
        self._family = projector_of(self._data)
        self._check_tensors()

    def config(self, model: Metadata, architecture: str, text: Mapping[str, Any]) -> Fields:
        """Return the fields of config.json for the language model with the metadata `model`, the architecture and the
        config.json `text`. OtherProjector if the encoder does not belong to it."""
        kind = self._text_type(model, architecture)
        name, axis = self._family.output
        size, wanted = self._data.shape_of(name)[axis], text["hidden_size"]
        if size != wanted:
            raise OtherProjector(
                f"{self._path}: its projector makes embeddings of {size}, {model.path} takes {wanted}: it belongs to "
                "another model"
            )
        inner = {field: value for field, value in text.items() if field not in ("architectures", "quantization_config")}
        return {
            "architectures": [self._family.architecture],
            "model_type": self._family.model_type,
            **{field: text[field] for field in WHOLE if field in text},
            **self._token_ids(model),
            **self._family.config(self._data),
            "text_config": {**inner, "model_type": kind, **_sections(model, text)},
        }

    def processor(self) -> Fields:
        """Return the content of preprocessor_config.json."""
        return self._family.processor(self._data)

    def index(self) -> dict[str, GgufTensor]:
        """Return the tensors by the names of the encoder's checkpoint; a tensor unknown to it keeps its own name."""
        found: dict[str, GgufTensor] = {}
        tensors, named = self._data.tensors, self._names()
        for name, tensor in tensors.items():
            if not name.startswith(self._family.unused):
                found[named.get(name, name)] = self._changed(name, tensor)
        for ours, parts, axis in self._joined():
            shape = list(parts[0].shape)
            shape[axis] = sum(part.shape[axis] for part in parts)
            found[ours] = msgspec.structs.replace(parts[0], shape=tuple(shape), parts=parts, axis=axis)
        return {name: tensor for name, tensor in found.items() if name not in self._parts_of_others()}

    # ── the language model ───────────────────────────────────────────────────────────────────────────────────────

    def _text_type(self, model: Metadata, architecture: str) -> str:
        if model.architecture in TEXT_ALONE:
            raise UnknownProjector(f"{self._path}: images of {model.architecture} models are not served")
        known = "llama" if architecture == "LlamaForCausalLM" else model.architecture
        found = self._family.texts.get(known)
        if found is None:
            raise OtherProjector(
                f"{self._path}: it is the encoder of a {self._family.model_type} model, {model.path} is a "
                f"{model.architecture} model: it belongs to another one"
            )
        return found

    def _token_ids(self, model: Metadata) -> Fields:
        """Return the ids of the tokens that stand for media. Without a vocabulary they are those of the family's
        published models."""
        found: Fields = {}
        for field, texts in self._family.tokens.items():
            known = [model.token_ids[text] for text in texts if text in model.token_ids]
            if known:
                found[field] = known[0]
        return found

    # ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _names(self) -> dict[str, str]:
        """Return the checkpoint's name of each tensor that has one."""
        modules = {**self._family.modules, **self._family.more_modules(self._data)}
        in_layer = self._family.in_layer
        found: dict[str, str] = {}
        for name in self._data.tensors:
            layer, inner = self._place(name)
            if layer is None:
                ours = _named(name, modules)
            else:
                ours = _named(inner, in_layer)
                ours = None if ours is None else f"{self._family.layers}{layer}.{ours}"
            if ours is not None:
                found[name] = ours
        return found

    def _place(self, name: str) -> tuple[str | None, str]:
        """Return the number of a tensor's layer and its name in there; None and its name if it belongs to none. Old
        converters have named the two matrices of feed-forward blocks the other way round."""
        prefix = self._family.prefix
        if not name.startswith(prefix):
            return None, name
        layer, _, inner = name.removeprefix(prefix).partition(".")
        module, _, kind = inner.partition(".")
        return layer, f"{SWAPPED[module]}.{kind}" if module in SWAPPED and self._is_swapped() else inner

    def _is_swapped(self) -> bool:
        prefix, hidden_size = self._family.prefix, self._data.count(f"{self._family.medium}.embedding_length")
        up, down = (self._data.shape_of(f"{prefix}0.{each}.weight") for each in ("ffn_up", "ffn_down"))
        return up[-1] != hidden_size == down[-1]

    def _joined(self) -> Iterator[tuple[str, tuple[GgufTensor, ...], int]]:
        """Yield the tensors that a file has in parts: the name, the parts and the axis. The parts are the two frames of
        a patch, or queries, keys and values."""
        tensors = self._data.tensors
        if SECOND_FRAME in tensors:
            frames = (tensors[name] for name in (FIRST_FRAME, SECOND_FRAME))
            parts = tuple(msgspec.structs.replace(each, shape=_with_time(each.shape)) for each in frames)
            yield self._names()[FIRST_FRAME], parts, 2
        if (fused := self._family.in_layer.get("attn_qkv")) is None:
            return
        for name in list(tensors):
            layer, inner = self._place(name)
            module, _, kind = inner.partition(".")
            if layer is not None and module == QKV[0]:
                parts = tuple(tensors[name.replace(f".{QKV[0]}.", f".{each}.")] for each in QKV)
                yield f"{self._family.layers}{layer}.{fused}.{kind}", parts, 0

    def _parts_of_others(self) -> set[str]:
        """Return the names of tensors that are read as parts of others alone."""
        has_fused = "attn_qkv" in self._family.in_layer
        split = {name for name in self._data.tensors if has_fused and any(f".{each}." in name for each in QKV)}
        return {SECOND_FRAME, *split}

    def _changed(self, name: str, tensor: GgufTensor) -> GgufTensor:
        added = self._family.added.get(name, 0.0)
        if self._family.is_rotated and any(f".{each}." in name for each in QKV[:2]):
            heads = self._data.count(f"{self._family.medium}.attention.head_count", least=1)
            return msgspec.structs.replace(tensor, rotated=tensor.shape[0] // heads)
        return msgspec.structs.replace(tensor, added=added) if added else tensor

    def _check_tensors(self) -> None:
        """Raise ConfigError if a module of the encoder, or a tensor that other layers have, is missing."""
        family, data = self._family, self._data
        for module in (*family.modules, *family.more_modules(data)):
            if module not in family.optional and not data.has(module):
                data.shape_of(f"{module.removesuffix('.weight')}.weight")
        by_layer: dict[int, set[str]] = {layer: set() for layer in range(num_layers(data, family.medium))}
        for name in data.tensors:
            layer, _, inner = name.removeprefix(family.prefix).partition(".")
            if name.startswith(family.prefix) and layer.isdecimal() and int(layer) in by_layer:
                by_layer[int(layer)].add(inner)
        needed = {inner for found in by_layer.values() for inner in found}
        for module in family.in_layer:
            is_split = module == "attn_qkv" and f"{QKV[0]}.weight" in needed
            names = QKV if is_split else () if module in family.optional else (module,)
            needed |= {name if "." in name else f"{name}.weight" for name in names}
        for number, found in by_layer.items():
            for missing in sorted(needed - found)[:1]:
                data.shape_of(f"{family.prefix}{number}.{missing}")


def _named(name: str, names: Mapping[str, str]) -> str | None:
    """Return the checkpoint's name of a parameter, or of the one of a module; None if it has none."""
    if name in names:
        return names[name]
    module, _, kind = name.rpartition(".")
    return f"{names[module]}.{kind}" if module in names else None


def _with_time(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a convolution over images as one over time, too: [out, in, 1, height, width]."""
    return (*shape[:2], 1, *shape[2:])


def _sections(model: Metadata, text: Mapping[str, Any]) -> Fields:
    """Return the fields of a rotary embedding by time, row and column; {} if the model has a plain one."""
    sections = model.whole(SECTIONS)
    if not isinstance(sections, list) or not any(sections):
        return {}
    shared = {"rope_type": "default", "rope_theta": text["rope_theta"], **text.get("rope_scaling", {})}
    interleaved = {"mrope_interleaved": True} if model.architecture == "qwen3vl" else {}
    return {"rope_scaling": {**shared, "mrope_section": sections[:3], **interleaved}}

"""MultimodalFamily: rules for a language model with an encoder of media, both described by one config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from .audio_config import AudioConfig
from .config_file import ConfigFile
from .family_rules import Family
from .model_config import TensorNames
from .text_families import TEXT_FAMILIES
from .vision_config import VisionConfig

ROOTS = ["language_model.model.", "model.language_model.", "model.text_model."]  # prefixes of language models
ENCODERS = [
    *("vision_tower.", "multi_modal_projector.", "visual.", "vision_model.", "connector.", "audio_tower."),
    "encoder.",  # Whisper's
]
ENCODER_PREFIXES = [f"{root}{encoder}" for encoder in ENCODERS for root in ("", "model.")]  # of the encoders' tensors

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class MultimodalFamily:
    """The rules by which an architecture's config.json describes its encoder and its language model."""

    encoder: Callable[[ConfigFile], VisionConfig | AudioConfig]
    text_type: str  # model_type of the language model, if text_config names none
    has_own_text: bool = False  # text_config is always of this type, whatever it names
    is_tied: bool = False  # tie_word_embeddings, if the file does not state it
    ties_by_text: bool = False  # tie_word_embeddings of text_config counts, too
    missing_text: Fields = field(default_factory=dict)  # the language model's fields, if there is no text_config
    defaults: Fields = field(default_factory=dict)  # of fields outside the objects of encoder and language model


def encoder_fields(file: ConfigFile, name: str, defaults: Fields, missing: Fields | None = None) -> ConfigFile:
    """Return the fields of an encoder: the object `name` of the file, or `missing` if there is none, with
    `defaults`."""
    return file.part(name, missing).with_defaults(defaults)


def language_model(file: ConfigFile, model: MultimodalFamily) -> tuple[Family, ConfigFile]:
    """Return the family and the fields of the language model. The family's rules also give the encoder's config.
    NotNative if the language model has no native layers."""
    file = file.with_defaults(model.defaults)
    text = _text_fields(file, model)
    has_kind = "text_config" in file and not model.has_own_text
    kind = text.text("model_type", model.text_type) if has_kind else model.text_type
    family = TEXT_FAMILIES.get(kind)
    if family is None:
        file.refuse_native(f"the language model {kind:.100} is none of {', '.join(TEXT_FAMILIES)}")
    is_tied = file.flag("tie_word_embeddings", model.is_tied)
    if model.ties_by_text:
        is_tied = is_tied or text.flag("tie_word_embeddings")
    encoder = model.encoder(file)
    name = "vision" if isinstance(encoder, VisionConfig) else "audio"
    rules = {"names": _names(family), "tie_word_embeddings": is_tied, name: encoder}
    rules |= {"logit_scale": 1.0, "logit_softcap": 0.0}  # transformers' wrappers apply the head alone
    return replace(family, own={**family.own, **rules}), family.prepare(text)


def _text_fields(file: ConfigFile, model: MultimodalFamily) -> ConfigFile:
    """Return the fields of text_config, and the outer fields that hold for the language model, too. Old files of Qwen
    have no text_config: all fields are on one level."""
    if "text_config" not in file:
        return file.with_defaults(model.missing_text)
    inner, whole = file.part("text_config"), {}
    for name in ("dtype", "torch_dtype", "quantization_config"):
        whole[name] = file.get(name, inner.get(name))
    whole |= {name: inner.get(name, file.get(name)) for name in ("bos_token_id", "eos_token_id")}
    return inner.with_fields({name: value for name, value in whole.items() if value is not None})


def _names(family: Family) -> TensorNames:
    names: TensorNames = family.own.get("names", TensorNames())
    return msgspec.structs.replace(names, roots=ROOTS, ignored=ENCODER_PREFIXES, prefers_stored_head=True)

"""VISION_FAMILIES: the models that see images, by architecture, with their language models and their VisionConfig.

A language model is one of the native families, chosen by the model_type of text_config. Fields that a file leaves out
have transformers' defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from . import model_fields as fields
from .config_file import ConfigFile
from .families import FAMILIES, GEMMA3_DEFAULTS, QWEN3
from .family_rules import Family, all_layers, head_dim_of
from .model_config import RopeConfig, TensorNames
from .vision_config import VisionConfig, VisionFamily

ROOTS = ["language_model.model.", "model.language_model.", "model.text_model."]  # of language models in files
TOWERS = ["vision_tower.", "multi_modal_projector.", "visual.", "vision_model.", "connector."]
VISION_PREFIXES = [f"{root}{tower}" for tower in TOWERS for root in ("", "model.")]  # of the encoder's tensors

Fields = Mapping[str, Any]


def _shape(vocab: int, hidden: int, inner: int, layers: int, heads: int, length: int, **more: Any) -> Fields:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": length,
        **more,
    }


LLAMA = _shape(32000, 4096, 11008, 32, 32, 2048, bos_token_id=1, eos_token_id=2)
MISTRAL = _shape(32000, 4096, 14336, 32, 32, 131072, bos_token_id=1, eos_token_id=2)
QWEN = _shape(151936, 4096, 22016, 32, 32, 32768)
QWEN2_VL = _shape(
    152064,
    8192,
    29568,
    80,
    64,
    32768,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    max_window_layers=80,
    bos_token_id=151643,
    eos_token_id=151645,
)
QWEN3_VL = _shape(151936, 4096, 22016, 32, 32, 128000)
GEMMA3 = {**_shape(262208, 2304, 9216, 26, 8, 131072, bos_token_id=2, eos_token_id=1), **GEMMA3_DEFAULTS}
MISTRAL_SMALL = _shape(  # of Mistral3 without a text_config
    131072,
    5120,
    32768,
    40,
    32,
    131072,
    model_type="mistral",
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=1e9,
    sliding_window=None,
)


def mrope(theta: float, sections: list[int], *, is_interleaved: bool) -> Callable[[ConfigFile], list[RopeConfig]]:
    """Return the rule for a rotary embedding by time, row and column; the arguments are those of files without it."""

    def rule(file: ConfigFile) -> list[RopeConfig]:
        parameters = dict(file.get("rope_scaling") or file.get("rope_parameters") or {})
        found = list(parameters.pop("mrope_section", None) or sections)
        parameters.pop("mrope_interleaved", None)
        kind = parameters.pop("rope_type", None) or parameters.pop("type", None)
        parameters["rope_type"] = "default" if kind in (None, "mrope") else kind
        parameters.setdefault("rope_theta", file.number("rope_theta", theta))
        size = head_dim_of(file)
        if len(found) != 3 or (sum(found) != size // 2 and not is_interleaved):
            file.refuse(f"mrope_section {found} must have 3 parts with a sum of {size // 2}, half of head_dim")
        plain = fields.rope_of(ConfigFile(file.path, {"rope_parameters": parameters}), size)
        return [msgspec.structs.replace(plain, sections=found, is_interleaved=is_interleaved)]

    return rule


QWEN2_VL_TEXT = Family(
    {**FAMILIES["Qwen2ForCausalLM"].own, "ropes": mrope(1e6, [16, 24, 24], is_interleaved=False)},
    {"sliding_window": 4096, **QWEN2_VL},
)
TEXT_FAMILIES: dict[str, Family] = {  # by model_type
    **{
        kind: replace(FAMILIES[architecture], defaults={**shape, **FAMILIES[architecture].defaults})
        for kind, architecture, shape in (
            ("llama", "LlamaForCausalLM", LLAMA),
            ("mistral", "MistralForCausalLM", MISTRAL),
            ("ministral3", "Ministral3ForCausalLM", {}),
            ("qwen2", "Qwen2ForCausalLM", QWEN),
            ("qwen3", "Qwen3ForCausalLM", QWEN),
            ("gemma", "GemmaForCausalLM", {}),
            ("gemma2", "Gemma2ForCausalLM", {}),
            ("phi3", "Phi3ForCausalLM", {}),
            ("granite", "GraniteForCausalLM", {}),
            ("smollm3", "SmolLM3ForCausalLM", {}),
        )
    },
    "qwen2_vl_text": QWEN2_VL_TEXT,
    "qwen2_5_vl_text": QWEN2_VL_TEXT,
    "qwen3_vl_text": Family(
        {**QWEN3, "layers": all_layers, "ropes": mrope(500000.0, [24, 20, 20], is_interleaved=True)},
        {**FAMILIES["Qwen3ForCausalLM"].defaults, **QWEN3_VL},
    ),
    "gemma3_text": Family(FAMILIES["Gemma3ForCausalLM"].own, GEMMA3),
}


# Defaults of vision_config by its model_type; and of llava and mistral3 without one.
CLIP = {"hidden_size": 768, "num_hidden_layers": 12, "patch_size": 32, "image_size": 224}
TOWER_DEFAULTS: dict[str, Fields] = {
    "clip_vision_model": CLIP,
    "siglip_vision_model": {**CLIP, "patch_size": 16},
    "pixtral": {"hidden_size": 1024, "num_hidden_layers": 24, "patch_size": 16, "image_size": 1024},
}
IDEFICS3 = {"hidden_size": 1152, "num_hidden_layers": 12, "patch_size": 32, "image_size": 224}
INTERNVL = {"hidden_size": 1024, "num_hidden_layers": 24, "patch_size": 14, "image_size": 448}
LLAVA_TOWER = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "image_size": 336,
}
MISTRAL3_TOWER = {"model_type": "pixtral", "patch_size": 14, "image_size": 1540}


def _tower(file: ConfigFile, defaults: Fields, missing: Fields | None = None) -> ConfigFile:
    """Return the fields of vision_config, or `missing` if there is none."""
    stated = file.get("vision_config", missing or {})
    if not isinstance(stated, dict):
        file.refuse(f"vision_config must be an object, it is {stated!r}")
    return ConfigFile(file.path, stated).with_defaults(defaults)


def _side(tower: ConfigFile, name: str) -> int:
    """Return a size of a square, which may be stored as a pair of equal numbers."""
    sides = tower.get(name)
    sides = list(sides) if isinstance(sides, list | tuple) else [sides]
    if len(set(sides)) != 1 or not isinstance(sides[0], int) or sides[0] < 1:
        tower.refuse(f"{name} of vision_config must be a positive integer or two equal ones, it is {sides}")
    return sides[0]


def _vision(family: VisionFamily, file: ConfigFile, tower: ConfigFile, image_id: int, **more: Any) -> VisionConfig:
    sizes = {
        "hidden_size": tower.positive("hidden_size"),
        "num_layers": tower.positive("depth" if "depth" in tower else "num_hidden_layers"),
        "patch_size": _side(tower, "patch_size"),
    }
    stated = file.get("image_token_id", file.get("image_token_index", image_id))
    return VisionConfig(family=family, image_token_id=int(stated), **{**sizes, **more})


def _llava(file: ConfigFile) -> VisionConfig:
    kind = str(_tower(file, {}, LLAVA_TOWER).get("model_type", "clip_vision_model"))
    if kind not in TOWER_DEFAULTS:
        file.refuse_native(f"the encoder {kind} is none of {', '.join(TOWER_DEFAULTS)}")
    tower = _tower(file, TOWER_DEFAULTS[kind], LLAVA_TOWER)
    if kind == "pixtral":
        return _vision("pixtral", file, tower, 32000)
    return _vision("llava", file, tower, 32000, image_size=_side(tower, "image_size"))


def _mistral3(file: ConfigFile) -> VisionConfig:
    tower, merge = _tower(file, TOWER_DEFAULTS["pixtral"], MISTRAL3_TOWER), int(file.get("spatial_merge_size", 2))
    return _vision("pixtral", file, tower, 10, merge_size=merge)


def _idefics3(file: ConfigFile) -> VisionConfig:
    tower, merge = _tower(file, IDEFICS3), int(file.get("scale_factor", 2))
    return _vision("idefics3", file, tower, 128257, image_size=_side(tower, "image_size"), merge_size=merge)


def _internvl(file: ConfigFile) -> VisionConfig:
    tower, merge = _tower(file, INTERNVL), round(1 / file.number("downsample_ratio", 0.5))
    return _vision("internvl", file, tower, 151667, image_size=_side(tower, "image_size"), merge_size=merge)


def _qwen(family: VisionFamily, **defaults: Any) -> Callable[[ConfigFile], VisionConfig]:
    def rule(file: ConfigFile) -> VisionConfig:
        tower = _tower(file, {"spatial_merge_size": 2, **defaults})
        size = tower.positive("embed_dim" if family == "qwen2_vl" else "hidden_size")
        features = tower.get("deepstack_visual_indexes", ())
        depth, whole = tower.positive("depth"), tower.get("fullatt_block_indexes", range(tower.positive("depth")))
        return _vision(
            family,
            file,
            tower,
            151655,
            hidden_size=size,
            merge_size=tower.positive("spatial_merge_size"),
            num_deepstack=len(features) if family == "qwen3_vl" else 0,
            windowed_layers=tuple(i for i in range(depth) if i not in whole),
        )

    return rule


def _gemma3(file: ConfigFile) -> VisionConfig:
    tower = _tower(file, TOWER_DEFAULTS["siglip_vision_model"])
    image_size, num_embeds = _side(tower, "image_size"), int(file.get("mm_tokens_per_image", 256))
    merge = image_size // _side(tower, "patch_size") // round(num_embeds**0.5)
    return _vision(
        "gemma3", file, tower, 262144, image_size=image_size, merge_size=max(merge, 1), is_bidirectional=True
    )


@dataclass(frozen=True)
class SeeingFamily:
    """A model of a language model and an encoder of images."""

    vision: Callable[[ConfigFile], VisionConfig]
    text_type: str  # of text_config, if it names none
    has_own_text: bool = False  # text_config is always of this type, whatever it names
    is_tied: bool = False  # if the file does not say it
    ties_by_text: bool = False  # tie_word_embeddings of text_config counts, too
    missing_text: Fields = field(default_factory=dict)  # text_config of a file without one


QWEN2_VISION = {"embed_dim": 1280, "hidden_size": 3584, "depth": 32, "patch_size": 14}
QWEN3_VISION = {"hidden_size": 1152, "depth": 27, "patch_size": 16, "deepstack_visual_indexes": [8, 16, 24]}
VISION_FAMILIES: dict[str, SeeingFamily] = {
    "LlavaForConditionalGeneration": SeeingFamily(_llava, "llama", ties_by_text=True),
    "Mistral3ForConditionalGeneration": SeeingFamily(_mistral3, "mistral", is_tied=True, missing_text=MISTRAL_SMALL),
    "Idefics3ForConditionalGeneration": SeeingFamily(_idefics3, "llama", missing_text={"rms_norm_eps": 1e-5}),
    "SmolVLMForConditionalGeneration": SeeingFamily(_idefics3, "llama", missing_text={"rms_norm_eps": 1e-5}),
    "InternVLForConditionalGeneration": SeeingFamily(_internvl, "qwen2", is_tied=True),
    "Qwen2VLForConditionalGeneration": SeeingFamily(
        _qwen("qwen2_vl", **QWEN2_VISION), "qwen2_vl_text", has_own_text=True, ties_by_text=True
    ),
    "Qwen2_5_VLForConditionalGeneration": SeeingFamily(
        _qwen("qwen2_5_vl", **QWEN2_VISION, fullatt_block_indexes=[7, 15, 23, 31]),
        "qwen2_5_vl_text",
        has_own_text=True,
        ties_by_text=True,
    ),
    "Qwen3VLForConditionalGeneration": SeeingFamily(
        _qwen("qwen3_vl", **QWEN3_VISION), "qwen3_vl_text", has_own_text=True
    ),
    "Gemma3ForConditionalGeneration": SeeingFamily(_gemma3, "gemma3_text", has_own_text=True, is_tied=True),
}


def language_model(file: ConfigFile, architecture: str) -> tuple[Family, ConfigFile]:
    """Return family and fields of the language model of an architecture that sees images. The family's rules give
    ModelConfig.vision, too."""
    seeing = VISION_FAMILIES[architecture]
    text = _text_fields(file, seeing)
    kind = seeing.text_type if seeing.has_own_text else str(text.get("model_type", seeing.text_type))
    family = TEXT_FAMILIES.get(kind)
    if family is None:
        file.refuse_native(f"the language model {kind} is none of {', '.join(TEXT_FAMILIES)}")
    is_tied = file.flag("tie_word_embeddings", seeing.is_tied)
    if seeing.ties_by_text:
        is_tied = is_tied or text.flag("tie_word_embeddings")
    rules = {"names": _names(family), "tie_word_embeddings": is_tied, "vision": seeing.vision(file)}
    return replace(family, own={**family.own, **rules}), family.prepare(text)


def _text_fields(file: ConfigFile, seeing: SeeingFamily) -> ConfigFile:
    """Return the fields of text_config, and those of the whole model that hold for its language model. Old files of
    Qwen have no text_config: all fields are on one level."""
    stated = file.get("text_config")
    if stated is None:
        return file.with_defaults(seeing.missing_text)
    if not isinstance(stated, dict):
        file.refuse(f"text_config must be an object, it is {stated!r}")
    inner, whole = ConfigFile(file.path, stated), {}
    for name in ("dtype", "torch_dtype", "quantization_config"):
        whole[name] = file.get(name, inner.get(name))
    whole |= {name: inner.get(name, file.get(name)) for name in ("bos_token_id", "eos_token_id")}
    return ConfigFile(file.path, {**stated, **{name: value for name, value in whole.items() if value is not None}})


def _names(family: Family) -> TensorNames:
    names: TensorNames = family.own.get("names", TensorNames())
    return msgspec.structs.replace(names, roots=ROOTS, ignored=VISION_PREFIXES, prefers_stored_head=True)

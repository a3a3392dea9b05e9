"""Projectors of encoders that take images of any size: Qwen's, and Pixtral's in Pixtral, Mistral 3 and Ministral 3.

What a file does not say is as in the published checkpoints of its family: the bounds of Qwen's images, the windows of
Qwen2.5-VL's layers and the base of Pixtral's rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..metadata import Metadata
from .projector import Fields, Projector, Rule, image_size, image_sizes, inner_size, normalization, num_layers, sizes
from .tile_projectors import activation

QWEN2_PIXELS = (56 * 56, 28 * 28 * 16384)  # least and most of an image
QWEN3_PIXELS = (256 * 256, 4096 * 4096)
WINDOW = 112  # pixels on a side of a window of Qwen2.5-VL's layers
ROTARY_BASE = 10000.0  # of Pixtral's encoder
FRAMES = 2  # of a patch in Qwen's encoders
QWEN_TOKENS: Mapping[str, tuple[str, ...]] = {
    "vision_start_token_id": ("<|vision_start|>",),
    "vision_end_token_id": ("<|vision_end|>",),
    "image_token_id": ("<|image_pad|>",),
    "video_token_id": ("<|video_pad|>",),
}
QWEN2_MODULES = {
    "v.patch_embd": "visual.patch_embed.proj",
    "v.post_ln": "visual.merger.ln_q",
    "mm.0": "visual.merger.mlp.0",
    "mm.2": "visual.merger.mlp.2",
}
QWEN_LAYER = {"ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj"}


def _patches(data: Metadata) -> Fields:
    return {
        "patch_size": data.count("vision.patch_size", least=1),
        "spatial_merge_size": data.count("vision.spatial_merge_size", 2, least=1),
        "temporal_patch_size": FRAMES,
    }


def _qwen2_vl(data: Metadata) -> Fields:
    found = sizes(data, "vision")
    ratio, rest = divmod(inner_size(data, "vision"), found["hidden_size"])
    if rest:
        data.refuse(f"v.blk.0.ffn_up.weight {list(data.shape_of('v.blk.0.ffn_up.weight'))} is no whole ratio of sizes")
    tower = {
        "model_type": "qwen2_vl",
        "depth": found["num_hidden_layers"],
        "embed_dim": found["hidden_size"],
        "hidden_size": data.shape_of("mm.2.weight")[0],
        "num_heads": found["num_attention_heads"],
        "mlp_ratio": ratio,
    }
    return {"vision_config": tower | _patches(data)}


def _qwen(data: Metadata, kind: str) -> Fields:
    """Return the fields of an encoder that Qwen2.5-VL and Qwen3-VL share."""
    found = sizes(data, "vision")
    return {
        "model_type": kind,
        "depth": found["num_hidden_layers"],
        "hidden_size": found["hidden_size"],
        "num_heads": found["num_attention_heads"],
        "intermediate_size": found["intermediate_size"],
        "out_hidden_size": data.shape_of("mm.2.weight")[0],
        **_patches(data),
    }


def _qwen2_5_vl(data: Metadata) -> Fields:
    tower, period = _qwen(data, "qwen2_5_vl"), data.count("vision.n_wa_pattern", least=1)
    tower["fullatt_block_indexes"] = list(range(period - 1, tower["depth"], period))
    tower["window_size"] = data.count("vision.window_size", WINDOW, least=1)
    return {"vision_config": tower}


def _qwen3_vl(data: Metadata) -> Fields:
    tower = _qwen(data, "qwen3_vl")
    tower["num_position_embeddings"] = data.shape_of("v.position_embd.weight")[0]
    tower["deepstack_visual_indexes"] = _deepstack_layers(data)
    return {"vision_config": tower}


def _deepstack_layers(data: Metadata) -> list[int]:
    """Return the layers whose outputs have projectors of their own, to be added in the language model."""
    return [i for i in range(num_layers(data, "vision")) if data.has(f"v.deepstack.{i}.fc1.weight")]


def _deepstack_modules(data: Metadata) -> Mapping[str, str]:
    parts = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
    return {
        f"v.deepstack.{layer}.{theirs}": f"visual.deepstack_merger_list.{place}.{ours}"
        for place, layer in enumerate(_deepstack_layers(data))
        for theirs, ours in parts.items()
    }


def _qwen_processor(least: int, most: int) -> Rule:
    def rule(data: Metadata) -> Fields:
        patches = _patches(data)
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": data.count("vision.image_min_pixels", least, least=1),
            "max_pixels": data.count("vision.image_max_pixels", most, least=1),
            "patch_size": patches["patch_size"],
            "merge_size": patches["spatial_merge_size"],
            "temporal_patch_size": FRAMES,
            **normalization(data),
        }

    return rule


def _pixtral(data: Metadata) -> Fields:
    tower = {
        "model_type": "pixtral",
        **sizes(data, "vision"),
        **image_sizes(data),
        "rope_theta": data.number("vision.rope.freq_base", ROTARY_BASE),
        "hidden_act": activation(data, "silu"),
    }
    return {
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "multimodal_projector_bias": data.has("mm.1.bias"),
        "vision_config": tower,
    }


def _pixtral_alone(data: Metadata) -> Fields:
    return {"vision_feature_select_strategy": "full", **_pixtral(data)}


def _mistral3(data: Metadata) -> Fields:
    return {"spatial_merge_size": data.count("vision.spatial_merge_size", 2, least=1), **_pixtral(data)}


def _pixtral_processor(data: Metadata) -> Fields:
    patch = data.count("vision.patch_size", least=1)
    return {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": patch, "width": patch},
        "size": {"longest_edge": image_size(data)},
        **normalization(data),
    }


QWEN2_VL = Projector(
    "Qwen2VLForConditionalGeneration",
    "qwen2_vl",
    "vision",
    texts={"qwen2vl": "qwen2_vl_text"},
    tokens=QWEN_TOKENS,
    config=_qwen2_vl,
    processor=_qwen_processor(*QWEN2_PIXELS),
    output=("mm.2.weight", 0),
    modules=QWEN2_MODULES,
    layers="visual.blocks.",
    in_layer={**QWEN_LAYER, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
)
QWEN2_5_VL = Projector(
    "Qwen2_5_VLForConditionalGeneration",
    "qwen2_5_vl",
    "vision",
    texts={"qwen2vl": "qwen2_5_vl_text"},
    tokens=QWEN_TOKENS,
    config=_qwen2_5_vl,
    processor=_qwen_processor(*QWEN2_PIXELS),
    output=("mm.2.weight", 0),
    modules=QWEN2_MODULES,
    layers="visual.blocks.",
    in_layer={**QWEN_LAYER, "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
)
QWEN3_VL = Projector(
    "Qwen3VLForConditionalGeneration",
    "qwen3_vl",
    "vision",
    texts={"qwen3vl": "qwen3_vl_text"},
    tokens=QWEN_TOKENS,
    config=_qwen3_vl,
    processor=_qwen_processor(*QWEN3_PIXELS),
    output=("mm.2.weight", 0),
    modules={
        "v.patch_embd": "visual.patch_embed.proj",
        "v.position_embd": "visual.pos_embed",
        "v.post_ln": "visual.merger.norm",
        "mm.0": "visual.merger.linear_fc1",
        "mm.2": "visual.merger.linear_fc2",
    },
    layers="visual.blocks.",
    in_layer={**QWEN_LAYER, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
    more_modules=_deepstack_modules,
)
PIXTRAL_MODULES = {
    "v.patch_embd": "vision_tower.patch_conv",
    "v.pre_ln": "vision_tower.ln_pre",
    "mm.1": "multi_modal_projector.linear_1",
    "mm.2": "multi_modal_projector.linear_2",
}
PIXTRAL = Projector(
    "LlavaForConditionalGeneration",
    "llava",
    "vision",
    texts={"llama": "llama"},
    tokens={"image_token_index": ("[IMG]",)},
    config=_pixtral_alone,
    processor=_pixtral_processor,
    output=("mm.2.weight", 0),
    modules=PIXTRAL_MODULES,
    layers="vision_tower.transformer.layers.",
    in_layer={
        "ln1": "attention_norm",
        "ln2": "ffn_norm",
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_out": "attention.o_proj",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    unused=("v.token_embd.img_break",),  # a row of the language model's embedding
    is_rotated=True,
)
MISTRAL3 = replace(
    PIXTRAL,
    architecture="Mistral3ForConditionalGeneration",
    model_type="mistral3",
    texts={"llama": "llama", "mistral3": "ministral3"},
    config=_mistral3,
    modules={
        **PIXTRAL_MODULES,
        "mm.input_norm": "multi_modal_projector.norm",
        "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
    },
)

"""Projectors of encoders that take images of one size: Gemma 3, Idefics3 with SmolVLM, InternVL, and LLaVA 1.5."""

from __future__ import annotations

from .....ipc.spec.models.config_file import is_whole
from ..metadata import Metadata
from .projector import Fields, Projector, epsilon, image_size, image_sizes, normalization, num_layers, sizes, square

CLIP_LAYER = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
INTERNVL_LAYER = {
    "ln1": "layernorm_before",
    "ln2": "layernorm_after",
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "attn_out": "attention.projection_layer",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
    "ls1.weight": "lambda_1",
    "ls2.weight": "lambda_2",
}


def _gemma3(data: Metadata) -> Fields:
    tower = {**sizes(data, "vision"), **image_sizes(data), "layer_norm_eps": epsilon(data, 1e-6)}
    side = tower["image_size"] // tower["patch_size"] // data.count("vision.projector.scale_factor", 4, least=1)
    tower |= {"model_type": "siglip_vision_model", "vision_use_head": False}
    return {"mm_tokens_per_image": side * side, "vision_config": tower}


def _gemma3_processor(data: Metadata) -> Fields:
    return {"image_processor_type": "Gemma3ImageProcessor", "size": square(data), **normalization(data)}


def _idefics3(data: Metadata) -> Fields:
    # Converters write an epsilon of 1e-5 for the published models, which name none and have that of their class.
    tower = {"model_type": "idefics3_vision", **sizes(data, "vision"), **image_sizes(data)}
    return {"scale_factor": data.count("vision.projector.scale_factor", 2, least=1), "vision_config": tower}


def _idefics3_processor(data: Metadata) -> Fields:
    size = image_size(data)
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": True,
        "max_image_size": {"longest_edge": size},
        "size": {"longest_edge": data.count("vision.preproc_image_size", 4 * size, least=1)},
        **normalization(data),
    }


def _internvl(data: Metadata) -> Fields:
    has_bias = data.has("v.blk.0.attn_q.bias") or data.has("v.blk.0.attn_qkv.bias")
    sides = {name: [side, side] for name, side in image_sizes(data).items()}
    tower = {
        "model_type": "internvl_vision",
        **sizes(data, "vision"),
        **sides,
        "attention_bias": has_bias,
        "norm_type": "layer_norm" if data.has("v.blk.0.ln1.bias") else "rms_norm",
        "use_qk_norm": data.has("v.blk.0.attn_q_norm.weight"),
        "layer_norm_eps": epsilon(data, 1e-6),
        "hidden_act": activation(data, "gelu"),
    }
    factor = data.count("vision.projector.scale_factor", 2, least=1)
    return {
        "downsample_ratio": 1 / factor,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "vision_config": tower,
    }


def _internvl_processor(data: Metadata) -> Fields:
    return {
        "image_processor_type": "GotOcr2ImageProcessor",
        "crop_to_patches": True,
        "min_patches": data.count("vision.preproc_min_tiles", 1, least=1),
        "max_patches": data.count("vision.preproc_max_tiles", 12, least=1),
        "size": square(data),
        **normalization(data),
    }


def _llava(data: Metadata) -> Fields:
    """Return the fields of LLaVA 1.5. Its converter leaves out layers of the encoder behind the last one that the
    projector takes; a list `feature_layer` names several."""
    has_class = data.has("v.class_embd")
    tower = {
        "model_type": "clip_vision_model" if has_class else "siglip_vision_model",
        **sizes(data, "vision"),
        **image_sizes(data),
        "layer_norm_eps": epsilon(data, 1e-5),
        "hidden_act": activation(data, "quick_gelu"),
    }
    tower |= {} if has_class else {"vision_use_head": False}
    return {
        "projector_hidden_act": "gelu",
        "vision_feature_layer": _feature_layers(data),
        "vision_feature_select_strategy": "default" if has_class else "full",
        "vision_config": tower,
    }


def _feature_layers(data: Metadata) -> list[int] | int:
    """Return the numbers of the layers whose outputs the projector takes side by side; -1: the last one's."""
    found, last = data.whole("vision.feature_layer"), num_layers(data, "vision")
    if found is None:
        return -1
    if not isinstance(found, list) or not all(is_whole(each) and 0 <= each <= last for each in found) or not found:
        data.refuse(f"clip.vision.feature_layer must be numbers of layers up to {last}, it is {found!r:.100}")
    return found


def _llava_processor(data: Metadata) -> Fields:
    size = image_size(data)
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_center_crop": True,
        "crop_size": square(data),
        "size": {"shortest_edge": size},
        **normalization(data),
    }


def activation(data: Metadata, default: str) -> str:
    """Return the activation of feed-forward blocks that a file names, in transformers' words."""
    named = (name for name in ("gelu", "silu") if data.get(f"use_{name}") is True)
    return next(named, default)


GEMMA3 = Projector(
    "Gemma3ForConditionalGeneration",
    "gemma3",
    "vision",
    texts={"gemma3": "gemma3_text"},
    tokens={
        "image_token_index": ("<image_soft_token>", "<unused99>"),  # some vocabularies leave out the former
        "boi_token_index": ("<start_of_image>",),
        "eoi_token_index": ("<end_of_image>",),
    },
    config=_gemma3,
    processor=_gemma3_processor,
    output=("mm.input_projection.weight", 1),
    modules={
        "v.patch_embd": "vision_tower.embeddings.patch_embedding",
        "v.position_embd": "vision_tower.embeddings.position_embedding",
        "v.post_ln": "vision_tower.post_layernorm",
        "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
        "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    },
    layers="vision_tower.encoder.layers.",
    in_layer=CLIP_LAYER,
    added={"mm.soft_emb_norm.weight": -1.0},
)
IDEFICS3 = Projector(
    "Idefics3ForConditionalGeneration",
    "idefics3",
    "vision",
    texts={"llama": "llama"},
    tokens={"image_token_id": ("<image>",)},
    config=_idefics3,
    processor=_idefics3_processor,
    output=("mm.model.fc.weight", 0),
    modules={
        "v.patch_embd": "vision_model.embeddings.patch_embedding",
        "v.position_embd": "vision_model.embeddings.position_embedding",
        "v.post_ln": "vision_model.post_layernorm",
        "mm.model.fc": "connector.modality_projection.proj",
    },
    layers="vision_model.encoder.layers.",
    in_layer=CLIP_LAYER,
)
INTERNVL = Projector(
    "InternVLForConditionalGeneration",
    "internvl",
    "vision",
    texts={"qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama"},
    tokens={"image_token_id": ("<IMG_CONTEXT>",)},
    config=_internvl,
    processor=_internvl_processor,
    output=("mm.model.mlp.3.weight", 0),
    modules={
        "v.class_embd": "vision_tower.embeddings.cls_token",
        "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
        "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
        "mm.model.mlp.0": "multi_modal_projector.layer_norm",
        "mm.model.mlp.1": "multi_modal_projector.linear_1",
        "mm.model.mlp.3": "multi_modal_projector.linear_2",
    },
    layers="vision_tower.encoder.layer.",
    in_layer=INTERNVL_LAYER,
    optional=("attn_q_norm", "attn_k_norm"),
)
LLAVA = Projector(
    "LlavaForConditionalGeneration",
    "llava",
    "vision",
    texts={"llama": "llama", "qwen2": "qwen2", "phi3": "phi3", "gemma": "gemma"},
    tokens={"image_token_index": ("<image>", "<unk>")},  # the vocabulary of the first models has no token for images
    config=_llava,
    processor=_llava_processor,
    output=("mm.2.weight", 0),
    modules={
        "v.class_embd": "vision_tower.embeddings.class_embedding",
        "v.patch_embd": "vision_tower.embeddings.patch_embedding",
        "v.position_embd": "vision_tower.embeddings.position_embedding",
        "v.pre_ln": "vision_tower.pre_layrnorm",
        "mm.0": "multi_modal_projector.linear_1",
        "mm.2": "multi_modal_projector.linear_2",
    },
    layers="vision_tower.encoder.layers.",
    in_layer=CLIP_LAYER,
    optional=("v.class_embd", "v.pre_ln"),  # SigLIP has neither
    unused=("v.post_ln.",),  # behind the layer that the projector takes
)

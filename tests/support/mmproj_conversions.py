"""Writes a checkpoint that takes media as two GGUF files, as llama.cpp's converters do: the language model and mmproj.

    from tokenloom.tests.support.mmproj_conversions import convert_media
    convert_media(folder, tmp_path / "model.gguf", tmp_path / "mmproj-F32.gguf")

Keys, names and layouts are facts of conversion/ in ggml-org/llama.cpp and, for LLaVA 1.5, of
convert_image_encoder_to_gguf.py; gguf-py knows most names. The vocabulary is that of the folder's tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file, save_file

from tokenloom.scripts.bench.inputs.write_gguf import read_tensors, rotated_pairs

from .families import Config
from .gguf_conversions import CONVERSIONS, Tensors, convert

TEXT_CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ENCODERS = ("vision_tower.", "multi_modal_projector.", "visual.", "vision_model.", "connector.", "audio_tower.")
F32_ALONE = (".position_embd.", ".patch_embd.", ".patch_merger.")  # matrices that the converter does not shorten
Write = Callable[[Any, Config, Config], None]  # writer, config.json, preprocessor_config.json
Changed = Callable[[Config, str, Any], Tensors]  # config.json, name, elements → names that gguf-py knows, elements


def convert_media(folder: Path, model: Path, mmproj: Path, form: str = "F32") -> None:
    """Write the checkpoint in `folder` as the language model `model`, of float32, and `mmproj`, with most matrices in
    `form`."""
    convert_text(folder, model)
    convert_mmproj(folder, mmproj, form)


def convert_text(folder: Path, model: Path) -> None:
    """Write the language model of the checkpoint in `folder`, with the vocabulary of its tokenizer."""
    config = _read(folder / "config.json")
    if config["architectures"][0] in CONVERSIONS:
        convert(folder, model, pre="gpt-2")
        return
    own = model.with_name(f"{model.stem}-text")
    own.mkdir()
    text = {**config["text_config"], "architectures": [TEXT_CLASSES[config["text_config"]["model_type"]]]}
    if "multi" not in text:
        text["bos_token_id"], text["eos_token_id"] = config["bos_token_id"], config["eos_token_id"]
    (own / "config.json").write_text(json.dumps(text), encoding="utf-8")
    tensors = {
        _text_name(name): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not name.removeprefix("model.").startswith(ENCODERS)
    }
    save_file(tensors, own / "model.safetensors")
    for file in folder.glob("*token*"):
        (own / file.name).write_bytes(file.read_bytes())
    (own / "chat_template.jinja").write_bytes((folder / "chat_template.jinja").read_bytes())
    convert(own, model, pre="gpt-2")


def _text_name(name: str) -> str:
    """Return the name of a language model's tensor in a checkpoint of its own."""
    for root in ("language_model.", "model.language_model.", "model.text_model."):
        if name.startswith(root):
            inner = name.removeprefix(root)
            return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"
    return name


def convert_mmproj(folder: Path, file: Path, form: str = "F32", *, as_floats: bool = False) -> None:
    """Write the encoder of the checkpoint in `folder`. `as_floats`: in float32, with the elements that gguf-py reads in
    matrices of `form`."""
    config, processor = _read(folder / "config.json"), _read(folder / "preprocessor_config.json")
    write, changed = MMPROJS[config["architectures"][0]]
    writer = gguf.GGUFWriter(file, "clip")
    write(writer, config, processor)
    for name, values in mmproj_tensors(folder, changed):
        data, kind = stored(name, values, form)
        if as_floats:
            data = gguf.quants.dequantize(data, kind).reshape(values.shape)
            kind = gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def mmproj_tensors(folder: Path, changed: Changed) -> Iterator[tuple[str, Any]]:
    """Yield the names and elements of the encoder's tensors as a file has them."""
    config = _read(folder / "config.json")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 16)
    for stored_name, values in read_tensors(folder):
        if not stored_name.removeprefix("model.").startswith(ENCODERS):
            continue
        for name, elements in changed(config, stored_name, values):
            known = name if name.startswith(("v.", "a.", "mm.")) else names.get_name(name, (".weight", ".bias"))
            if known is None:
                raise ValueError(f"{folder}: gguf has no name for {name}")
            yield known, np.ascontiguousarray(elements)


def stored(name: str, values: Any, form: str) -> tuple[Any, Any]:
    """Return the bytes of a tensor in a form, and the form's type: vectors and some matrices are float32."""
    is_float = values.ndim < 2 or any(part in name for part in F32_ALONE) or name.endswith(".bias")
    if "conv1d" in name and not is_float:
        form = "F16" if form == "Q8_0" else form
    chosen = gguf.GGMLQuantizationType["F32" if is_float else form]
    if values.shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0]:
        chosen = gguf.GGMLQuantizationType.F16
    return gguf.quants.quantize(values, chosen), chosen


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_vision(writer: Any, config: Config, processor: Config, kind: str, **renamed: str) -> Config:
    """Write the keys of all encoders of images and return the encoder's config. `renamed`: its fields' names."""
    tower, text = config["vision_config"], config.get("text_config", config)
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(kind)
    writer.add_vision_projection_dim(text["hidden_size"])
    side = tower.get("image_size", 560)
    patch = tower["patch_size"]
    writer.add_vision_image_size(side[0] if isinstance(side, list) else side)
    writer.add_vision_patch_size(patch[0] if isinstance(patch, list) else patch)
    writer.add_vision_embedding_length(tower[renamed.get("hidden_size", "hidden_size")])
    writer.add_vision_feed_forward_length(tower[renamed.get("intermediate_size", "intermediate_size")])
    writer.add_vision_block_count(tower[renamed.get("num_hidden_layers", "num_hidden_layers")])
    writer.add_vision_head_count(tower[renamed.get("num_heads", "num_attention_heads")])
    writer.add_vision_image_mean(processor["image_mean"])
    writer.add_vision_image_std(processor["image_std"])
    found: Config = tower
    return found


def write_gemma3(writer: Any, config: Config, processor: Config) -> None:
    tower = write_vision(writer, config, processor, "gemma3")
    writer.add_vision_attention_layernorm_eps(tower.get("layer_norm_eps", 1e-6))
    writer.add_vision_use_gelu(True)
    factor = tower["image_size"] // tower["patch_size"] // int(processor["image_seq_length"] ** 0.5)
    if factor != 4:
        writer.add_vision_projector_scale_factor(factor)


def write_idefics3(writer: Any, config: Config, processor: Config) -> None:
    tower = write_vision(writer, config, processor, "idefics3")
    writer.add_vision_attention_layernorm_eps(tower.get("layer_norm_eps", 1e-5))
    writer.add_vision_projector_scale_factor(config["scale_factor"])
    writer.add_vision_use_gelu(True)
    writer.add_vision_preproc_image_size(processor["size"]["longest_edge"])


def write_internvl(writer: Any, config: Config, processor: Config) -> None:
    tower = write_vision(writer, config, processor, "internvl")
    writer.add_vision_attention_layernorm_eps(tower.get("layer_norm_eps", 1e-6))
    writer.add_vision_use_gelu(True)
    writer.add_vision_projector_scale_factor(int(1 / config["downsample_ratio"]))
    writer.add_vision_preproc_min_tiles(processor["min_patches"])
    writer.add_vision_preproc_max_tiles(processor["max_patches"])


def write_pixtral(writer: Any, config: Config, processor: Config) -> None:
    write_vision(writer, config, processor, "pixtral")
    writer.add_vision_attention_layernorm_eps(1e-5)
    writer.add_vision_use_silu(True)
    if "spatial_merge_size" in config:
        writer.add_vision_spatial_merge_size(config["spatial_merge_size"])


def num_llava_layers(config: Config) -> int:
    """Return the number of layers of LLaVA's encoder that a file has."""
    chosen = config["vision_feature_layer"]
    return max(chosen) if isinstance(chosen, list) else int(config["vision_config"]["num_hidden_layers"]) - 1


def write_llava(writer: Any, config: Config, processor: Config) -> None:
    """Write the keys of the first converter, which leaves out the layers behind those that the projector takes."""
    tower = config["vision_config"]
    if tower["model_type"] == "pixtral":
        write_pixtral(writer, config, processor)
        return
    shortened = {**config, "vision_config": {**tower, "num_hidden_layers": num_llava_layers(config)}}
    if isinstance(config["vision_feature_layer"], list):
        writer.add_array("clip.vision.feature_layer", config["vision_feature_layer"])
    write_vision(writer, shortened, processor, "mlp")
    writer.add_bool("clip.has_llava_projector", True)
    writer.add_bool("clip.use_gelu", tower["hidden_act"] == "gelu")
    writer.add_vision_attention_layernorm_eps(tower.get("layer_norm_eps", 1e-5))


def write_qwen2_vl(writer: Any, config: Config, processor: Config) -> None:
    """Write the keys of Qwen2-VL; its feed_forward_length is the language model's size."""
    names = {"hidden_size": "embed_dim", "intermediate_size": "hidden_size"}
    write_vision(writer, config, processor, "qwen2vl_merger", num_hidden_layers="depth", num_heads="num_heads", **names)
    writer.add_vision_attention_layernorm_eps(config["rms_norm_eps"])


def write_qwen2_5_vl(writer: Any, config: Config, processor: Config) -> None:
    tower = write_vision(
        writer, config, processor, "qwen2.5vl_merger", num_hidden_layers="depth", num_heads="num_heads"
    )
    writer.add_vision_use_silu(True)
    writer.add_vision_n_wa_pattern(tower["fullatt_block_indexes"][0] + 1)
    writer.add_vision_attention_layernorm_eps(config["rms_norm_eps"])
    if tower["window_size"] != 112:
        writer.add_uint32(gguf.Keys.ClipVision.WINDOW_SIZE, tower["window_size"])


def write_qwen3_vl(writer: Any, config: Config, processor: Config) -> None:
    tower = config["vision_config"]
    side = int(tower["num_position_embeddings"] ** 0.5 * tower["patch_size"])
    sized = {**config, "vision_config": {**tower, "image_size": side}}
    write_vision(writer, sized, processor, "qwen3vl_merger", num_hidden_layers="depth", num_heads="num_heads")
    writer.add_vision_use_gelu(True)
    writer.add_vision_spatial_merge_size(tower["spatial_merge_size"])
    writer.add_vision_attention_layernorm_eps(config["text_config"]["rms_norm_eps"])
    writer.add_vision_is_deepstack_layers([i in tower["deepstack_visual_indexes"] for i in range(tower["depth"])])


def write_audio(writer: Any, config: Config, processor: Config, kind: str) -> Config:
    tower: Config = config["audio_config"]
    names = {"hidden_size": "d_model", "num_hidden_layers": "encoder_layers", "intermediate_size": "encoder_ffn_dim"}
    sizes = {ours: tower.get(ours, tower.get(theirs)) for ours, theirs in names.items()}
    heads = tower.get("num_attention_heads", tower.get("encoder_attention_heads"))
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_audio_encoder(True)
    writer.add_clip_projector_type(kind)
    writer.add_audio_projection_dim(config["text_config"]["hidden_size"])
    writer.add_audio_embedding_length(sizes["hidden_size"])
    writer.add_audio_feed_forward_length(sizes["intermediate_size"])
    writer.add_audio_block_count(sizes["num_hidden_layers"])
    writer.add_audio_head_count(heads)
    writer.add_audio_num_mel_bins(processor["feature_size"])
    writer.add_audio_attention_layernorm_eps(1e-5)
    return tower


def write_voxtral(writer: Any, config: Config, processor: Config) -> None:
    write_audio(writer, config, processor, "voxtral")
    writer.add_audio_stack_factor(4)


def write_qwen2_audio(writer: Any, config: Config, processor: Config) -> None:
    write_audio(writer, config, processor, "qwen2a")


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def of_gemma3(config: Config, name: str, values: Any) -> Tensors:
    name = name.replace("_weight", ".weight")
    yield name, values + 1 if "soft_emb_norm" in name else values


def as_named(config: Config, name: str, values: Any) -> Tensors:
    yield name, values


def of_internvl(config: Config, name: str, values: Any) -> Tensors:
    name = name if name.startswith("model.") else f"model.{name}"
    parts = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}
    for theirs, ours in parts.items():
        name = name.replace(f"model.multi_modal_projector.{theirs}", ours)
    has_no_kind = ".lambda_" in name or "position_embedding" in name
    yield f"{name}.weight" if has_no_kind and not name.endswith(".weight") else name, values


def of_llava(config: Config, name: str, values: Any) -> Tensors:
    """Yield tensors by the first converter's names: the two matrices of a block the other way round, and none of the
    last layer. Pixtral's queries and keys are in rotated pairs."""
    tower = config["vision_config"]
    if tower["model_type"] == "pixtral":
        is_rotated = name.split(".")[-2] in ("q_proj", "k_proj")
        yield name, rotated_pairs(values, tower["num_attention_heads"]) if is_rotated else values
        return
    if ".layers." in name and int(name.split(".layers.")[1].split(".")[0]) >= num_llava_layers(config):
        return
    kind = name.rpartition(".")[2]
    if "multi_modal_projector" in name:
        yield f"mm.{0 if 'linear_1' in name else 2}.{kind}", values
    elif ".mlp." in name:
        layer, module = name.split(".layers.")[1].split(".")[0], "ffn_down" if ".fc1." in name else "ffn_up"
        yield f"v.blk.{layer}.{module}.{kind}", values
    else:
        yield name, values


def of_qwen2(config: Config, name: str, values: Any) -> Tensors:
    if ".qkv." in name:
        for part, rows in zip("qkv", np.split(values, 3), strict=True):
            yield name.replace("qkv", part), rows
    else:
        yield from frames(config, name, values)


def of_qwen3(config: Config, name: str, values: Any) -> Tensors:
    name = name.removeprefix("model.")
    kind = name.rpartition(".")[2]
    if name.startswith("visual.deepstack_merger_list."):
        place, module, _ = name.split(".")[2:]
        layer = config["vision_config"]["deepstack_visual_indexes"][int(place)]
        yield f"v.deepstack.{layer}.{module.replace('linear_', '')}.{kind}", values
    elif name.startswith("visual.merger."):
        modules = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
        yield f"{modules[name.split('.')[2]]}.{kind}", values
    else:
        yield from frames(config, name, values)


def frames(config: Config, name: str, values: Any) -> Tensors:
    """Yield the two frames of a convolution over time as two convolutions."""
    if name.endswith("patch_embed.proj.weight"):
        yield "v.patch_embd.weight", values[:, :, 0]
        yield "v.patch_embd.weight.1", values[:, :, 1]
    else:
        yield name, values


def of_audio(config: Config, name: str, values: Any) -> Tensors:
    name = f"audio.{name}" if name.startswith("multi_modal_projector") else name
    yield name, values[:, None] if "conv" in name and name.endswith(".bias") else values


MMPROJS: dict[str, tuple[Write, Changed]] = {
    "Gemma3ForConditionalGeneration": (write_gemma3, of_gemma3),
    "Idefics3ForConditionalGeneration": (write_idefics3, as_named),
    "InternVLForConditionalGeneration": (write_internvl, of_internvl),
    "LlavaForConditionalGeneration": (write_llava, of_llava),
    "Mistral3ForConditionalGeneration": (write_pixtral, of_llava),
    "Qwen2VLForConditionalGeneration": (write_qwen2_vl, of_qwen2),
    "Qwen2_5_VLForConditionalGeneration": (write_qwen2_5_vl, of_qwen2),
    "Qwen3VLForConditionalGeneration": (write_qwen3_vl, of_qwen3),
    "SmolVLMForConditionalGeneration": (write_idefics3, as_named),
    "VoxtralForConditionalGeneration": (write_voxtral, of_audio),
    "Qwen2AudioForConditionalGeneration": (write_qwen2_audio, of_audio),
}


def _read(file: Path) -> Config:
    value: Config = json.loads(file.read_text(encoding="utf-8"))
    return value

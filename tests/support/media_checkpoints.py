"""Writes tiny random-weight checkpoints of models that take media, with tokenizer, chat template and preprocessor.

`vision_checkpoints.py` and `audio_checkpoints.py` write those of each kind. Weights are scaled so that other media give
other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .family_checkpoints import BIAS_SPREAD, SPREAD
from .vision_configs import Config, MediaModel, with_ids

DEMO = Path(__file__).resolve().parents[2] / "demo"
BOS_ID, EOS_ID, END_ID, PAD_ID = 0, 1, 2, 3  # of the demo's tokenizer
# With equal gains the last token alone decides the next one. Here the context does, and with it the media.
GAINS = {
    "embed_tokens": 0.7,
    "lm_head": 3.0,
    "o_proj": 3.0,
    "down_proj": 2.0,
    "q_proj": 1.5,
    "audio_tower.conv": 4.0,
}
POSITIONS = ("embed_positions", "position_embed", "cls_token", "class_embed", "pos_embed")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'audio') %}{{ 'MEDIUM' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def write_media_checkpoint(
    folder: Path,
    model: MediaModel,
    marker: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **text_fields: Any,
) -> Path:
    """Write the checkpoint that `model` describes and return its folder. marker: the text of a medium in a prompt,
    before the expansion. `text_fields` replace fields of the language model."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_media_tokenizer(folder, model, marker)
    config = with_ids(model.config, tokenizer.get_added_vocab())
    text = config.get("text_config", config)
    text |= {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, **text_fields}
    config |= {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "dtype": str(dtype).removeprefix("torch.")}
    write_json(folder / "config.json", config)
    loaded = transformers.AutoConfig.from_pretrained(folder)
    network = getattr(transformers, config["architectures"][0])(loaded)
    randomize(network, seed)
    network.to(dtype).save_pretrained(folder)
    _use_published_names(folder / "model.safetensors")
    write_json(folder / "config.json", config)  # transformers has rewritten it in its own spelling
    write_json(folder / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    if model.preprocessor:
        write_json(folder / "preprocessor_config.json", model.preprocessor)
    write_json(folder / "processor_config.json", model.processor)
    return folder


def write_media_tokenizer(folder: Path, model: MediaModel, marker: str) -> Any:
    """Write the demo's tokenizer with the model's marker tokens and a chat template; return it."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(DEMO / "tokenizer.json"),
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        extra_special_tokens=dict(model.markers),
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", *model.other_markers]})
    template = CHAT_TEMPLATE.replace("MEDIUM", marker)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return tokenizer


def _use_published_names(file: Path) -> None:
    """Rename tensors of CLIP and SigLIP towers as published files name them, which transformers 5 does not."""
    tensors = load_file(file)
    if not any(name.startswith("vision_tower.encoder.layers.") for name in tensors):
        return
    before, after = "vision_tower.", "vision_tower.vision_model."
    renamed = {name.replace(before, after) if name.startswith(before) else name: tensors[name] for name in tensors}
    save_file(renamed, file, metadata={"format": "pt"})


def write_json(file: Path, value: Config) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int, gains: Mapping[str, float] = GAINS) -> None:
    """Fill every stored tensor with noise: matrices and convolutions keep the scale of their inputs, vectors vary
    around the value that they were initialized with. gains: of matrices and positions, by a part of their names."""
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    for name, tensor in sorted(model.state_dict().items(), key=lambda item: "lm_head" in item[0]):
        if tensor.data_ptr() in seen:  # a head that is tied to the embedding
            continue
        seen.add(tensor.data_ptr())
        noise = torch.randn(tensor.shape, generator=generator)
        is_position = any(part in name for part in POSITIONS)
        gain = next((each for part, each in gains.items() if part in name), 0.3 if is_position else 1.0)
        if not tensor.is_floating_point() or name.endswith("inv_freq"):
            continue
        if "bias" in name:
            tensor.copy_(BIAS_SPREAD * noise)
        elif "lambda_" in name:  # InternVL's scales of layers begin at 0.1, at which layers hardly matter
            tensor.copy_(1 + SPREAD * noise)
        elif is_position:
            tensor.copy_(gain * noise)
        elif tensor.ndim < 2:
            tensor.copy_(tensor.mean() + SPREAD * noise)
        else:
            tensor.copy_(noise * gain / (tensor.numel() / tensor.shape[0]) ** 0.5)

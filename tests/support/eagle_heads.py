"""EAGLE-3 heads in plain torch, the oracle of ours, and their checkpoints in both published forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

EPS, THETA = 1e-5, 300.0
NUM_HEADS, NUM_KV_HEADS = 4, 2


def random_head(
    hidden_size: int, vocab_size: int, num_guessed: int, seed: int, own_embedding: bool
) -> dict[str, Tensor]:
    """Return random tensors of a head that reads three states and guesses some tokens, by SpecForge's names."""
    generator = torch.Generator().manual_seed(seed)
    inner, head_dim = 2 * hidden_size, hidden_size // NUM_HEADS
    shapes = {
        "fc": (hidden_size, 3 * hidden_size),
        "midlayer.self_attn.q_proj": (NUM_HEADS * head_dim, 2 * hidden_size),
        "midlayer.self_attn.k_proj": (NUM_KV_HEADS * head_dim, 2 * hidden_size),
        "midlayer.self_attn.v_proj": (NUM_KV_HEADS * head_dim, 2 * hidden_size),
        "midlayer.self_attn.o_proj": (hidden_size, NUM_HEADS * head_dim),
        "midlayer.mlp.gate_proj": (inner, hidden_size),
        "midlayer.mlp.up_proj": (inner, hidden_size),
        "midlayer.mlp.down_proj": (hidden_size, inner),
        "lm_head": (num_guessed, hidden_size),
    }
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in shapes.items()
    }
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(hidden_size, generator=generator)
    if own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(vocab_size, hidden_size, generator=generator)
    if num_guessed < vocab_size:
        guessed = torch.randperm(vocab_size, generator=generator)[:num_guessed].sort().values
        tensors["d2t"] = guessed - torch.arange(num_guessed)
        tensors["t2d"] = torch.isin(torch.arange(vocab_size), guessed)
    return tensors


def write_head(
    folder: Path, tensors: dict[str, Tensor], vocab_size: int, depths: list[int], form: str = "specforge", **more: Any
) -> Path:
    """Write a head's checkpoint as SpecForge or as speculators do. depths: layers that each state has passed."""
    folder.mkdir(parents=True)
    hidden_size, num_guessed = len(tensors["norm.weight"]), len(tensors["lm_head.weight"])
    layer = {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": len(tensors["midlayer.mlp.gate_proj.weight"]),
        "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": hidden_size // NUM_HEADS,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 32,  # of texts that the head was trained on: no limit
        "vocab_size": vocab_size,
        "hidden_act": "silu",
    }
    if form == "specforge":
        ids = {"eagle_aux_hidden_state_layer_ids": [depth - 1 for depth in depths]}
        config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, "eagle_config": ids}
    else:
        config = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "eagle_aux_hidden_state_layer_ids": depths,
        }
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    (folder / "config.json").write_text(json.dumps({**config, "draft_vocab_size": num_guessed, **more}))
    save_file({name: each.detach().contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


def plain_pass(
    tensors: dict[str, Tensor], states: Tensor, embedded: Tensor, *, is_residual_normed: bool = False, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute a head on the fused states [..., T, hidden] of tokens from position `first` on, and the embeddings of the
    tokens behind them. Return the states that follow, and logits [..., T, guessed tokens]."""
    normed = _norm(tensors, "midlayer.hidden_norm", states)
    residual = normed if is_residual_normed else states
    both = torch.cat((_norm(tensors, "midlayer.input_layernorm", embedded), normed), dim=-1)
    query, key, value = (_heads(both @ tensors[f"midlayer.self_attn.{part}_proj.weight"].T, part) for part in "qkv")
    count, dim = query.shape[-2:]
    angles = torch.arange(first, first + count)[:, None] / THETA ** (torch.arange(0, dim, 2) / dim)
    query, key = _rotate(query, angles), _rotate(key, angles)
    group = NUM_HEADS // NUM_KV_HEADS
    attended = functional.scaled_dot_product_attention(
        query, key.repeat_interleave(group, -3), value.repeat_interleave(group, -3), is_causal=True
    )
    residual = residual + attended.transpose(-3, -2).flatten(-2) @ tensors["midlayer.self_attn.o_proj.weight"].T
    x = _norm(tensors, "midlayer.post_attention_layernorm", residual)
    gate, up, down = (tensors[f"midlayer.mlp.{part}_proj.weight"].T for part in ("gate", "up", "down"))
    residual = residual + (functional.silu(x @ gate) * (x @ up)) @ down
    return residual, _norm(tensors, "norm", residual) @ tensors["lm_head.weight"].T


def _norm(tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], EPS)


def _heads(x: Tensor, part: str) -> Tensor:
    return x.unflatten(-1, (NUM_HEADS if part == "q" else NUM_KV_HEADS, -1)).transpose(-3, -2)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def trained_head(folder: Path, target: Path, depths: list[int], num_guessed: int, num_steps: int = 80) -> Path:
    """Write a head that often guesses the greedy tokens of a Llama model, after seconds of training on random texts."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load(target, dtype=torch.float32).eval()
    table = model.get_input_embeddings().weight.detach()
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(256, (24, 12), generator=generator)
    found: dict[int, Tensor] = {}
    parts = [*model.model.layers, model.model.norm]
    for depth in depths:
        parts[depth].register_forward_pre_hook(lambda _, args, depth=depth: found.__setitem__(depth, args[0].detach()))
    with torch.inference_mode():
        for _ in range(16):
            texts = torch.cat((texts, model(texts).logits[:, -1:].argmax(-1)), dim=1)
        right = model(texts).logits.argmax(-1)
    states = torch.cat([found[depth].clone() for depth in depths], dim=-1)[:, :-1].clone()
    tensors = random_head(table.shape[1], len(table), num_guessed, seed=2, own_embedding=False)
    parameters = [each.requires_grad_() for each in tensors.values() if each.is_floating_point()]
    if "d2t" in tensors:
        mapped = torch.full((len(table),), -100)
        mapped[tensors["d2t"] + torch.arange(num_guessed)] = torch.arange(num_guessed)
        right = mapped[right]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    for _ in range(num_steps):
        _, logits = plain_pass(tensors, states @ tensors["fc.weight"].T, table[texts[:, 1:]])
        loss = functional.cross_entropy(logits.flatten(0, 1), right[:, 1:].flatten().clone(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return write_head(folder, tensors, len(table), depths, form="speculators")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")

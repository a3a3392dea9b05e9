"""DraftHead: the layer of an EAGLE-3 head in plain torch, and its files.

    fc(aux states of token p) ‖ embedding of token p + 1 → attention → MLP → norm → lm_head → guess of token p + 2

Its parameters have the names of the public form, so its state_dict is the file: `fc`, `midlayer.*`, `norm` and
`lm_head`, beside `d2t` (the token of draft id i is i + d2t[i]) and `t2d` (whether a token has a draft id). Later
guesses take the head's own state, before `norm`, in place of fc's: `step` computes the guess of all places of a text
at once, as the training-time test of EAGLE-3 (arXiv 2503.01840) needs it.

Knows nothing of data and losses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

ARCHITECTURE = "LlamaForCausalLMEagle3"


class Keys(NamedTuple):
    """Keys and values of one step for all places: [num_windows, num_heads, length, head_dim]."""

    keys: Tensor
    values: Tensor


class Places(NamedTuple):
    """Where the tokens of windows stand. visible: [num_windows, 1, length, length], which earlier tokens each sees."""

    positions: Tensor  # [num_windows, length] in their texts
    visible: Tensor


def aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers of which a head reads the input states: those that vLLM and SGLang choose by themselves or, of
    fewer than 7 layers, where these are not three in order, the last three."""
    if num_layers < 3:
        raise ValueError(f"the model has {num_layers} layers, an EAGLE-3 head reads the states of three")
    if num_layers < 7:
        return num_layers - 3, num_layers - 2, num_layers - 1
    return 2, num_layers // 2, num_layers - 3


class Attention(nn.Module):
    """Attention that reads the embedding and the state, side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, self._head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * size, config.num_attention_heads * self._head_dim, bias=False)
        self.k_proj = nn.Linear(2 * size, config.num_key_value_heads * self._head_dim, bias=False)
        self.v_proj = nn.Linear(2 * size, config.num_key_value_heads * self._head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self._head_dim, size, bias=False)
        self._num_groups = config.num_attention_heads // config.num_key_value_heads
        self._rotary = LlamaRotaryEmbedding(config)

    def forward(self, inputs: Tensor, places: Places, step: int, earlier: list[Keys]) -> Tensor:
        """Append this step's keys to `earlier`. A place sees the first step's keys up to its own place and, of later
        steps, those that began at the same place."""
        cos, sin = (each[:, None] for each in self._rotary(inputs, places.positions + step))
        queries = _rotated(self._heads(self.q_proj(inputs)), cos, sin)
        keys = _rotated(self._heads(self.k_proj(inputs)), cos, sin).repeat_interleave(self._num_groups, 1)
        values = self._heads(self.v_proj(inputs)).repeat_interleave(self._num_groups, 1)
        earlier.append(Keys(keys, values))
        first, *later = earlier
        queries = queries * self._head_dim**-0.5
        scores = (queries @ first.keys.transpose(-1, -2)).masked_fill(~places.visible, float("-inf"))
        own = [(queries * each.keys).sum(-1, keepdim=True) for each in later]
        weights = torch.cat([scores, *own], -1).softmax(-1)
        length = first.keys.shape[-2]
        mixed = weights[..., :length] @ first.values
        for index, each in enumerate(later, length):
            mixed = mixed + weights[..., index, None] * each.values
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (-1, self._head_dim)).transpose(1, 2)


def _rotated(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = rows.chunk(2, -1)
    return rows * cos + torch.cat((-high, low), -1) * sin


class MLP(nn.Module):
    """Llama's MLP."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(rows)) * self.up_proj(rows))


class Layer(nn.Module):
    """The one layer of a head. The state is the residual; its norm feeds the attention alone."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            self.add_module(name, nn.RMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, embeddings: Tensor, states: Tensor, places: Places, step: int, earlier: list[Keys]) -> Tensor:
        inputs = torch.cat((self.input_layernorm(embeddings), self.hidden_norm(states)), -1)
        states = states + self.self_attn(inputs, places, step, earlier)
        return states + self.mlp(self.post_attention_layernorm(states))


class DraftHead(nn.Module):
    """An EAGLE-3 head. draft_ids: the tokens that it guesses, in rising order."""

    def __init__(self, config: LlamaConfig, draft_ids: Tensor) -> None:
        super().__init__()
        self.config, self.draft_ids = config, draft_ids
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(draft_ids), bias=False)

    def step(self, embeddings: Tensor, states: Tensor, places: Places, earlier: list[Keys]) -> Tensor:
        """Return the states of the next guess, [num_windows, length, hidden_size]. `earlier` has the keys of all steps
        before. embeddings: of the tokens `len(earlier)` + 1 after each place. states: fc's, or those of the step
        before."""
        state: Tensor = self.midlayer(embeddings, states, places, len(earlier), earlier)
        return state

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of the draft ids."""
        logits: Tensor = self.lm_head(self.norm(states))
        return logits

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write config.json and model.safetensors into the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: each.detach().to(dtype).contiguous() for name, each in self.state_dict().items()}
        is_drafted = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        is_drafted[self.draft_ids] = True
        tensors |= {"d2t": self.draft_ids - torch.arange(len(self.draft_ids)), "t2d": is_drafted}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        text = json.dumps(self._fields(dtype), indent=2)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")

    def _fields(self, dtype: torch.dtype) -> dict[str, Any]:
        fields: dict[str, Any] = self.config.to_dict()
        layers = aux_layers(self.config.num_hidden_layers)
        return fields | {
            "architectures": [ARCHITECTURE],
            "dtype": str(dtype).removeprefix("torch."),
            "draft_vocab_size": len(self.draft_ids),
            "num_hidden_layers": 1,
            "target_hidden_size": self.config.hidden_size,
            "tie_word_embeddings": False,
            "norm_before_residual": False,
            # vLLM's number i is the input of layer i, SGLang's the output of layer i, which is the input of i + 1
            "eagle_aux_hidden_state_layer_ids": list(layers),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [each - 1 for each in layers],
                "use_aux_hidden_state": True,
            },
        }

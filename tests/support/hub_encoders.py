"""Encoders of text whose code is on the hub and not in transformers: random checkpoints, and their hidden states by the
published formulas (Jina v2: arXiv 2310.19923; GTE: arXiv 2407.19669), one prompt at a time.

    hub_checkpoint(folder, {"model_type": "new", …}, seed=1)
    hub_hidden(folder, [5, 6, 7], [0, 0, 1])
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tokenloom.scripts.bench.inputs.make_checkpoint import write_tokenizer

Config = dict[str, Any]
MODEL_TYPES = {"new": "new.", "jina_bert": "bert."}  # and the prefix of an encoder below a head
NUM_LABELS = 3
ACTIVATIONS = {"gelu": functional.gelu, "silu": functional.silu, "geglu": functional.gelu, "reglu": functional.relu}


def shapes_of(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors: a vector ending in weight is that of a norm."""
    size, inner, types = config["hidden_size"], config["intermediate_size"], config["type_vocab_size"]
    found: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (config["vocab_size"], size)}
    if types:
        found["embeddings.token_type_embeddings.weight"] = (types, size)
    linears, norms = {"mlp.wo": (size, inner)}, ["attention.output.LayerNorm", "mlp.layernorm"]
    linears |= {f"attention.self.{each}": (size, size) for each in ("query", "key", "value")}
    linears["attention.output.dense"], gates = (size, size), "mlp.gated_layers"
    if config["model_type"] == "new":
        linears = {"attention.qkv_proj": (3 * size, size), "attention.o_proj": (size, size)}
        linears["mlp.down_proj"], gates, norms = (size, inner), "mlp.up_gate_proj", ["attn_ln", "mlp_ln"]
    for layer in (f"encoder.layer.{index}." for index in range(config["num_hidden_layers"])):
        found[f"{layer}{gates}.weight"] = (2 * inner, size)
        for name, shape in linears.items():
            found |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
        for name in norms:
            found |= {f"{layer}{name}.weight": (size,), f"{layer}{name}.bias": (size,)}
    found |= {f"embeddings.LayerNorm.{kind}": (size,) for kind in ("weight", "bias")}
    if not has_head(config):
        return found
    found |= {"pooler.dense.weight": (size, size), "pooler.dense.bias": (size,)}
    below = {f"{MODEL_TYPES[config['model_type']]}{name}": shape for name, shape in found.items()}
    return below | {"classifier.weight": (NUM_LABELS, size), "classifier.bias": (NUM_LABELS,)}


def has_head(config: Config) -> bool:
    return bool(config["architectures"][0].endswith("ForSequenceClassification"))


def hub_checkpoint(folder: Path, config: Config, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes_of(config).items():
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and name.endswith("weight")
        tensors[name] = 1 + 0.3 * noise if is_norm else noise * (0.15 if len(shape) == 1 else shape[-1] ** -0.5)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder)
    return folder


def hub_hidden(folder: Path, ids: Sequence[int], types: Sequence[int] | None) -> Tensor:
    """Return the hidden states [tokens, hidden_size] behind the last layer."""
    return _Formulas.of(folder).run(ids, types or [0] * len(ids))


def hub_logits(folder: Path, ids: Sequence[int]) -> Tensor:
    """Return the logits of the head of pairs: from the first token through a dense layer and tanh."""
    formulas = _Formulas.of(folder)
    return formulas.classify(formulas.run(ids, [0] * len(ids))[0])


class _Formulas:
    def __init__(self, config: Config, tensors: dict[str, Tensor]) -> None:
        self._config, self._tensors = config, tensors
        self._num_heads = config["num_attention_heads"]
        self._head_dim = config["hidden_size"] // self._num_heads

    @classmethod
    def of(cls, folder: Path) -> _Formulas:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stored = load_file(folder / "model.safetensors")
        root = MODEL_TYPES[config["model_type"]]
        return cls(config, {name.removeprefix(root): tensor for name, tensor in stored.items()})

    def classify(self, first: Tensor) -> Tensor:
        return self._linear(torch.tanh(self._linear(first, "pooler.dense")), "classifier")

    def run(self, ids: Sequence[int], types: Sequence[int]) -> Tensor:
        x = self._tensors["embeddings.word_embeddings.weight"][list(ids)]
        if self._config["type_vocab_size"]:
            x = x + self._tensors["embeddings.token_type_embeddings.weight"][list(types)]
        x = self._norm(x, "embeddings.LayerNorm")
        layer_of = self._new_layer if self._config["model_type"] == "new" else self._jina_layer
        for index in range(self._config["num_hidden_layers"]):
            x = layer_of(x, f"encoder.layer.{index}.")
        return x

    def _new_layer(self, x: Tensor, at: str) -> Tensor:
        """Positions rotate queries and keys; of the MLP's outputs the second half are gates."""
        q, k, v = (self._heads(each) for each in self._linear(x, f"{at}attention.qkv_proj").chunk(3, -1))
        attended = self._attend(self._rotated(q), self._rotated(k), v, torch.zeros(()))
        x = self._norm(x + self._linear(attended, f"{at}attention.o_proj"), f"{at}attn_ln")
        up, gate = self._linear(x, f"{at}mlp.up_gate_proj").chunk(2, -1)
        act = ACTIVATIONS[self._config["hidden_act"]]
        return self._norm(x + self._linear(act(gate) * up, f"{at}mlp.down_proj"), f"{at}mlp_ln")

    def _jina_layer(self, x: Tensor, at: str) -> Tensor:
        """Each head takes its slope times the distance from scores; of the MLP's outputs the first half are gates."""
        q, k, v = (self._heads(self._linear(x, f"{at}attention.self.{each}")) for each in ("query", "key", "value"))
        places = torch.arange(len(x))
        slopes = torch.tensor(_slopes(self._num_heads))
        bias = -slopes[:, None, None] * (places[:, None] - places).abs()
        attended = self._linear(self._attend(q, k, v, bias), f"{at}attention.output.dense")
        x = self._norm(x + attended, f"{at}attention.output.LayerNorm")
        gate, up = self._linear(x, f"{at}mlp.gated_layers").chunk(2, -1)
        act = ACTIVATIONS[self._config["feed_forward_type"]]
        return self._norm(x + self._linear(act(gate) * up, f"{at}mlp.wo"), f"{at}mlp.layernorm")

    def _rotated(self, heads: Tensor) -> Tensor:
        """Rotate halves. With ntk the base grows by the factor, and all frequencies fall by its 2 / head_dim-th power;
        with mixed_b pair m of n falls by exp(ln(factor) (m / n)^mixed_b)."""
        scaling = self._config.get("rope_scaling") or {}
        factor, power, size = scaling.get("factor", 1.0), scaling.get("mixed_b"), self._head_dim
        base = self._config["rope_theta"] * (factor if power is None else 1)
        frequencies = 1 / base ** (torch.arange(0, size, 2) / size)
        if power is None:
            frequencies = frequencies / factor ** (2 / size)
        else:
            growth = math.log(factor) / (size / 2) ** power
            frequencies = frequencies / torch.exp(growth * torch.arange(1, size // 2 + 1) ** power)
        angles = torch.arange(heads.shape[1])[:, None] * frequencies
        first, second = heads.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), self._num_heads, self._head_dim).transpose(0, 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = q @ k.transpose(1, 2) / math.sqrt(self._head_dim) + bias
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"]
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, self._config["layer_norm_eps"])


def _slopes(num_heads: int) -> list[float]:
    """Return ALiBi's slopes, as the paper defines them for any number of heads."""
    if math.log2(num_heads).is_integer():
        start = 2 ** -(2 ** -(math.log2(num_heads) - 3))
        return [start ** (head + 1) for head in range(num_heads)]
    power = 2 ** math.floor(math.log2(num_heads))
    return _slopes(power) + _slopes(2 * power)[::2][: num_heads - power]

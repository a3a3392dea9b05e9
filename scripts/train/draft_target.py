"""Target: the model of llama kind that a draft head is trained for, as transformers' layers with float32 weights.

    target = Target(find_checkpoint("SmolLM2-135M-Instruct.Q4_1.gguf", None))
    states = target.states(ids, places)

Weights of a GGUF file are unpacked. The engine may run the file's codes: the same function up to rounding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.scripts.train.draft_head import Places, aux_layers
from tokenloom.workers.weights.checkpoint import TensorSlice
from tokenloom.workers.weights.opening import open_checkpoint

ARCHITECTURE = "LlamaForCausalLM"
CPU = torch.device("cpu")


class States(NamedTuple):
    """States of tokens. aux: [..., 3 × hidden_size], inputs of layers. last: [..., hidden_size], behind the norm."""

    aux: Tensor
    last: Tensor


class Target:
    """Transformers' model of a checkpoint folder. ValueError for another kind of model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if fields.get("architectures") != [ARCHITECTURE]:
            raise ValueError(
                f"{folder} has a {fields.get('architectures')}: heads are trained for {ARCHITECTURE} alone"
            )
        fields.pop("quantization_config", None)  # of the files: weights come as floats
        config: Any = LlamaConfig.from_dict(fields)
        self.config = config
        with torch.device("meta"):
            model: Any = LlamaForCausalLM(config)
        if config.tie_word_embeddings:
            model.tie_weights()
        quantization = load_model_config(folder).quantization
        with open_checkpoint(folder, torch.float32, CPU, quantization) as checkpoint:
            weights = {
                name: checkpoint.load(TensorSlice(name, tuple(each.shape))) for name, each in model.named_parameters()
            }
        model.load_state_dict(weights, strict=False, assign=True)
        if config.tie_word_embeddings:
            model.tie_weights()
        rotary = type(model.model.rotary_emb)
        model.model.rotary_emb = rotary(config)  # its tables are no parameters
        self._model = model.eval().requires_grad_(False)
        self._aux = aux_layers(config.num_hidden_layers)

    @property
    def embeddings(self) -> Tensor:
        table: Tensor = self._model.model.embed_tokens.weight
        return table

    @property
    def head(self) -> Tensor:
        """[vocab_size, hidden_size]"""
        table: Tensor = self._model.lm_head.weight
        return table

    @property
    def norm(self) -> Tensor:
        weight: Tensor = self._model.model.norm.weight
        return weight

    @property
    def layers(self) -> Sequence[torch.nn.Module]:
        layers: Sequence[torch.nn.Module] = self._model.model.layers
        return layers

    @torch.inference_mode()
    def states(self, ids: Tensor, places: Places) -> States:
        """Return the states of windows of tokens, [num_windows, length]."""
        found = self._model.model(
            input_ids=ids,
            attention_mask=places.visible,
            position_ids=places.positions,
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
        return States(torch.cat([found[each] for each in self._aux], -1), found[-1])

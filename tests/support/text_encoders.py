"""The config.json of a tiny model of every family of text encoders, and a run of prompts through its layers.

Values are far from the defaults, so that a field that is not read changes the hidden states. Prompts run as in a
worker: as rows of an InputBatch, several in a step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.messages.workers import NewRow, RowSampling
from tokenloom.ipc.params.pooling_params import PoolingParams
from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.select import Ops, select_ops
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.decoder import DecoderModel
from tokenloom.workers.models.load import load_model
from tokenloom.workers.step.input_batch import InputBatch
from tokenloom.workers.step.model_step import compute

from . import families, hub_encoders

CPU = torch.device("cpu")
BLOCK_SIZE = 16
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 88,
    "vocab_size": 271,
    "max_position_embeddings": 130,
    "layer_norm_eps": 0.02,
    "type_vocab_size": 3,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {**SHAPE, "model_type": "bert", "architectures": ["BertModel"]},
    "roberta": {**SHAPE, "model_type": "roberta", "architectures": ["RobertaModel"], "hidden_act": "gelu_new"},
    "xlm_roberta": {
        **SHAPE,
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaForMaskedLM"],
        "type_vocab_size": 1,
    },
    "nomic": {
        **SHAPE,
        "model_type": "nomic_bert",
        "architectures": ["NomicBertModel"],
        "rope_theta": 50.0,
        "hidden_act": "gelu",
    },
    "gte": {**SHAPE, "model_type": "gte", "architectures": ["GteModel"], "rope_theta": 70.0, "hidden_act": "silu"},
    "gte_without_types": {**SHAPE, "model_type": "gte", "architectures": ["GteModel"], "type_vocab_size": 0},
    "new": {
        **SHAPE,
        "model_type": "new",
        "architectures": ["NewModel"],
        "rope_theta": 70.0,
        "hidden_act": "silu",
        "rope_scaling": {"type": "ntk", "factor": 3.0},
    },
    "new_mixed": {
        **SHAPE,
        "model_type": "new",
        "architectures": ["NewModel"],
        "rope_theta": 90.0,
        "hidden_act": "gelu",
        "type_vocab_size": 0,
        "rope_scaling": {"type": "ntk", "factor": 5.0, "mixed_b": 0.6},
    },
    "jina_v2": {
        **SHAPE,
        "model_type": "jina_bert",
        "architectures": ["JinaBertModel"],
        "num_attention_heads": 8,
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "emb_pooler": "mean",
    },
    "jina_v2_small": {
        **SHAPE,
        "model_type": "jina_bert",
        "architectures": ["JinaBertForMaskedLM"],
        "hidden_size": 48,
        "num_attention_heads": 6,
        "position_embedding_type": "alibi",
        "feed_forward_type": "reglu",
    },
    "jina_v3": {
        **SHAPE,
        "model_type": "jina_embeddings_v3",
        "architectures": ["JinaEmbeddingsV3Model"],
        "type_vocab_size": 1,
    },
    "mpnet": {**SHAPE, "model_type": "mpnet", "architectures": ["MPNetModel"]},
    "modernbert": {
        "model_type": "modernbert",
        "architectures": ["ModernBertModel"],
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "intermediate_size": 88,
        "vocab_size": 271,
        "max_position_embeddings": 130,
        "local_attention": 10,
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 300.0,
        "local_rope_theta": 40.0,
        "norm_eps": 0.02,
    },
    "modernbert_with_biases": {
        "model_type": "modernbert",
        "architectures": ["ModernBertForMaskedLM"],
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 271,
        "max_position_embeddings": 130,
        "local_attention": 33,
        "norm_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "embedding_gemma": {
        **families.CONFIGS["gemma3_text"],
        "architectures": ["Gemma3TextModel"],
        "use_bidirectional_attention": True,
        "sliding_window": 13,
    },
    "distilbert": {
        "model_type": "distilbert",
        "architectures": ["DistilBertModel"],
        "dim": 64,
        "n_layers": 3,
        "n_heads": 4,
        "hidden_dim": 88,
        "activation": "relu",
        "vocab_size": 271,
        "max_position_embeddings": 130,
    },
}


def reference_hidden(
    folder: Path, prompts: Mapping[str, list[int]], types: Mapping[str, list[int]]
) -> dict[str, Tensor]:
    """Compute the hidden states of each prompt alone in float32, with transformers or, for the models that it does not
    have, by their formulas."""
    import transformers

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] in hub_encoders.MODEL_TYPES:
        return {name: hub_encoders.hub_hidden(folder, ids, types.get(name)) for name, ids in prompts.items()}
    model: Any = getattr(transformers, config["architectures"][0]).from_pretrained(folder, dtype=torch.float32).eval()
    model = getattr(model, "base_model", model)
    found = {}
    with torch.inference_mode():
        for name, ids in prompts.items():
            more = {"token_type_ids": torch.tensor([types[name]])} if name in types else {}
            found[name] = model(torch.tensor([ids]), **more).last_hidden_state[0]
    return found


def encode(
    model: DecoderModel,
    steps: Sequence[Mapping[str, list[int]]],
    types: Mapping[str, list[int]] | None = None,
    dtype: torch.dtype = torch.float32,
    max_model_len: int = 128,
) -> dict[str, Tensor]:
    """Compute the hidden states of the prompts of each step; stale slots hold large numbers."""
    num_blocks = 1 + max(sum(-(-len(ids) // BLOCK_SIZE) for ids in step.values()) for step in steps)
    (spec,) = model.kv_cache_specs(BLOCK_SIZE, dtype)
    cache = torch.full(spec.shape(num_blocks), 1000.0, dtype=dtype)
    batch = InputBatch(8, max_model_len, BLOCK_SIZE, [num_blocks], is_encoder=True)
    found = {}
    for step in steps:
        for row, ids in enumerate(step.values()):
            batch.admit(
                NewRow(
                    row=row,
                    token_ids=encode_ids(ids),
                    num_prompt_tokens=len(ids),
                    num_computed_tokens=0,
                    sampling=RowSampling(),
                    pooling=PoolingParams(),
                )
            )
        rows = encode_ids(range(len(step)))
        layout = batch.layout(rows, encode_ids(map(len, step.values())))
        inputs = batch.prepare(layout)
        names = [list(step)[row] for row in inputs.rows]
        if types:
            of_tokens = [types.get(name, [0] * len(step[name])) for name in names]
            inputs = inputs._replace(token_types=np.concatenate(of_tokens).astype(np.int32))
        with torch.inference_mode():
            hidden, _ = compute(model, inputs, [cache])
        for name, part in zip(names, torch.split(hidden.clone(), layout.counts.tolist()), strict=True):
            found[name] = part.float()
        batch.free(np.arange(len(step), dtype=np.int32))
    return found


def load(
    folder: Path, dtype: torch.dtype = torch.float32, ops: Ops | None = None, config: ModelConfig | None = None
) -> DecoderModel:
    """Load the model with the config of its folder, or another one."""
    ops = ops or select_ops(CPU, dtype)
    return load_model(folder, config or load_model_config(folder), 128, dtype, CPU, ops, ParallelGroup())

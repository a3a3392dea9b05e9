"""A random file has the formats that llama-quantize chooses, and numbers of the size of a model's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from tokenloom.frontend.checkpoint.gguf.folder import add_tokenizer, checkpoint_folder
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.scripts.bench.inputs.make_checkpoint import BOS_ID, CONFIGS, config_of
from tokenloom.scripts.bench.inputs.random_gguf import MIXTURES, draw_vocabulary, tensors_of, write_random

SMALL = config_of("qwen3", 256, 9, 4, 2, 512, 700, head_dim=64)


@pytest.mark.parametrize(
    ("name", "counts", "tables"),
    [  # of files that llama-quantize made of these models
        ("8b", {"Q4_K": 217, "Q6_K": 37}, {"token_embd.weight": "Q4_K", "output.weight": "Q6_K"}),
        ("3b", {"Q4_K": 168, "Q6_K": 29}, {"token_embd.weight": "Q6_K"}),
        ("0.6b", {"Q4_K": 168, "Q6_K": 29}, {"token_embd.weight": "Q6_K"}),
    ],
)
def test_matrices_have_the_formats_of_a_q4_k_m_file(name: str, counts: dict[str, int], tables: dict[str, str]) -> None:
    kinds = {tensor: kind for tensor, kind, _ in tensors_of(CONFIGS[name], MIXTURES["Q4_K_M"])}
    found = Counter(kinds.values())
    del found["F32"]
    assert found == counts and {tensor: kinds[tensor] for tensor in kinds if "blk" not in tensor} == {
        **tables,
        "output_norm.weight": "F32",
    }


@pytest.mark.parametrize("form", MIXTURES)
def test_each_matrix_keeps_the_size_of_its_inputs(form: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_random(file, SMALL, MIXTURES[form])
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert {name: (kind, shape) for name, kind, shape in tensors_of(SMALL, MIXTURES[form])} == {
        name: (tensor.tensor_type.name, tuple(map(int, reversed(tensor.shape)))) for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all()
        if values.ndim == 2:
            assert values.std() * values.shape[1] ** 0.5 == pytest.approx(1, rel=0.05), name
            assert abs(values.mean()) < 0.05 * values.std(), name


def test_a_vocabulary_is_made_of_earlier_tokens() -> None:
    tokens, merges = draw_vocabulary(2000, seed=1)
    assert len(tokens) == len({*tokens}) == 2000 and len(merges) == 2000 - BOS_ID - 2
    ids = {token: i for i, token in enumerate(tokens)}
    for token, merge in zip(tokens[BOS_ID + 2 :], merges, strict=True):
        left, right = merge.split(" ")
        assert left + right == token and max(ids[left], ids[right]) < ids[token]


def test_the_engine_reads_shape_and_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "model.gguf"
    write_random(file, SMALL, MIXTURES["Q4_K_M"])
    folder = add_tokenizer(checkpoint_folder(file))
    model, text = load_model_config(folder), "Some words, and more: ÄÖ 42."
    assert (model.hidden_size, model.num_layers, model.vocab_size) == (256, 9, 700)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text and len(ids) < len(text.encode())

"""The heads of text encoders give transformers' logits, from our hidden states."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tokenloom.ipc.params.pooling_params import PoolingParams
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.hub_encoders import hub_logits
from tokenloom.tests.support.text_encoders import CPU, encode, load
from tokenloom.tests.support.today import some
from tokenloom.workers.features.pooling.pooling_layers import PoolingLayers
from tokenloom.workers.weights.opening import open_checkpoint

IDS = list(range(7, 40))
CASES: list[tuple[str, str, dict[str, object]]] = [
    ("bert", "BertForSequenceClassification", {}),
    ("distilbert", "DistilBertForSequenceClassification", {}),
    ("xlm_roberta", "XLMRobertaForSequenceClassification", {}),
    ("mpnet", "MPNetForSequenceClassification", {}),
    ("mpnet", "MPNetForTokenClassification", {}),
    ("nomic", "NomicBertForSequenceClassification", {}),
    ("nomic", "NomicBertForTokenClassification", {}),
    ("gte", "GteForSequenceClassification", {}),
    ("new", "NewForSequenceClassification", {}),
    ("jina_v2", "JinaBertForSequenceClassification", {}),
    ("jina_v3", "JinaEmbeddingsV3ForSequenceClassification", {}),
    ("modernbert", "ModernBertForSequenceClassification", {}),
    ("modernbert_with_biases", "ModernBertForSequenceClassification", {"classifier_pooling": "mean"}),
    ("modernbert", "ModernBertForTokenClassification", {"classifier_bias": True}),
]


@pytest.mark.parametrize(("family", "architecture", "fields"), some(CASES, 4))
def test_logits_of_heads_equal_transformers(
    family: str, architecture: str, fields: dict[str, object], tmp_path: Path
) -> None:
    labels = {str(number): f"L{number}" for number in range(3)}
    folder = tiny_checkpoint(tmp_path, family, seed=5, architectures=[architecture], id2label=labels, **fields)
    config = load_model_config(folder)
    assert config.pooling.head is not None and config.pooling.head.labels == ["L0", "L1", "L2"]
    hidden = encode(load(folder), [{"a": IDS}])["a"]
    if not config.pooling.head.is_of_tokens:
        hidden = hidden.mean(0, keepdim=True) if config.pooling.methods == ["mean"] else hidden[:1]
    opener = partial(open_checkpoint, dtype=torch.float32, device=CPU, quantization=None)
    layers = PoolingLayers.load(folder, config, opener)
    actual = layers.results(hidden, PoolingParams(task="classify", use_activation=False))
    if family in ("new", "jina_v2"):
        torch.testing.assert_close(actual[0], hub_logits(folder, IDS), atol=1e-5, rtol=0)
        return
    theirs: Any = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(actual, expected.view(actual.shape), atol=1e-5 * expected.abs().max().item(), rtol=0)

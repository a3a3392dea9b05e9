"""Heads on encoders: classes and scores of texts and pairs equal transformers', in fp32, beside other prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers.processors import TemplateProcessing

from tokenloom import LLM, PoolingParams
from tokenloom.tests.support.headed_checkpoints import Head, Headed, headed_checkpoint
from tokenloom.tests.support.hub_encoders import MODEL_TYPES
from tokenloom.tests.support.text_encoders import CONFIGS
from tokenloom.tests.support.today import some, some_pairs

TOLERANCE = 1e-5
VOCAB_SIZE = 512
FAMILIES = [family for family, config in CONFIGS.items() if config["model_type"] not in MODEL_TYPES]
HEADS: list[Head] = ["sequence", "token"]
PROMPTS = [
    [(7 * row + 3 * place) % 250 + 5 for place in range(length)] for row, length in enumerate((1, 9, 64, 100, 2))
]


def start(folder: Path) -> LLM:
    return LLM(folder, in_process=True, num_threads=1, max_model_len=128, dtype="float32", max_num_batched_tokens=128)


def with_pairs(folder: Path) -> tokenizers.Tokenizer:
    """Give the checkpoint's tokenizer BERT's forms: [CLS] a [SEP], and [CLS] a [SEP] b [SEP] with two token types."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin, end = 3, 4
    names = [tokenizer.id_to_token(each) for each in (begin, end)]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{names[0]} $A {names[1]}",
        pair=f"{names[0]} $A {names[1]} $B:1 {names[1]}:1",
        special_tokens=[(names[0], begin), (names[1], end)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize(("family", "head"), some_pairs(FAMILIES, HEADS, every=4))
def test_logits_of_prompts_and_of_tokens_equal_transformers(family: str, head: Head, tmp_path: Path) -> None:
    made = headed_checkpoint(tmp_path, family, head, vocab_size=VOCAB_SIZE)
    task = "classify" if head == "sequence" else "token_classify"
    with start(tmp_path) as llm:
        raw = PoolingParams(use_activation=False)
        outputs = llm.encode(PROMPTS, raw, pooling_task=task, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        found = torch.tensor(output.outputs.data)
        assert (found - made.logits(prompt)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("family", some(FAMILIES, 2))
def test_a_pair_is_scored_in_the_form_of_its_tokenizer(family: str, tmp_path: Path) -> None:
    made = headed_checkpoint(tmp_path, family, "sequence", 1, vocab_size=VOCAB_SIZE)
    tokenizer = with_pairs(tmp_path)
    query, documents = "Which city?", ["Oslo lies at a fjord.", "A brick is red. " * 30]
    with start(tmp_path) as llm:
        scores = llm.score(query, documents, truncate_prompt_tokens=60, use_tqdm=False)
        ranked = llm.rerank(query, documents, top_n=1, truncate_prompt_tokens=60, use_tqdm=False)
    tokenizer.enable_truncation(60, strategy="longest_first")
    expected = [score_of(made, tokenizer.encode(query, each)) for each in documents]
    for output, score in zip(scores, expected, strict=True):
        assert abs(output.outputs.score - score) <= TOLERANCE
    assert ranked[0].index == max(range(2), key=expected.__getitem__) and len(ranked) == 1


@torch.inference_mode()
def score_of(made: Headed, encoding: tokenizers.Encoding) -> float:
    more = {}
    if getattr(made.oracle.config, "type_vocab_size", 0) > 1:
        more["token_type_ids"] = torch.tensor([encoding.type_ids])
    logits: torch.Tensor = made.oracle(torch.tensor([encoding.ids]), **more).logits[0]
    return float(logits.sigmoid()[0])

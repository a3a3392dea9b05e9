"""Language models as rerankers: the score is the probability of one token over another, in the model's own template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tokenloom import LLM, ConfigError
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.ipc.spec.models.pooling.heads import QWEN3_PAIRS
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import some

TOLERANCE = 1e-5
QUERY, DOCUMENTS = "Which city?", ["Oslo lies at a fjord.", "A brick is red. " * 60]
NO, YES = "n", "y"
LENGTH = 512
OVERRIDES = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": [NO, YES]}


def vocabulary(folder: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return found


@torch.inference_mode()
def expected(folder: Path, llm: LLM, document: str) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    body = QWEN3_PAIRS.body.replace("{query}", QUERY).replace("{document}", document)
    prefix, ids, suffix = (llm.tokenize(text) for text in (QWEN3_PAIRS.prefix, body, QWEN3_PAIRS.suffix))
    room = LENGTH - len(prefix) - len(suffix)
    logits = model(torch.tensor([prefix + ids[:room] + suffix])).logits[0, -1]
    ids_by_token = vocabulary(folder)
    return float((logits[ids_by_token[YES]] - logits[ids_by_token[NO]]).sigmoid())


@pytest.mark.parametrize("is_tied", some([True, False], 1))
@pytest.mark.parametrize("form", some(["overrides", "modules"], 1))
def test_a_score_is_that_of_the_models_own_template(form: str, is_tied: bool, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen3", tie_word_embeddings=is_tied, max_position_embeddings=LENGTH)
    options: dict[str, object] = {"hf_overrides": OVERRIDES}
    if form == "modules":
        options = {}
        ids = vocabulary(folder)
        kinds = [("", "Transformer"), ("1_LogitScore", "LogitScore")]
        modules = [
            {"idx": 0, "name": "", "path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds
        ]
        (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
        (folder / "1_LogitScore").mkdir()
        config = {"true_token_id": ids[YES], "false_token_id": ids[NO]}
        (folder / "1_LogitScore" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with LLM(folder, in_process=True, num_threads=1, dtype="float32", max_model_len=LENGTH, **options) as llm:
        assert llm.info().pooling_tasks[0] == "score"
        scores = llm.score(QUERY, DOCUMENTS, truncate_prompt_tokens=-1, use_tqdm=False)
        wanted = [expected(folder, llm, document) for document in DOCUMENTS]
    assert [each.outputs.score for each in scores] == pytest.approx(wanted, abs=TOLERANCE)
    assert len(scores[1].prompt_token_ids) == LENGTH


def test_a_token_that_the_tokenizer_lacks_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match="classifier_from_token has 'jawohl', which is no token"):
        load_model_config(folder, {**OVERRIDES, "classifier_from_token": [NO, "jawohl"]})

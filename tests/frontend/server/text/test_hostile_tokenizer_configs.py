"""A tokenizer_config.json with a hostile value in one field is read or refused by the field's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.spec.models.pooling.pooling_config import PoolingConfig
from tokenloom.ipc.spec.models.pooling.sentence_files import with_sentence_files
from tokenloom.tests.frontend.server.text.samples import backend_json
from tokenloom.tests.support.hostile_fields import Hostile, faults, hostile_changes

CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": {"content": "<s>", "lstrip": False, "special": True},
    "eos_token": "</s>",
    "pad_token": "</s>",
    "additional_special_tokens": ["<|user|>"],
    "added_tokens_decoder": {"300": {"content": "<new>", "lstrip": False, "special": True, "normalized": False}},
    "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
    "clean_up_tokenization_spaces": False,
    "model_max_length": 4096,
}


def test_hostile_tokenizer_configs_are_refused_by_their_fields(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(backend_json("byte_level"))

    def read(change: Hostile) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(change.of(CONFIG)))
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer is not None and tokenizer.encode("a b", add_special_tokens=True)
        assert tokenizer.eos_token_id is None or tokenizer.eos_token_id >= 0
        ChatTemplate.load(tmp_path, tokenizer)

    found = faults(hostile_changes(CONFIG), read)
    assert not found, found


def test_hostile_prompts_of_embeddings_are_refused_by_their_fields(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": None}

    def read(change: Hostile) -> None:
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(change.of(prompts)))
        with_sentence_files(PoolingConfig(), tmp_path, 8)

    assert not faults(hostile_changes(prompts), read)

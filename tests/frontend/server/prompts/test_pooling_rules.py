from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tokenloom.frontend.checkpoint.generation_config import names_sampling, tell_missing_defaults
from tokenloom.frontend.server.prompts.pooling_rules import PoolingRules
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.tests.support.text_encoders import CONFIGS


@pytest.fixture
def rules(tmp_path: Path) -> PoolingRules:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["bert"]), encoding="utf-8")
    return PoolingRules(load_model_config(tmp_path))


def test_an_encoder_refuses_chats_and_completions_by_name(rules: PoolingRules) -> None:
    for check, said in ((rules.check_chats, "takes no chats"), (rules.check_generates, "generates no tokens")):
        with pytest.raises(RequestError, match=rf"\(BertModel\) {said}, since it is an encoder: .*embed"):
            check()


def test_missing_defaults_are_told_once_for_a_model_that_has_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tokenloom.supervisor"):
        for params in ({}, {"temperature": 0.5}, {"max_tokens": 3}):
            caplog.clear()
            tell_missing_defaults(params)
            assert bool(caplog.messages) is not names_sampling(params)

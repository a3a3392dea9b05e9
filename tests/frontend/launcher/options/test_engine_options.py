"""The keywords of LLM, as editors see them, are the options of the engine."""

from __future__ import annotations

import inspect
import typing

from tokenloom.frontend.launcher.options.engine_options import EngineOptions
from tokenloom.frontend.launcher.options.options import KINDS
from tokenloom.frontend.launcher.options.synonyms import NAMES
from tokenloom.frontend.llm import LLM, AsyncLLM
from tokenloom.scripts.checks.engine_options import FILE, formatted, written


def test_the_file_is_the_one_that_the_script_writes() -> None:
    assert FILE.read_text(encoding="utf-8") == formatted(written()), "scripts/checks/engine_options.py --write"


def test_editors_complete_each_option_and_each_long_alias() -> None:
    aliases = {name for name in NAMES if len(name) > 3}
    assert EngineOptions.__annotations__.keys() == (KINDS.keys() | aliases) - {"model"}
    for owner in (LLM, AsyncLLM):
        keywords = inspect.signature(owner, eval_str=True).parameters["options"]
        assert keywords.kind is keywords.VAR_KEYWORD and typing.get_args(keywords.annotation) == (EngineOptions,)

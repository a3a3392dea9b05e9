"""docs/coming_from_vllm.md says of each flag, parameter, method and endpoint what the program does with it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from tokenloom import LLM, SamplingParams
from tokenloom.frontend.options.arguments import add_engine_arguments
from tokenloom.ipc.config.engine_config import EngineConfig

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "coming_from_vllm.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> dict[str, str]:
    """The first two columns of the table in a section: vLLM's name and yes or no."""
    return dict(re.findall(r"^\| `([^`]+)` \| (yes|no) \|", section(title), re.MULTILINE))


def names(paragraph: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", paragraph))


def known_flags() -> set[str]:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


def served_paths() -> set[str]:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "frontend/http").glob("*.py")]
    return {path for text in sources for path in re.findall(r'(?:Endpoint|_endpoint)\(\s*"(/[^"]*)"', text)}


def test_a_method_is_there_if_the_page_says_so() -> None:
    listed = rows("Methods of `LLM`")
    assert len(listed) > 15
    assert {name: "yes" if hasattr(LLM, name) else "no" for name in listed} == listed


def test_an_endpoint_is_served_if_the_page_says_so() -> None:
    listed = rows("Endpoints")
    assert len(listed) > 30
    assert {path: "yes" if path in served_paths() else "no" for path in listed} == listed


def test_a_parameter_is_taken_if_the_page_says_so() -> None:
    taken, harmless, refused, ours = re.split(r"\n\n", section("`SamplingParams`").strip())[:4]
    defaults = SamplingParams()
    assert len(names(taken)) > 35
    for name in names(taken) | names(harmless):
        SamplingParams(**{name: getattr(defaults, name)})
    for name in names(harmless):
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: 3})
    for name in names(refused):
        with pytest.raises(TypeError, match=name):
            SamplingParams(**{name: None})
    assert names(ours) & set(SamplingParams.__struct_fields__) == {
        "timeout_s",
        "queue_timeout_s",
        "priority",
        "cache_salt",
    }


def test_a_flag_of_the_same_name_is_a_field_of_the_configuration() -> None:
    (listed,) = [each for each in section("Flags and keywords of `LLM`").split("\n\n") if each.startswith("`--")]
    flags = names(listed)
    assert len(flags) > 30 and flags <= known_flags()
    assert {flag[2:].replace("-", "_") for flag in flags} <= set(EngineConfig.__struct_fields__)

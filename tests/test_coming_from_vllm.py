"""docs/learn/coming_from_vllm.md is right about each flag, parameter, method and endpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import httpx2
import pytest

from tokenloom import LLM, SamplingParams
from tokenloom.frontend.cli.command import ALL_COMMANDS
from tokenloom.frontend.launcher.options.synonyms import NAMES, VALUES
from tokenloom.frontend.launcher.options.vllm_options import IGNORED, REFUSED
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.test_documents import known_flags

ROOT = Path(__file__).resolve().parent.parent
OTHERS = ("address", "draft_max", "mm", "model_draft")  # aliases that are not vLLM's
TEXT = (ROOT / "docs/learn/coming_from_vllm.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> dict[str, str]:
    """Return the first two columns of a section's table: vLLM's name, and yes or no."""
    return dict(re.findall(r"^\| `([^`]+)` \| (yes|no) \|", section(title), re.MULTILINE))


def names(paragraph: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", paragraph))


def served_paths(paths: Iterable[str], folder: Path) -> set[str]:
    """Return the paths that a running engine lists in its OpenAPI document or answers with another status than 404."""
    arguments = ["--device", "cpu", "--num-threads", "1", "--http", "0", "--enable-tokenizer-info-endpoint"]
    with Engine(folder, arguments) as engine:
        engine.wait_ready()
        with httpx2.Client(base_url=engine.url) as http:
            documented = http.get("/openapi.json").json()["paths"]
            return {path for path in paths if path in documented or http.get(path).status_code != 404}


def test_a_method_exists_exactly_if_the_page_lists_it() -> None:
    listed = rows("Methods of `LLM`")
    assert len(listed) > 15
    assert {name: "yes" if hasattr(LLM, name) else "no" for name in listed} == listed


def test_each_listed_command_exists() -> None:
    listed = dict(re.findall(r"^\| `vllm ([\w-]+)` \| `engine-launch (\w+)` \|", section("Commands"), re.MULTILINE))
    assert len(listed) > 5 and set(listed.values()) <= set(ALL_COMMANDS)


def test_an_endpoint_is_served_exactly_if_the_page_lists_it(tmp_path: Path) -> None:
    listed = rows("Endpoints")
    assert len(listed) > 30
    served = served_paths(listed, tmp_path)
    assert {path: "yes" if path in served else "no" for path in listed} == listed


def test_a_parameter_is_accepted_exactly_if_the_page_lists_it() -> None:
    starts = ("Taken:", "Of these,", "Refused by name:", "Of our own:")
    paragraphs = section("`SamplingParams`").strip().split("\n\n")
    taken, harmless, refused, ours = (
        "".join(each for each in paragraphs if each.startswith(start)) for start in starts
    )
    defaults = SamplingParams()
    assert len(names(taken)) > 35 and harmless
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
        "service_tier",
        "cache_salt",
    }


def test_flags_listed_as_equal_are_configuration_fields() -> None:
    (listed,) = [each for each in section("Flags and keywords of `LLM`").split("\n\n") if each.startswith("`--")]
    flags = names(listed)
    assert len(flags) > 30 and flags <= known_flags()
    assert {flag[2:].replace("-", "_") for flag in flags} <= set(EngineConfig.__struct_fields__)


def flag(name: str) -> str:
    return ("-" if len(name) < 4 else "--") + name.replace("_", "-")


@pytest.mark.parametrize("table", [IGNORED, REFUSED], ids=["ignored", "refused"])
def test_an_ignored_flag_is_listed_under_its_reason(table: dict[str, str]) -> None:
    listed = dict(re.findall(r"^\| ([^`|\n]+) \| (`-[^|]+) \|$", section("Flags and keywords of `LLM`"), re.MULTILINE))
    for reason, words in table.items():
        assert names(listed.pop(reason)) == {flag(re.split(r"[?*=]", word)[0]) for word in words.split()}, reason
    other = REFUSED if table is IGNORED else IGNORED
    assert listed.keys() == other.keys(), "a listed reason is not in the program"


def test_the_listed_aliases_and_values_are_accepted() -> None:
    text = section("Flags and keywords of `LLM`")
    pairs = dict(re.findall(r"^\| `(-[^`]+)` \| `(--[^`]+)` \|$", text, re.MULTILINE))
    assert pairs == {flag(name): flag(meant) for name, meant in NAMES.items() if name not in OTHERS}
    rows = re.findall(r"^\| `(--[^`]+)` \| (`[^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    values = {option: {str(value) for value in taken if value not in (True, "")} for option, taken in VALUES.items()}
    assert {row[0]: names(row[1]) for row in rows} == {flag(option): taken for option, taken in values.items() if taken}

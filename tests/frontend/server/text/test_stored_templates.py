"""Named chat templates: the one that transformers takes, with and without tools, from each place that holds them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import AutoTokenizer

from tokenloom.frontend.checkpoint.gguf.tokenizer import write_tokenizer
from tokenloom.frontend.checkpoint.hub import DEMO_FOLDER
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.messages.client import ChatForm, ChatMessage
from tokenloom.ipc.spec.config.engine_config import EngineConfig

NAMED = {
    "default": "D{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}",
    "tool_use": "T{{ tools | tojson }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}",
    "rag": "R{% for m in messages %}{{ m['content'] }}{% endfor %}",
}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CHAT = [{"role": "user", "content": "hello"}]


def in_list(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": name, "template": text} for name, text in NAMED.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def in_files(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    for name, text in NAMED.items():
        place = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        (folder / place).write_text(text)


@pytest.fixture(params=[in_list, in_files], ids=lambda write: write.__name__)
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(DEMO_FOLDER / name, tmp_path)
    request.param(tmp_path)
    return tmp_path


def rendered(folder: Path, tools: list[Any] | None = None, **options: Any) -> str:
    template = ChatTemplate.load(folder, Tokenizer.load(folder), EngineConfig(**options))
    assert template is not None
    variables = {"tools": tools} if tools else {}
    return template.render([ChatMessage("user", "hello")], ChatForm(variables=variables))


def test_tools_choose_the_template_that_transformers_takes(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for tools in (None, [TOOL]):
        expected = tokenizer.apply_chat_template(CHAT, tools=tools, tokenize=False)
        assert rendered(folder, tools) == expected and expected[0] == ("T" if tools else "D")
    expected = tokenizer.apply_chat_template(CHAT, chat_template="rag", tokenize=False)
    assert rendered(folder, chat_template_name="rag") == expected
    assert rendered(folder, [TOOL], chat_template_name="tool_use") == rendered(folder, [TOOL])


def test_a_name_that_is_not_there_is_refused_with_those_that_are(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"chat-template-name x: .* of this name, known are default, rag, tool_use$"):
        rendered(folder, chat_template_name="x")
    with pytest.raises(ConfigError, match="exclude each other"):
        rendered(folder, chat_template_name="rag", chat_template="{{ x }}")


def test_a_gguf_file_has_its_templates_in_the_files_of_transformers(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b"])
    writer.add_token_types([1, 1])
    writer.add_token_merges(["a b"])
    writer.add_chat_template([{"name": name, "template": text} for name, text in NAMED.items()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (tmp_path / "made").mkdir()
    write_tokenizer(tmp_path / "m.gguf", tmp_path / "made")
    for tools, first in ((None, "D"), ([TOOL], "T")):
        assert rendered(tmp_path / "made", tools)[0] == first
    assert rendered(tmp_path / "made", chat_template_name="rag") == "Rhello"

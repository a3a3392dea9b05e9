"""The cache of forms returns what it keeps, and does without a folder that can be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom.frontend.forms.answer_forms.form import AnswerForm
from tokenloom.frontend.server.answer_forms import form_cache
from tokenloom.frontend.server.answer_forms.choose import Choice
from tokenloom.frontend.server.answer_forms.form_cache import FormCache
from tokenloom.frontend.server.answer_forms.template_choice import TemplateChoice
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.ipc.spec.config.engine_config import EngineConfig

CHOICE = Choice(form=AnswerForm(name="hermes", turn_end="<end>"), origin="tried")


def test_kept_choice_is_returned(tmp_path: Path) -> None:
    cache = FormCache(tmp_path)
    assert cache.read("ab") is None
    cache.keep("ab", CHOICE)
    assert cache.read("ab") == CHOICE
    assert [path.name for path in tmp_path.iterdir()] == ["ab.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"form": 3}'])
def test_broken_file_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "ab.json").write_text(text)
    assert FormCache(tmp_path).read("ab") is None


def test_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    cache = FormCache(tmp_path / "missing")
    cache.keep("ab", CHOICE)
    assert cache.read("ab") is None


def test_home_that_cannot_be_made_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache = FormCache()
    cache.keep("ab", CHOICE)
    assert cache.read("ab") is None


def test_oldest_files_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_cache, "MAX_KEPT", 2)
    cache = FormCache(tmp_path)
    for number in range(4):
        cache.keep(f"{number}", CHOICE)
    assert len(list(tmp_path.iterdir())) == 2


def test_digest_changes_with_all_that_decides() -> None:
    def digest(source: str = "a", tokens: str = "<s>", tool_parser: str = "auto", given: str | None = None) -> str:
        template = ChatTemplate(source, {"bos_token": tokens})
        maker = TemplateChoice(template, EngineConfig(tool_call_parser=tool_parser), None)
        return maker.digest(given or source, is_of_model=given is None)

    digests = [digest(), digest("b"), digest(tokens="<b>"), digest(tool_parser="hermes"), digest(given="c")]
    assert len(set(digests)) == len(digests)
    assert digest() == digests[0]

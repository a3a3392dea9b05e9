"""`form` shows the form of a model's answers; its exit code says whether every probe returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.template_shapes import FOLDER
from tokenloom.frontend.launch import main
from tokenloom.frontend.server.answer_forms.probe import PROBES


def test_form_of_a_template_file_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["form", str(FOLDER / "object" / "hermes_thoughts.jinja")]) == 0
    output = capsys.readouterr().out
    assert output.count("  ok") == len(PROBES)
    assert "calls: learned from the chat template (JSON objects" in output


def test_last_line_names_the_answer_that_loses_its_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["form", str(FOLDER / "object" / "hermes_thoughts.jinja")]) == 0, "the form is proved all the same"
    assert capsys.readouterr().out.splitlines()[-1].startswith("history: thought and text: ")
    main(["form", str(FOLDER / "object" / "hermes.jinja")])
    assert "history: " not in capsys.readouterr().out


def test_unknown_form_has_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["form", str(FOLDER / "odd" / "recipient_in_prompt.jinja")]) == 3
    assert "form unknown" in capsys.readouterr().out


def test_first_difference_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    template = str(FOLDER / "tagged" / "lines.jinja")
    assert main(["form", template, "--tool-call-parser", "hermes"]) == 3
    output = capsys.readouterr().out
    assert "DIFFERENT" in output
    assert "the template writes: " in output


def test_json_has_form_and_probes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["form", str(FOLDER / "tagged" / "typed.jinja"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["form"]["calls"][0]["kind"] == "tagged"
    assert [each["probe"] for each in shown["results"]] == [probe.name for probe in PROBES]


def test_variables_of_the_template_are_an_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = str(FOLDER / "object" / "hermes.jinja")
    assert main(["form", template, "--default-chat-template-kwargs", "[1]"]) == 2
    assert "is not a JSON object" in capsys.readouterr().err


def test_form_of_the_demo_model_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    main(["form", "demo"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("calls: ")

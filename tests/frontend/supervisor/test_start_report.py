from __future__ import annotations

import re

import pytest

from tokenloom.frontend.supervisor import hub_progress
from tokenloom.frontend.supervisor.hub_progress import HubProgress
from tokenloom.frontend.supervisor.start_report import PATIENCE_S, PatientReport


def test_a_quick_start_says_nothing_and_a_long_one_a_line_now_and_then() -> None:
    now, shown = 0.0, list[str]()
    report = PatientReport(shown.append, lambda: now)
    for tenths in range(100):
        now = tenths / 10
        report(f"at {now}")
    assert shown == [f"at {when * PATIENCE_S}" for when in (1.0, 2.0, 3.0)]


def test_a_download_is_told_in_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(hub_progress, "PatientReport", lambda write: PatientReport(write, lambda: now))
    bar = HubProgress(total=4, desc="Fetching 4 files", disable=True)
    for step in range(4):
        now = step * PATIENCE_S
        bar.update(1)
        bar.refresh()
    bar.close()
    captured = capsys.readouterr()
    shares = [re.findall(r"INFO supervisor: Fetching 4 files: +(\d+)%", line) for line in captured.err.splitlines()]
    assert shares == [["50"], ["75"], ["100"]]
    assert not captured.out and "\r" not in captured.err

"""Errors and log lines hide the credentials of URLs."""

from __future__ import annotations

import io
import logging

import pytest

from tokenloom.ipc.errors import ERROR_BY_KIND, ConfigError, ErrorInfo, hide_credentials
from tokenloom.ipc.process import log


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://user:hunter2@host:6379/0 is gone", "redis://***@host:6379/0 is gone"),
        ("redis://:hunter@2@host", "redis://***@host"),
        ("https://hunter2@hub.example/a and http://a:b@c", "https://***@hub.example/a and http://***@c"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
        ("http://host/a@b ?x=a@b me@host", "http://host/a@b ?x=a@b me@host"),
    ],
)
def test_credentials_of_urls_are_hidden_in_errors_and_in_the_log(text: str, shown: str) -> None:
    assert hide_credentials(text) == shown
    for kind, error_type in ERROR_BY_KIND.items():
        assert str(error_type(text)) == str(ErrorInfo(kind, text).to_exception()) == shown
    stream = io.StringIO()
    handler = log._LineHandler(stream)
    handler.emit(logging.makeLogRecord({"msg": "tried %s", "args": (text,)}))
    assert stream.getvalue() == f"tried {shown}\n"


def test_hiding_takes_a_time_in_proportion_to_the_text() -> None:
    assert hide_credentials("://" * 100_000) == "://" * 100_000
    assert len(hide_credentials("://" + "a" * 1_000_000)) == 1_000_003


def test_an_error_of_the_configuration_is_one_line_of_limited_length() -> None:
    assert str(ConfigError("a\nb\x1b[2J\ud800\u2028é")) == r"a\nb\x1b[2J\ud800\u2028é"
    shown = str(ConfigError(f"dtype {'x' * 100_000} is not supported: give --dtype"))
    assert shown.startswith("dtype xx") and shown.endswith("xx is not supported: give --dtype")
    assert len(shown) < 2010

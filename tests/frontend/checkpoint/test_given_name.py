"""Messages and requests name a model as the operator did."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom.frontend.checkpoint.given_name import default_name, name_as_given


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (None, "tokenloom-demo"),
        ("./m.gguf", "./m.gguf"),
        ("hf.co/owner/name:Q4_K_M", "hf.co/owner/name:Q4_K_M"),
        ("https://huggingface.co/owner/name/", "owner/name"),
        ("https://hf.co/owner/name:Q4_K_M", "owner/name:Q4_K_M"),
    ],
)
def test_requests_name_a_model_as_the_operator_did_but_not_by_an_address(model: str | None, name: str) -> None:
    assert default_name(model) == name


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("owner/name", "owner/name: config.json is bad, see owner/name"),
        ("/cache/x", "/cache/x/config.json is bad, see /cache/x"),
        (None, "/cache/x/config.json is bad, see /cache/x"),
    ],
)
def test_the_folder_of_a_model_is_named_as_the_model_was_given(given: str | None, shown: str) -> None:
    message = "/cache/x/config.json is bad, see /cache/x"
    assert name_as_given(message, given, Path("/cache/x")) == shown

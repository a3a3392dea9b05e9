"""Names of the hub's models in every form that people write."""

from __future__ import annotations

import pytest

from tokenloom.frontend.checkpoint.downloads.hub_name import HubName, not_of_the_hub, parse_hub_name


@pytest.mark.parametrize("host", ["", "hf.co/", "huggingface.co/", "https://hf.co/", "https://www.HuggingFace.co/"])
@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("owner/name-1.5", HubName("owner/name-1.5")),
        ("owner/name:Q4_K_M", HubName("owner/name", "Q4_K_M")),
        ("owner/name:latest", HubName("owner/name")),
    ],
)
def test_a_name_is_the_same_with_and_without_the_hubs_host(host: str, form: str, name: HubName) -> None:
    assert parse_hub_name(host + form) == name


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("owner/name/", HubName("owner/name")),
        ("owner/name?library=x#files", HubName("owner/name")),
        ("owner/name/tree/main", HubName("owner/name")),
        ("owner/name/tree/v2", HubName("owner/name", None, "v2")),
        ("owner/name/blob/main/UD/m-Q4_K_M.gguf", HubName("owner/name", "UD/m-Q4_K_M.gguf")),
        ("owner/name/resolve/v2/m.gguf?download=true", HubName("owner/name", "m.gguf", "v2")),
        ("owner/name/blob/main/config.json", HubName("owner/name")),
    ],
)
def test_the_address_of_a_page_names_its_repository_branch_and_gguf_file(page: str, name: HubName) -> None:
    assert parse_hub_name(f"https://huggingface.co/{page}") == name


@pytest.mark.parametrize(
    "text", ["name", "a/b/c", "./a/b", "owner/name:", "owner/", "https://x.org/a/b", "hf.co/a/b/c"]
)
def test_other_texts_are_no_names(text: str) -> None:
    assert parse_hub_name(text) is None


def test_a_name_of_ollamas_library_is_answered_with_the_form_that_is_read() -> None:
    assert "hf.co/OWNER/NAME:Q4_K_M" in (not_of_the_hub("llama3.2:3b") or "")
    assert not_of_the_hub("owner/name:x") is None and not_of_the_hub("name") is None

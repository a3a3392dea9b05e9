"""Which GGUF file of a repository is meant."""

from __future__ import annotations

import pytest

from tokenloom.frontend.checkpoint.gguf.choice import all_parts, chosen_first, format_of, tag_of
from tokenloom.ipc.errors import ConfigError

FILES = [
    "README.md",
    "m-Q4_K_M.gguf",
    "m-Q6_K.gguf",
    "m-Q6_K_L.gguf",
    "m-BF16.gguf",
    "m-F16.gguf",
    "mmproj-m-F16.gguf",
    "UD/m-IQ4_XS-00001-of-00002.gguf",
    "UD/m-IQ4_XS-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("part", "files"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("q6_k", ["m-Q6_K.gguf"]),
        ("F16", ["m-F16.gguf"]),
        ("Q6_K_L.gguf", ["m-Q6_K_L.gguf"]),
        ("IQ4_XS", ["UD/m-IQ4_XS-00001-of-00002.gguf", "UD/m-IQ4_XS-00002-of-00002.gguf"]),
        ("UD/m-IQ4_XS-00001-of-00002.gguf", ["UD/m-IQ4_XS-00001-of-00002.gguf", "UD/m-IQ4_XS-00002-of-00002.gguf"]),
        (None, ["m-Q4_K_M.gguf"]),
    ],
)
def test_a_word_or_a_path_names_one_file_with_all_its_parts(part: str | None, files: list[str]) -> None:
    assert all_parts(FILES, chosen_first(FILES, part, "x")) == files


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ("Q2_K Q4_0 Q4_K_S Q8_0", "Q4_K_S"),
        ("Q2_K Q4_0 Q8_0", "Q4_0"),
        ("Q8_0 Q5_K_M F16", "Q5_K_M"),
        ("Q8_0 F16", "Q8_0"),
        ("IQ2_M", "IQ2_M"),
    ],
)
def test_without_a_word_the_usual_format_is_taken_or_the_only_file(there: str, taken: str) -> None:
    assert chosen_first([f"m-{each}.gguf" for each in there.split()], None, "x") == f"m-{taken}.gguf"


@pytest.mark.parametrize(
    ("names", "part", "reason"),
    [
        (FILES, "Q4_K", "--model o/n: 0 GGUF files have 'Q4_K' in their names, one must: UD/m-IQ4_XS-.*, m-BF16"),
        (["a-F16.gguf", "b-F16.gguf"], "F16", "2 GGUF files have 'F16'"),
        (["a-F16.gguf", "a-Q6_K.gguf"], None, "--model o/n has 2 GGUF files: name one, as o/n:F16: a-F16"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], None, "has 2 GGUF files: name one, as o/n:a-Q4_0: "),
        ([], None, "has 0 GGUF files: name one, of another repository"),
    ],
)
def test_several_files_or_none_are_refused_with_their_names(names: list[str], part: str | None, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        chosen_first(names, part, "--model o/n")


def test_the_tag_of_each_file_names_that_file() -> None:
    names = [*FILES, "a.Q8_0.gguf", "b.Q8_0.gguf", "plain.gguf"]
    for first in ("m-Q4_K_M.gguf", "UD/m-IQ4_XS-00001-of-00002.gguf", "a.Q8_0.gguf", "plain.gguf"):
        assert chosen_first(names, tag_of(names, first), "x") == first
    assert tag_of(names, "m-Q6_K_L.gguf") == "Q6_K_L" and tag_of(names, "b.Q8_0.gguf") == "b.Q8_0"


@pytest.mark.parametrize("name", ["Q4_K_M", "IQ2_XXS", "BF16", "F16", "fp16", "MXFP4", "TQ1_0"])
def test_the_format_is_a_word_of_the_name(name: str) -> None:
    assert format_of(f"dir/Some-7B-Instruct-{name}.gguf") == format_of(f"x.{name}.gguf") == name
    assert format_of(f"dir/x-{name}-00001-of-00009.gguf") == name and format_of("some-7B.gguf") == ""

"""The tokenizer of a GGUF file gives llama.cpp's ids, and texts come back; others are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tokenloom.frontend.checkpoint.gguf.folder import add_tokenizer, checkpoint_folder
from tokenloom.frontend.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from tokenloom.frontend.checkpoint.gguf.tokenizer import _Vocabulary, write_tokenizer
from tokenloom.frontend.checkpoint.hub import DEMO_FOLDER
from tokenloom.frontend.server.text.detokenizer import DetokenizerFactory
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.errors import ConfigError
from tokenloom.scripts.bench.inputs.write_gguf import convert
from tokenloom.tests.frontend.checkpoint.gguf.gguf_vocabulary import (
    CONTROL,
    NORMAL,
    RECORDED,
    VOCABULARIES,
    write_byte_level,
    write_named,
    write_sentencepiece,
    write_vocabulary,
)

THEIRS = json.loads((Path(__file__).parent / "tokens_of_llama_cpp.json").read_text(encoding="utf-8"))["ids"]
# texts for which llama.cpp's simpler expressions are wrong, by the difference
CAPITALS, MARKS, CAMELS, DIGITS, FOREIGN_DIGITS = 3, 4, (0, 10), 12, (2, 12)
APPROXIMATED = {
    "gpt-4o": {CAPITALS, MARKS},
    "granite-embed-multi-97m": {CAPITALS},
    "kimi-k2": {*CAMELS, MARKS},
    "superbpe": {*FOREIGN_DIGITS},
    "tekken": {CAPITALS, MARKS},
    "tiny_aya": {*CAMELS, DIGITS},
    "youtu": {*CAMELS},
}


def tokenizer_of(file: Path) -> Tokenizer:
    write_tokenizer(file, file.parent)
    tokenizer = Tokenizer.load(file.parent)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_named(name, tmp_path))
    different = {i for i, text in enumerate(RECORDED) if tokenizer.encode(text) != THEIRS[name][i]}
    assert different == APPROXIMATED.get(name, set())


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-4o", "École ÉCOLE'S ñandú", ["École", " ÉCOLE'S", " ñandú"]),
        ("gpt-4o", "a\u0301's नमस्ते", ["a\u0301's", " नमस्ते"]),
        ("tekken", "ÀlaMode नमस्ते's", ["Àla", "Mode", " नमस्ते", "'s"]),
        ("granite-embed-multi-97m", "naïfÉté", ["naïf", "Été"]),
        ("youtu", "fooBar한국어中文", ["foo", "Bar", "한국어", "中文"]),
        ("kimi-k2", "fooBar中文e\u0301X", ["foo", "Bar", "中文", "e\u0301", "X"]),
        ("tiny_aya", "x  1234567 12", ["x", "  ", "1", "234", "567", " ", "12"]),
        ("superbpe", "so it is 12345 ١٢٣٤", ["so it is ", "12", "345", " ", "١", "٢٣٤"]),
    ],
)
def test_the_original_splitting_goes_before_an_approximation(
    pre: str, text: str, words: list[str], tmp_path: Path
) -> None:
    backend = tokenizer_of(write_byte_level(tmp_path / "x.gguf", pre)).backend
    assert backend is not None and backend.pre_tokenizer is not None
    found = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == words


def test_a_file_that_names_no_splitting_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tokenizer(write_named("gpt-2", tmp_path), tmp_path)
    assert not caplog.records
    file = write_named("without pre", tmp_path)
    write_tokenizer(file, tmp_path)
    assert f"{file} does not say how its tokenizer splits texts, a default is taken: give --tokenizer" in caplog.text


def test_every_splitting_keeps_the_text() -> None:
    for form in set(PRE_TOKENIZERS.values()):
        splits = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(each), "isolated") for each in form.splits]
        for text in RECORDED:
            pieces = tokenizers.pre_tokenizers.Sequence(splits).pre_tokenize_str(text)
            assert "".join(piece for piece, _ in pieces) == text


@pytest.mark.parametrize("name", ["gpt-2", "gemma4", "llama without space", "llama with spaces", "llama"])
def test_texts_come_back_whole_and_in_streams(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_named(name, tmp_path))
    factory = DetokenizerFactory(tokenizer)
    for text in ("Hello World", " two", "  three  tabs\t x ", "日本 é🎉\n", "if (a==b) {\n\treturn x->y;\n}"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        stream = factory.new([], skip_special_tokens=True)
        assert "".join(map(stream.append, ids)) + stream.finish() == text
        stream = factory.new(tokenizer.encode("Hello"), skip_special_tokens=True)
        after = "".join(map(stream.append, ids)) + stream.finish()
        assert after == (" " + text if name == "llama" else text), "▁ is a space after other text"


def test_types_say_what_is_special(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_byte_level(tmp_path / "x.gguf", "gpt-2"))
    special = {tokenizer.token_string(i) for i in tokenizer.special_ids}
    assert special == {"<|begin|>", "<|im_end|>", "<｜User｜>"}, "<|im_end|> although its type is normal"
    ids = tokenizer.encode("<｜User｜>a<tool><|im_end|>")
    assert [tokenizer.token_string(i) for i in ids] == ["<｜User｜>", "a", "<tool>", "<|im_end|>"]
    assert tokenizer.decode(ids) == "a<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<｜User｜>a<tool><|im_end|>"
    assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<｜User｜>"}


def test_named_tokens_are_special_whatever_their_type_and_none_outside_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_byte_level(tmp_path / "x.gguf", "gpt-2", bos_token_id=70, eos_token_id=71))
    assert {70, 71} < tokenizer.special_ids
    changed = {"bos_token_id": 10_000, "eos_token_id": None, "add_bos_token": True, "add_eos_token": True}
    tokenizer = tokenizer_of(write_byte_level(tmp_path / "x.gguf", "gpt-2", **changed))
    assert tokenizer.special_tokens == {}
    assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)
    tokenizer = tokenizer_of(write_sentencepiece(tmp_path / "x.gguf", **changed))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_unknown_characters_are_one_token_if_there_are_no_bytes(tmp_path: Path) -> None:
    fields = {"model": "llama", "tokens": ["<unk>", "<s>", "</s>", "a"], "token_type": [2, 3, 3, 1]}
    tokenizer = tokenizer_of(write_vocabulary(tmp_path / "x.gguf", fields | {"add_space_prefix": False}))
    assert tokenizer.encode("xyza") == [1, 0, 3]


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_repeated_and_empty_tokens_keep_all_ids(model: str, tmp_path: Path) -> None:
    tokens = ["<s>", "a", "a", "", "b", "ab", "b", "[PAD]", "[TOKEN_2]", "ba"]
    fields: dict[str, Any] = {
        "model": model,
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [CONTROL, *[NORMAL] * 9],
        "scores": [-float(i) for i in range(len(tokens))],
        "merges": ["a b", "b a", "a c", "a b"],
        "bos_token_id": 0,
        "add_space_prefix": False,
        "add_bos_token": True,
    }
    tokenizer = tokenizer_of(write_vocabulary(tmp_path / "x.gguf", fields))
    assert tokenizer.size == len(tokens)
    assert tokenizer.encode("aba<s>bab") == [0, 5, 1, 0, 4, 5]
    assert [tokenizer.token_string(i) for i in (4, 5, 7, 9)] == ["b", "ab", "[PAD]", "ba"]
    assert all(tokenizer.decode([i], skip_special_tokens=False) for i in range(len(tokens)))


def test_special_tokens_of_phi3_take_the_spaces_behind(tmp_path: Path) -> None:
    plain = tokenizer_of(write_sentencepiece(tmp_path / "x.gguf"))
    phi = tokenizer_of(write_sentencepiece(tmp_path / "x.gguf", name="Phi-3 mini"))
    assert phi.encode("</s> \n x<tool> x") == plain.encode("</s>x<tool>x")
    assert phi.encode("<s> x") == plain.encode("<s> x") != plain.encode("<s>x")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "rwkv"}, "its tokenizer 'rwkv' cannot be read"),
        ({"model": "x\n" * 1000}, r"its tokenizer 'x\\nx.{95} cannot be read"),
        ({"pre": "gpt-7"}, r"the splitting 'gpt-7' of its tokenizer \(tokenizer.ggml.pre\) is not known"),
        ({"pre": "p" * 1000}, r"the splitting 'p{99} of its tokenizer"),
        ({"tokens": None}, "it has no tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of str"),
        ({"token_type": [1]}, r"it has \d+ tokens, but 1 types and \d+ scores of tokens"),
        ({"token_type": ["a"] * 5}, "tokenizer.ggml.token_type must be a list of int"),
        ({"scores": ["a"] * 5}, "tokenizer.ggml.scores must be a list of float"),
        ({"merges": None}, "it has no tokenizer.ggml.merges"),
        ({"merges": "a b"}, "tokenizer.ggml.merges must be a list of str"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_names_the_option(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    pre = changed.pop("pre", "gpt-2")
    file = write_byte_level(tmp_path / "x.gguf", pre, **changed)
    mend = "give --tokenizer with the folder or hub id of the original model"
    with pytest.raises(ConfigError, match=f"{words}: {mend}" if "p{99}" not in words else words) as caught:
        write_tokenizer(file, tmp_path)
    assert str(caught.value).startswith(f"{file}: ") and "\n" not in str(caught.value)
    assert str(caught.value).endswith(mend)
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"], "nothing is left behind"


@pytest.mark.timeout(120)
def test_the_tokenizer_in_the_file_is_the_original_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    convert(DEMO_FOLDER, tmp_path / "demo.gguf", "Q8_0", pre="gpt-2")
    folder = checkpoint_folder(tmp_path / "demo.gguf")
    add_tokenizer(folder)
    mine, demo = Tokenizer.load(folder), Tokenizer.load(DEMO_FOLDER)
    assert mine is not None and demo is not None and mine.size == demo.size
    for text in ("The capital of France is", "hello <|end|> 123  x\n\n", "日本語 é <|user|>", " a", ""):
        assert mine.encode(text) == demo.encode(text)
        assert mine.decode(mine.encode(text)) == demo.decode(demo.encode(text))
    assert mine.special_tokens["eos_token"] == "<|eos|>"
    assert (folder / "chat_template.jinja").read_text() == json.loads(
        (DEMO_FOLDER / "tokenizer_config.json").read_text()
    )["chat_template"]
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}, "<|end|>, too"
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    add_tokenizer(folder)
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}, "once"


def test_a_file_without_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(write_vocabulary(tmp_path / "x.gguf", {"model": "none"}), tmp_path)
    assert Tokenizer.load(tmp_path) is None


@pytest.mark.parametrize("write", [write_byte_level, write_sentencepiece])
def test_a_token_of_100_kb_is_refused_by_its_place(write: Any, tmp_path: Path) -> None:
    names = {"model": "gpt2" if write is write_byte_level else "llama", "tokens": ["a", "b" * 100_000, "ab"]}
    file = write_vocabulary(
        tmp_path / "x.gguf", {**names, "scores": [0.0] * 3, "token_type": [1] * 3, "merges": ["a b"]}
    )
    with pytest.raises(
        ConfigError, match=r"tokenizer.ggml.tokens\[1\] has 100000 characters, tokens have at most 4096"
    ):
        write_tokenizer(file, tmp_path)


class CountedText(str):
    """A text that counts how often it is cut."""

    num_cuts = 0

    def __getitem__(self, index: Any) -> str:
        CountedText.num_cuts += 1
        return super().__getitem__(index)


def test_a_long_token_is_cut_only_where_both_parts_may_be_tokens() -> None:
    texts = ["a", "aa", "aaaa", CountedText("a" * 3000), "b"]
    metadata = {"model": "llama", "tokens": texts, "scores": [0.0] * 5}
    vocabulary = _Vocabulary(Path("/x.gguf"), {f"tokenizer.ggml.{name}": value for name, value in metadata.items()})
    assert list(vocabulary._merges_of_scores()) == [("aa", "aa"), ("a", "a")]
    assert CountedText.num_cuts <= 2 * 3

"""Tokenizer agrees with transformers; errors of a broken folder are one line; unknown ids decode to nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from transformers import AutoTokenizer

from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.frontend.server.text.samples import KINDS, SENTENCES, backend_json, new_tokenizer


def write(folder: Path, kind: str, **config: object) -> None:
    (folder / "tokenizer.json").write_text(backend_json(kind))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_encodes_and_decodes_as_transformers_does(tmp_path: Path, kind: str, config: dict[str, object]) -> None:
    write(tmp_path, kind, clean_up_tokenization_spaces=False, **config)
    ours, theirs = load(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    for text in [*SENTENCES, "<s>The </s> x<|user|>"]:
        for add_special_tokens in (True, False):
            token_ids = theirs.encode(text, add_special_tokens=add_special_tokens)
            assert ours.encode(text, add_special_tokens=add_special_tokens) == token_ids
            for skip in (True, False):
                assert ours.decode(token_ids, skip_special_tokens=skip) == theirs.decode(
                    token_ids, skip_special_tokens=skip
                )
    assert ours.special_ids == frozenset(theirs.all_special_ids) | ours.special_ids
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.size == len(theirs)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(backend_json("byte_level"))
    backend.enable_truncation(4)
    backend.enable_padding(length=300)
    backend.save(str(tmp_path / "tokenizer.json"))
    expected = new_tokenizer("byte_level").encode(SENTENCES[0])
    assert load(tmp_path).encode(SENTENCES[0]) == expected and len(expected) > 4


def test_tokens_listed_only_in_the_config_are_added(tmp_path: Path) -> None:
    size = new_tokenizer("byte_level").size
    entry = {"content": "<|end|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    write(tmp_path, "byte_level", added_tokens_decoder={str(size): entry})
    tokenizer = load(tmp_path)
    assert tokenizer.encode("x<|end|>")[-1] == size and size in tokenizer.special_ids and tokenizer.size == size + 1


def test_timestamps_of_whisper_are_added_if_its_tokens_end_before_them(tmp_path: Path) -> None:
    size = new_tokenizer("byte_level").size
    mark, more = {"content": "<|notimestamps|>", "special": True}, {"content": "<|0.00|>", "special": False}
    write(tmp_path, "byte_level", added_tokens_decoder={str(size): mark})
    tokenizer = load(tmp_path)
    assert tokenizer.encode("<|0.00|>x<|30.00|>")[::2] == [size + 1, size + 1501] and tokenizer.size == size + 1502
    assert tokenizer.decode([size + 1, size + 51], skip_special_tokens=True) == "<|0.00|><|1.00|>"
    write(tmp_path, "byte_level", added_tokens_decoder={str(size): mark, str(size + 1): more})
    assert load(tmp_path).size == size + 2


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_ids_decode_to_nothing(kind: str) -> None:
    tokenizer = new_tokenizer(kind)
    token_ids = tokenizer.encode(SENTENCES[1])
    assert tokenizer.decode([tokenizer.size, *token_ids, 2**31 - 1]) == tokenizer.decode(token_ids)


def test_a_folder_without_any_tokenizer_gives_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.load(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", ""),
        ("tokenizer.json", '{"model": {"type": "BPE"'),
        ("tokenizer.json", '{"version": "9"}'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
    ],
)
def test_the_error_of_a_broken_tokenizer_file_is_one_line(tmp_path: Path, name: str, content: str) -> None:
    write(tmp_path, "byte_level")
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


def test_special_tokens_are_read_from_strings_and_objects() -> None:
    tokenizer = new_tokenizer("byte_level", eos_token={"content": "</s>", "special": True}, pad_token=None)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"} and tokenizer.eos_token_id == 2


def test_without_tokenizer_json_transformers_reads_the_folder(tmp_path: Path) -> None:
    vocab = {token: i for i, token in enumerate(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "the", "cap", "##ital"])}
    (tmp_path / "vocab.txt").write_text("\n".join(vocab))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    tokenizer = load(tmp_path)
    assert tokenizer.encode("the capital", add_special_tokens=False) == [5, 6, 7]
    assert tokenizer.decode([1, 5, 6, 7, 2, 99]) == "the capital"


def test_the_error_of_transformers_is_passed_on_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "NoSuchTokenizer"}))
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json and transformers cannot load") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


TOKENIZER_OF_ITS_OWN = """
from transformers import PreTrainedTokenizer
open({proof!r}, "w").close()


class OwnTokenizer(PreTrainedTokenizer):
    vocab_size = 1
    get_vocab = lambda self: {{"a": 0}}
    _tokenize = lambda self, text: list(text)
    _convert_token_to_id = lambda self, token: 0
    _convert_id_to_token = lambda self, token_id: "a"
"""


def test_code_of_a_checkpoint_runs_only_with_trust_remote_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, proof = tmp_path / "checkpoint", tmp_path / "it ran"
    folder.mkdir()
    (folder / "own.py").write_text(TOKENIZER_OF_ITS_OWN.format(proof=str(proof)))
    (folder / "vocab.txt").write_text("a")
    auto_map = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    with pytest.raises(ConfigError, match="of its own: read it, then allow it with --trust-remote-code"):
        Tokenizer.load(folder, EngineConfig().trust_remote_code)
    assert not proof.exists()
    trusted = Tokenizer.load(folder, trust_remote_code=True)
    assert proof.exists() and trusted is not None and trusted.encode("aa") == [0, 0]

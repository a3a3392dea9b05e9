"""Headers of GGUF files are read as gguf-py reads them; damaged ones are refused in one line."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tokenloom.frontend.gguf.reader import MAX_KEPT, read_gguf
from tokenloom.ipc.config.gguf_index import GgufTensor
from tokenloom.ipc.errors import ConfigError

TOKENS = ["<|im_end|>", "a", "Ġb", "<|eot_id|>", "é"]
VALUES: dict[str, Any] = {
    "llama.block_count": 3,
    "llama.rope.freq_base": 0.5,
    "general.name": "Ünïcode",
    "llama.attention.head_count_kv": [1, 2, 3],
    "tokenizer.ggml.scores": [0.25] * (MAX_KEPT + 1),
    "tokenizer.ggml.merges": ["a b"] * (MAX_KEPT + 1),
    "tokenizer.ggml.add_bos_token": True,
}


def write(path: Path, **more: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (VALUES | more).items():
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            kinds[type(value)](name, value)
    writer.add_token_list(TOKENS)
    writer.add_tensor("token_embd.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    blocks = gguf.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_are_those_that_were_written(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    found = read_gguf(path, "link", frozenset({"<|eot_id|>", "<|im_end|>", "nowhere"}))
    lengths = {"tokenizer.ggml.scores": MAX_KEPT + 1, "tokenizer.ggml.merges": MAX_KEPT + 1}
    expected = VALUES | lengths | {"general.architecture": "llama", "tokenizer.ggml.tokens": len(TOKENS)}
    assert found.metadata == expected
    assert found.token_ids == {"<|im_end|>": 0, "<|eot_id|>": 3}
    by_name = {each.name: each for each in gguf.GGUFReader(path).tensors}
    assert found.tensors == {
        name: GgufTensor(file="link", kind=kind, shape=shape, offset=int(by_name[name].data_offset))
        for name, kind, shape in (("token_embd.weight", "F32", (2, 32)), ("output.weight", "Q8_0", (4, 64)))
    }


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 400, 3), *random.Random(1).sample(range(len(whole)), 60)]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"truncated or damaged|is no GGUF file") as caught:
            read_gguf(cut, "link")
        assert "\n" not in str(caught.value)


def test_random_damage_is_read_or_refused(tmp_path: Path) -> None:
    whole = bytearray(
        write(tmp_path / "a.gguf", **{"tokenizer.ggml.merges": [], "tokenizer.ggml.scores": []}).read_bytes()
    )
    rng, num_refused = random.Random(2), 0
    for _ in range(600):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(900)] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        (tmp_path / "b.gguf").write_bytes(damaged)
        try:
            read_gguf(tmp_path / "b.gguf", "link")
        except ConfigError as error:
            num_refused += 1
            assert "\n" not in str(error)
    assert num_refused > 100


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated or damaged"),
        (b"PK\x03\x04 a zip file", "x.gguf is no GGUF file: it begins with b'PK"),
        (b"GGUF" + (1).to_bytes(4, "little"), "x.gguf: version 1 of GGUF is not supported"),
        (b"GGUF" + (3).to_bytes(4, "big"), r"version 50331648 .* least byte first"),
    ],
)
def test_other_files_are_named(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_gguf(path, "link")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_gguf(tmp_path, "link")


def test_a_format_that_is_not_supported_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    kind = gguf.GGMLQuantizationType.IQ2_XS
    size = gguf.GGML_QUANT_SIZES[kind][1]
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, size), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ConfigError,
        match=r"a.gguf: tensor 'blk.0.ffn_up.weight' is IQ2_XS, which is not supported, known are F32, .*MXFP4$",
    ):
        read_gguf(tmp_path / "a.gguf", "link")

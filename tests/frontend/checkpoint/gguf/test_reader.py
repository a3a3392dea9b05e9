"""Headers of GGUF files are read as gguf-py reads them; damaged ones are refused in one line."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tokenloom.frontend.checkpoint.gguf.reader import MAX_KEPT, read_gguf
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.gguf_index import GgufTensor

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
    kind = gguf.GGMLQuantizationType.Q8_K
    size = gguf.GGML_QUANT_SIZES[kind][1]
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, size), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ConfigError,
        match=r"a.gguf: tensor 'blk.0.ffn_up.weight' has format 15, Q8_K, which is not supported, known are F32, .*4$",
    ):
        read_gguf(tmp_path / "a.gguf", "link")


def raw(num_tensors: int = 0, num_pairs: int = 0, content: bytes = b"") -> bytes:
    """The bytes of a file with zeros behind `content`."""
    return (b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_pairs) + content).ljust(4096, b"\0")


def tensor(*shape: int, num_axes: int | None = None, kind: int = 0, offset: int = 0) -> bytes:
    axes = struct.pack("<I", len(shape) if num_axes is None else num_axes) + struct.pack(f"<{len(shape)}Q", *shape)
    return struct.pack("<Q", 1) + b"t" + axes + struct.pack("<IQ", kind, offset)


def array(name: str, kind: int, count: int) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<IIQ", 9, kind, count)


MALFORMED = {  # of ggml-org/llama.cpp
    "#24263 an axis of length 0": raw(1, content=tensor(4, 0)),
    "#18674 more bytes than 64 bits": raw(1, content=tensor(1152, 2**42 + 1)),
    "#18674 a shape that wraps to 0": raw(1, content=tensor(2**32, 2**32)),
    "#27203 a negative number of elements": raw(1, content=tensor(2**63 - 1, 2, 1, 1, kind=30)),
    "#25378 a million axes": raw(1, content=tensor(4, num_axes=1_000_000)),
    "#25378 4 billion axes": raw(1, content=tensor(4, num_axes=2**32 - 1)),
    "#15711 more tensors than memory": raw(2**63 - 1),
    "#15711 more pairs than memory": raw(0, 2**63 - 1),
    "#26318 a longer array than the file": raw(1, 1, array("tokenizer.ggml.scores", 6, 2**40)),
    "#26318 an array of unknown elements": raw(0, 1, array("tokenizer.ggml.scores", 77, 4)),
    "#26318 arrays in arrays": raw(0, 1, array("a", 9, 1) + struct.pack("<IQ", 9, 1) * 2000),
    "a text that is longer than the file": raw(0, 1, struct.pack("<Q", 2**63)),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_headers_that_overflow_other_readers_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(MALFORMED[name])
    with pytest.raises(ConfigError, match=r"x.gguf \(\d+ bytes\) is truncated or damaged") as caught:
        read_gguf(path, "link")
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_a_pair_without_a_name_is_passed_over(tmp_path: Path) -> None:
    """ggml-org/llama.cpp#24263."""
    path = tmp_path / "x.gguf"
    pairs = struct.pack("<QIB", 0, 7, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<II", 4, 5)
    path.write_bytes(raw(1, 2, pairs + tensor(8)))
    found = read_gguf(path, "link")
    assert found.metadata["a"] == 5 and found.tensors["t"].shape == (8,)

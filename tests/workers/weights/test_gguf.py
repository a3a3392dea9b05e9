"""Blocks of GGUF files become the floats of gguf-py, whole and in shards; codes stand for the same floats."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
import torch

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.gguf_index import (
    BLOCKS,
    CODE_BITS,
    GGUF_INDEX_NAME,
    GgufTensor,
)
from tokenloom.kernels.quantized import QuantizedWeight, Weight
from tokenloom.kernels.stored_rows import StoredRows
from tokenloom.tests.support.gguf_files import FILE, random_bytes, write_matrices, write_status
from tokenloom.workers.weights.checkpoint import TensorSlice
from tokenloom.workers.weights.file_pages import FilePages
from tokenloom.workers.weights.gguf_blocks import FLOATS, dequantize
from tokenloom.workers.weights.gguf_checkpoint import GgufCheckpoint
from tokenloom.workers.weights.opening import open_checkpoint

CPU = torch.device("cpu")
HEAD = 8  # rows that are rotated together
SHAPE = (48, 512)
QUANTIZED = sorted(BLOCKS.keys() - FLOATS.keys())


def floats_of(kind: str, data: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(gguf.dequantize(data, gguf.GGMLQuantizationType[kind])))


def in_halves(matrix: torch.Tensor) -> torch.Tensor:
    """Undo the order of rotated pairs, a row at a time."""
    rows = [head * HEAD + 2 * (i % (HEAD // 2)) + i // (HEAD // 2) for head in range(6) for i in range(HEAD)]
    return matrix[rows]


def by_kv_head(matrix: torch.Tensor) -> torch.Tensor:
    """Return queries, keys and values of two heads in the order of heads: the first's query, key and value first."""
    return torch.cat([matrix[head * HEAD : (head + 1) * HEAD] for head in (0, 2, 4, 1, 3, 5)])


class Written:
    """A checkpoint of one matrix of each format, w.KIND, and again with rows in rotated pairs, r.KIND, and with rows of
    queries, keys and values in the order of heads, g.KIND."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.expected = folder, dict[str, torch.Tensor]()
        self.index: dict[str, GgufTensor] = {}
        with (folder / "00001.gguf").open("wb") as file:
            file.write(b"header".ljust(32))
            for seed, kind in enumerate(BLOCKS):
                data = random_bytes(kind, SHAPE, seed)
                where = GgufTensor(file="00001.gguf", kind=kind, shape=SHAPE, offset=file.tell())
                file.write(data.tobytes())
                self.index |= {f"w.{kind}": where, f"r.{kind}": msgspec.structs.replace(where, rotated=HEAD)}
                self.index[f"g.{kind}"] = msgspec.structs.replace(where, grouped=(2, 2))
                self.expected[f"w.{kind}"] = floats_of(kind, data)
                self.expected[f"r.{kind}"] = in_halves(self.expected[f"w.{kind}"])
                self.expected[f"g.{kind}"] = by_kv_head(self.expected[f"w.{kind}"])
        (folder / GGUF_INDEX_NAME).write_bytes(msgspec.json.encode(self.index))
        write_status(folder)

    def open(self, dtype: torch.dtype = torch.float32) -> GgufCheckpoint:
        checkpoint = open_checkpoint(self.folder, dtype, CPU, None)
        assert isinstance(checkpoint, GgufCheckpoint)
        return checkpoint


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("gguf"))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_random_blocks_become_the_floats_of_gguf_py(kind: str) -> None:
    size, number = BLOCKS[kind], gguf.GGMLQuantizationType[kind]
    assert gguf.GGML_QUANT_SIZES[number] == size
    data = np.random.default_rng(1).integers(0, 256, (3000, size[1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data, number)
    found, is_finite = dequantize(kind, torch.from_numpy(data)).numpy(), np.isfinite(expected)
    assert is_finite.mean() > 0.9 and np.array_equal(found[is_finite], expected[is_finite])
    assert not np.isfinite(found[~is_finite]).any()


def test_all_formats_of_gguf_py_are_read() -> None:
    assert BLOCKS.keys() == {kind.name for kind in gguf.quants._type_traits} | {"F32", "F16"}


@pytest.mark.parametrize("kind", BLOCKS)
def test_shards_of_rows_and_columns_are_those_of_the_whole_matrix(kind: str, written: Written) -> None:
    rng = random.Random(kind)
    with written.open() as checkpoint:
        for name in (f"w.{kind}", f"r.{kind}", f"g.{kind}"):
            whole = written.expected[name]
            assert torch.equal(checkpoint.load(TensorSlice(name, SHAPE)), whole)
            assert torch.equal(checkpoint.load(TensorSlice(name, SHAPE, is_transposed=True)), whole)
            for _ in range(4):
                first, last = sorted(rng.sample(range(0, SHAPE[0] + 1, HEAD), 2))
                rows = checkpoint.load(TensorSlice(name, SHAPE, 0, range(first, last)))
                assert torch.equal(rows, whole[first:last])
                first, last = sorted(rng.sample(range(SHAPE[1] + 1), 2))
                columns = checkpoint.load(TensorSlice(name, SHAPE, 1, range(first, last)))
                assert torch.equal(columns, whole[:, first:last])
        padded = checkpoint.load(TensorSlice(f"w.{kind}", SHAPE, 0, range(40, 56)))
        assert torch.equal(padded, torch.cat([written.expected[f"w.{kind}"][40:], torch.zeros(8, SHAPE[1])]))
        checkpoint.dtype = torch.bfloat16
        assert torch.equal(checkpoint.load(TensorSlice(f"w.{kind}", SHAPE)), written.expected[f"w.{kind}"].bfloat16())


def check_codes(found: QuantizedWeight, expected: torch.Tensor, is_exact: bool) -> None:
    assert found.shape == expected.shape and found.group_size == 32 and found.g_idx is None
    moved = (found.dequantize() - expected).abs().unflatten(1, (-1, 32))
    steps = expected.unflatten(1, (-1, 32)).abs().amax(2, keepdim=True) / 127
    assert bool((moved <= (1e-5 if is_exact else 0.501) * steps + 1e-7).all())


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("prefix", ["w", "r", "g"])
def test_codes_stand_for_the_same_floats(kind: str, prefix: str, written: Written) -> None:
    name, exact = f"{prefix}.{kind}", kind in CODE_BITS
    whole = written.expected[name]
    with written.open() as checkpoint:
        codes = checkpoint.load_codes(TensorSlice(name, SHAPE))
        assert codes is not None and codes.is_packed == (CODE_BITS.get(kind) == 4)
        check_codes(codes, whole, exact)
        rows = checkpoint.load_codes(TensorSlice(name, SHAPE, 0, range(16, 40)))
        columns = checkpoint.load_codes(TensorSlice(name, SHAPE, 1, range(128, 320)))
        assert rows is not None and columns is not None
        check_codes(rows, whole[16:40], exact)
        check_codes(columns, whole[:, 128:320], exact)
        cut = checkpoint.load_codes(TensorSlice(name, SHAPE, 1, range(16, 48)))
        assert cut is not None and not cut.is_packed
        check_codes(cut, whole[:, 16:48], False)


def test_matrices_of_different_formats_meet_in_8_bits(written: Written) -> None:
    slices = [TensorSlice(f"w.{kind}", SHAPE) for kind in ("Q4_K", "Q6_K", "Q4_K")]
    with written.open() as checkpoint:
        joint, alike = checkpoint.load_codes(*slices), checkpoint.load_codes(slices[0], slices[2])
        assert joint is not None and alike is not None and not joint.is_packed and alike.is_packed
        expected = torch.cat([written.expected[wanted.name] for wanted in slices])
        check_codes(joint, expected, False)
        check_codes(alike, torch.cat([written.expected["w.Q4_K"]] * 2), True)
        assert checkpoint.load_codes(slices[0], TensorSlice("w.BF16", SHAPE)) is None


def test_what_is_missing_or_has_another_shape_is_named(written: Written, tmp_path: Path) -> None:
    with written.open() as checkpoint:
        with pytest.raises(ConfigError, match=r"00001.gguf: tensor w.Q9 is missing, among 78: the file"):
            checkpoint.load(TensorSlice("w.Q9", SHAPE))
        with pytest.raises(ConfigError, match=r"w.Q4_K has shape \[48, 512\], the metadata ask for \[48, 256\]"):
            checkpoint.load(TensorSlice("w.Q4_K", (48, 256)))
    (tmp_path / GGUF_INDEX_NAME).write_bytes(msgspec.json.encode(written.index))
    with (
        open_checkpoint(tmp_path, torch.float32, CPU, None) as checkpoint,
        pytest.raises(
            ConfigError, match=r"00001.gguf cannot be read \(.*No such file .*: is the GGUF file still there"
        ),
    ):
        checkpoint.load(TensorSlice("w.Q4_K", SHAPE))
    (tmp_path / "00001.gguf").write_bytes(bytes(1 << 20))
    write_status(tmp_path)
    os.utime(tmp_path / "00001.gguf", ns=(1, 1))
    with (
        open_checkpoint(tmp_path, torch.float32, CPU, None) as checkpoint,
        pytest.raises(ConfigError, match=r"00001.gguf has changed since the engine's start: start it again, or put"),
    ):
        checkpoint.load(TensorSlice("w.Q4_K", SHAPE))
    (tmp_path / GGUF_INDEX_NAME).write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot be read .*: remove .* and start again"):
        open_checkpoint(tmp_path, torch.float32, CPU, None)


def test_floats_and_cut_blocks_are_not_left_in_the_file(written: Written) -> None:
    def load(*slices: TensorSlice) -> Weight:
        with written.open(torch.bfloat16) as checkpoint:
            checkpoint.keeps_blocks = True
            return checkpoint.load_matrix(*slices)

    q4_k, q4_0, floats = (TensorSlice(f"w.{kind}", SHAPE) for kind in ("Q4_K", "Q4_0", "F16"))
    assert isinstance(load(q4_k), StoredRows) and isinstance(load(q4_k, q4_0), StoredRows)
    assert isinstance(load(replace(q4_0, axis=1, shard=range(32, 96))), StoredRows)
    assert isinstance(load(replace(q4_k, axis=1, shard=range(32, 96))), QuantizedWeight)
    assert isinstance(load(replace(q4_0, axis=1, shard=range(32, 90))), QuantizedWeight)
    assert isinstance(load(q4_k, floats), torch.Tensor) and isinstance(load(floats), torch.Tensor)


def test_of_a_matrix_that_is_read_in_slices_each_leaves_its_own_rows(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list[tuple[int, int]]()

    def leave(pages: FilePages, addresses: torch.Tensor, row_bytes: int) -> None:
        begin = int(addresses.min()) - pages.data.data_ptr()
        left.append((begin, len(addresses) * row_bytes))

    monkeypatch.setattr(FilePages, "leave", leave)
    for name in ("w.Q8_0", "r.Q8_0"):
        left.clear()
        whole = TensorSlice(name, SHAPE)
        begin, num_bytes = written.index[name].offset, written.index[name].num_bytes
        with written.open(torch.bfloat16) as checkpoint:
            checkpoint.keeps_blocks = True
            for shard in (range(HEAD), range(HEAD, SHAPE[0])):
                checkpoint.load_blocks(replace(whole, shard=shard))
            checkpoint.load_blocks(replace(whole, axis=1, shard=range(256, SHAPE[1])))
        first = num_bytes * HEAD // SHAPE[0]
        assert left == [(begin, first), (begin + first, num_bytes - first), (begin, num_bytes)]


def test_a_file_that_is_cut_or_replaced_is_refused_by_name(tmp_path: Path) -> None:
    matrices = {name: ("Q4_K", SHAPE, random_bytes("Q4_K", SHAPE, 1)) for name in "ab"}
    write_matrices(tmp_path, matrices)
    with open_checkpoint(tmp_path, torch.bfloat16, CPU, None) as checkpoint:
        assert isinstance(checkpoint, GgufCheckpoint)
        checkpoint.keeps_blocks = True
        assert checkpoint.load_blocks(TensorSlice("a", SHAPE)) is not None
        os.replace(shutil.copy(tmp_path / FILE, tmp_path / "copy"), tmp_path / FILE)
        with pytest.raises(ConfigError, match=r"00001.gguf has changed since the engine's start: start it again, or"):
            checkpoint.load_blocks(TensorSlice("b", SHAPE))
    os.truncate(tmp_path / FILE, 32 + SHAPE[0] * SHAPE[1] // 256 * 144 + 1000)
    write_status(tmp_path)  # as if it had been indexed so
    with open_checkpoint(tmp_path, torch.bfloat16, CPU, None) as checkpoint:
        assert isinstance(checkpoint, GgufCheckpoint)
        checkpoint.keeps_blocks = True
        assert checkpoint.load_blocks(TensorSlice("a", SHAPE)) is not None
        for load in (checkpoint.load_blocks, checkpoint.load_codes, checkpoint.load, checkpoint.load_rows):
            with pytest.raises(ConfigError, match=r"00001.gguf: the file has 14856 bytes, tensor b ends at 27680"):
                load(TensorSlice("b", SHAPE))


def test_norms_take_back_what_was_added(tmp_path: Path) -> None:
    (tmp_path / "00001.gguf").write_bytes(np.arange(5, dtype=np.float32).tobytes())
    where = GgufTensor(file="00001.gguf", kind="F32", shape=(5,), offset=0, added=-1.0)
    (tmp_path / GGUF_INDEX_NAME).write_bytes(msgspec.json.encode({"norm.weight": where}))
    write_status(tmp_path)
    with open_checkpoint(tmp_path, torch.float32, CPU, None) as checkpoint:
        assert checkpoint.load(TensorSlice("norm.weight", (5,))).tolist() == [-1, 0, 1, 2, 3]
        assert checkpoint.load(TensorSlice("norm.weight", (5,), 0, range(2, 4))).tolist() == [1, 2]

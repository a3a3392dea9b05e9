"""Write a GGUF file of a real model's shape with random codes, at the speed of the disk.

    python -m tokenloom.scripts.bench.inputs.random_gguf 8b Q4_K_M FILE.gguf

The shapes are those of make_checkpoint.py, the formats of the matrices those that llama.cpp's llama-quantize chooses
for a model of these families, and the file's bytes are drawn as blocks: nothing is quantized. Scales are such that each
matrix keeps the size of its inputs. The vocabulary is byte-level, as large as the model's, with random merges. Needs
gguf and numpy.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from tokenloom.scripts.bench.inputs.make_checkpoint import (
    BOS,
    BOS_ID,
    CHAT_TEMPLATE,
    CONFIGS,
    EOS,
    EOS_ID,
    letter_by_byte,
    tensor_shapes,
)
from tokenloom.scripts.bench.inputs.write_gguf import ARCHITECTURES, write_sizes

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
BETTER = ("attn_v.weight", "ffn_down.weight")  # of some layers in the wider format of a mixture
PRE_TOKENIZERS = {"gemma3_text": "qwen2", "qwen2": "qwen2", "qwen3": "qwen2", "llama": "llama-bpe"}
MAX_PART_LETTERS = 4  # of a token that later ones are merged from


class Mixture(NamedTuple):
    """A kind of file: the format of most matrices, of the better half of some, and the number of its file type."""

    most: str
    better: str
    file_type: gguf.LlamaFileType


MIXTURES = {
    "Q4_K_M": Mixture("Q4_K", "Q6_K", gguf.LlamaFileType.MOSTLY_Q4_K_M),
    "Q5_K_M": Mixture("Q5_K", "Q6_K", gguf.LlamaFileType.MOSTLY_Q5_K_M),
    "Q8_0": Mixture("Q8_0", "Q8_0", gguf.LlamaFileType.MOSTLY_Q8_0),
}


class Layout(NamedTuple):
    """Where a block holds its numbers, and the standard deviation of an element whose scale d is 1.

    `scale`: the byte of the half d. `mean_code`: of formats with a minimum, whose half lies behind d and whose 6-bit
    scales and minima, 12 bytes, behind both: what the minimum has to subtract.
    """

    scale: int
    deviation: float
    mean_code: float | None = None


LAYOUTS = {  # deviations: of uniform codes times those of uniform scales, 6 bits or int8
    "Q4_K": Layout(0, 36.4 * 4.61, 7.5),
    "Q5_K": Layout(0, 36.4 * 9.23, 15.5),
    "Q6_K": Layout(208, 73.9 * 18.5),
    "Q8_0": Layout(0, 73.9),
}


def is_better(layer: int, num_layers: int) -> bool:
    """Return whether llama-quantize gives a layer's BETTER matrices the wider format: the first and last eighth, and
    each third layer between them."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def format_of(name: str, mixture: Mixture, num_layers: int, is_tied: bool) -> str:
    """Return the format of a tensor, named as in the file."""
    if name.endswith("norm.weight"):
        return "F32"
    if name in (HEAD, EMBEDDING):
        return mixture.better if name == HEAD or is_tied else mixture.most
    is_wider = name.endswith(BETTER) and is_better(int(name.split(".")[1]), num_layers)
    return mixture.better if is_wider else mixture.most


def draw_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Draw the bytes of a tensor [rows, columns] or [columns]: uint8 [num_blocks, bytes of a block]."""
    if kind == "F32":
        return rng.normal(1.0, 0.1, shape).astype(np.float32).view(np.uint8)
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    num_blocks = shape[0] * shape[1] // block_size
    blocks = np.frombuffer(bytearray(rng.bytes(num_blocks * num_bytes)), np.uint8).reshape(num_blocks, num_bytes)
    layout = LAYOUTS[kind]
    scales = rng.uniform(0.75, 1.25, num_blocks) / (layout.deviation * shape[1] ** 0.5)
    put_halves(blocks, layout.scale, scales)
    if layout.mean_code is not None:
        put_halves(blocks, layout.scale + 2, scales * layout.mean_code)
        sixes = blocks[:, layout.scale + 4 : layout.scale + 16]
        sixes[:, 4:8] = sixes[:, :4]  # the minimum of a group is its scale, so that its mean is about 0
        sixes[:, 8:] = (sixes[:, 8:] & 15) * 17
    return blocks


def put_halves(blocks: Any, at: int, numbers: Any) -> None:
    """Write a half-precision number into each block."""
    blocks[:, at : at + 2] = numbers.astype(np.float16).view(np.uint8).reshape(-1, 2)


def draw_vocabulary(size: int, seed: int) -> tuple[list[str], list[str]]:
    """Return `size` tokens and the merges that make them: the bytes, begin and end, then random pairs of earlier tokens
    of letters."""
    tokens = [*letter_by_byte(), BOS, EOS]
    known, merges, draw = set(tokens), [], random.Random(seed)
    parts = [letter for letter in tokens[:BOS_ID] if "a" <= letter <= "z" or letter == "Ġ"]
    while len(tokens) < size:
        left, right = draw.choice(parts), draw.choice(parts)
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")
            if len(left + right) <= MAX_PART_LETTERS:
                parts.append(left + right)
    return tokens[:size], merges


def write_vocabulary(writer: gguf.GGUFWriter, config: Mapping[str, Any], seed: int) -> None:
    tokens, merges = draw_vocabulary(config["vocab_size"], seed)
    controls = (BOS_ID, EOS_ID)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZERS[config["model_type"]])
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i in controls else gguf.TokenType.NORMAL for i in range(len(tokens))]
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def tensors_of(config: Mapping[str, Any], mixture: Mixture) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield the name, format and shape of each tensor, as the file names them."""
    architecture, num_layers = ARCHITECTURES[config["architectures"][0]], config["num_hidden_layers"]
    model = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(model, num_layers)
    for name, shape in tensor_shapes(config).items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        yield found, format_of(found, mixture, num_layers, bool(config["tie_word_embeddings"])), shape


def write_random(file: Path, config: Mapping[str, Any], mixture: Mixture, seed: int = 0) -> None:
    """Write the file: a dense model of a family in PRE_TOKENIZERS, whose columns are multiples of the blocks."""
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config["architectures"][0]])
    write_sizes(writer, dict(config))
    writer.add_file_type(mixture.file_type)
    write_vocabulary(writer, config, seed)
    tensors, rng = (
        {name: (kind, shape) for name, kind, shape in tensors_of(config, mixture)},
        np.random.default_rng(seed),
    )
    for name, (kind, shape) in tensors.items():
        raw = gguf.GGMLQuantizationType[kind]
        block_size, num_bytes = gguf.GGML_QUANT_SIZES[raw]
        byte_shape = (*shape[:-1], shape[-1] // block_size * num_bytes)
        is_float = kind == "F32"
        writer.add_tensor_info(
            name,
            shape if is_float else byte_shape,
            np.dtype(np.float32 if is_float else np.uint8),
            int(np.prod(byte_shape)),
            raw_dtype=raw,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, entry in [*writer.tensors[0].items()]:  # write_sizes may have added some, with their data
        data = draw_blocks(*tensors[name], rng) if name in tensors else entry.tensor
        assert data is not None
        writer.write_tensor_data(data)
    writer.close()


def main() -> int:
    name, form, file = sys.argv[1:]
    begun = time.perf_counter()
    write_random(Path(file), CONFIGS[name], MIXTURES[form])
    print(f"{file}: {Path(file).stat().st_size / 1e9:.2f} GB, {time.perf_counter() - begun:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

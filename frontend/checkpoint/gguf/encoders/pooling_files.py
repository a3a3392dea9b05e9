"""Files of sentence-transformers for a GGUF file: how its hidden states become vectors.

`pooling_type` becomes the module Pooling, and the dense layers of EmbeddingGemma become modules with an index of their
own. Vectors have length 1, as those of llama.cpp. A file without `pooling_type` keeps the rules of its architecture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from .....ipc.spec.config.gguf_index import GGUF_INDEX_NAME, GGUF_STATUS_NAME, GgufTensor, gguf_status
from ..metadata import Metadata

MODES = {1: "mean", 2: "cls", 3: "lasttoken"}  # by pooling_type; 0 is none, 4 is a head (RANK)
OTHERS = (0, 4)
DENSE = {"dense_2.weight": "2_Dense", "dense_3.weight": "3_Dense"}  # tensor → folder of its module
TYPE = "sentence_transformers.models."


def write_pooling(data: Metadata, folder: Path, links: Mapping[str, Path]) -> None:
    """Write modules.json and what it names. `links`: GgufTensor.file → file."""
    kind = data.get("pooling_type")
    if kind is None or kind in OTHERS:
        return
    if kind not in MODES:
        known = ", ".join(map(str, sorted((*MODES, *OTHERS))))
        data.refuse(f"{data.architecture}.pooling_type {kind!r:.100} is not known, known are {known}")
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    size = data.count("embedding_length")
    _save(folder / "1_Pooling" / "config.json", {"pooling_mode": MODES[kind], "embedding_dimension": size})
    for name, module in DENSE.items():
        if data.has(name):
            _write_dense(folder / module, data.tensors[name], links)
            modules.append((module, "Dense"))
    modules.append((f"{len(modules)}_Normalize", "Normalize"))
    _save(folder / "modules.json", [{"path": path, "type": TYPE + each} for path, each in modules])


def _write_dense(folder: Path, tensor: GgufTensor, links: Mapping[str, Path]) -> None:
    num_outputs, num_inputs = tensor.shape
    activation = "torch.nn.modules.linear.Identity"
    sizes = {"in_features": num_inputs, "out_features": num_outputs}
    _save(folder / "config.json", {**sizes, "bias": False, "activation_function": activation})
    source = links[tensor.file].resolve()
    (folder / tensor.file).symlink_to(source)
    (folder / GGUF_STATUS_NAME).write_bytes(msgspec.json.encode({tensor.file: gguf_status(source)}))
    (folder / GGUF_INDEX_NAME).write_bytes(msgspec.json.encode({"linear.weight": tensor}))


def _save(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

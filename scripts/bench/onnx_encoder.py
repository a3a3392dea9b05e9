"""The transformer of a sentence-transformers model as an ONNX graph, computed by onnxruntime.

This is that library's own backend "onnx" without the package optimum: the graph is exported from the loaded weights by
torch, onnxruntime fuses it at its default level, and everything around it (tokenizer, sorted batches, pooling, heads)
stays the library's. Knows neither the engine nor what is measured. Needs the packages onnx and onnxruntime.
"""

from __future__ import annotations

import importlib
import inspect
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SAMPLE_SHAPE = (2, 8)  # rows and tokens of the export; both are dynamic in the graph


class _Graph(nn.Module):
    """A model of transformers, called by position, as an export requires."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self._model, self._names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        found: Tensor = self._model(**dict(zip(self._names, inputs, strict=True)), return_dict=True)[0]
        return found


def compute_with_onnxruntime(model: Any, threads: int) -> None:
    """Let onnxruntime compute the first output of a model of transformers, with `threads` threads.
    ModuleNotFoundError if a package is missing."""
    onnxruntime: Any = importlib.import_module("onnxruntime")
    importlib.import_module("onnx")
    accepted = inspect.signature(model.forward).parameters
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in accepted]
    sample = {name: torch.zeros(SAMPLE_SHAPE, dtype=torch.int64) for name in names}
    sample["attention_mask"][:] = 1
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer, about shapes that the graph keeps dynamic
        path = Path(folder, "model.onnx")
        torch.onnx.export(
            _Graph(model, names).eval(),
            tuple(sample.values()),
            str(path),
            input_names=names,
            output_names=["first"],
            dynamic_axes={name: {0: "rows", 1: "tokens"} for name in names},
            dynamo=False,  # the other exporter takes minutes
        )
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    outputs: Any = importlib.import_module("transformers.modeling_outputs")
    is_classifier = hasattr(model.config, "architectures") and hasattr(model, "classifier")
    answer = outputs.SequenceClassifierOutput if is_classifier else outputs.BaseModelOutput

    def forward(**inputs: Any) -> Any:
        shape = inputs["input_ids"].shape
        given = {name: inputs.get(name, torch.zeros(shape, dtype=torch.int64)).numpy() for name in names}
        return answer(torch.from_numpy(session.run(None, given)[0]))

    model.forward = forward

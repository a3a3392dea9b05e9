"""ModelFacts: what a person wants to know of a model before it is served, from its files or from the hub's list.

Reads no weights. The memory is an estimate: an engine measures for itself.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from ...ipc.errors import ConfigError
from ...ipc.processor import has_avx2
from ...ipc.spec.config.engine_config import EngineConfig
from ...ipc.spec.config.served_model import served_model
from ...ipc.spec.config.weight_files import StoredTensor, stored_tensors
from ...ipc.spec.models.config_file import read_json
from ...ipc.spec.models.model_config import ModelConfig
from ...ipc.spec.models.model_file import load_model_config
from .downloads.repository import HubRepository
from .generation_config import stored_sampling_params
from .gguf.choice import ANY_MMPROJ, format_of
from .gguf.encoder_choice import with_encoder
from .gguf.folder import gguf_in
from .gguf.reader import read_gguf
from .machine import NUM_TOKENS, Need
from .memory_check import served_bytes
from .resolve import as_served, device_of, dtype_of
from .weight_memory import kv_bytes

SMALL_FILES = ["config.json", "generation_config.json", "tokenizer_config.json", "chat_template.json*", "*.jinja"]
ROUNDED = "--quantization int8"
_README_BYTES = 16 << 10  # of a README whose head is read
_SCALES = (
    "scales",
    "qzeros",
    "g_idx",
    "scale",
    "scale_inv",
    "zero_point",
    "shape",
)  # ends of names that are no weights
_TEMPLATE = "tokenizer.chat_template"  # these two are in GGUF files
_LICENSE = "general.license"


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a model; None: the files do not tell. `needs`: see Machine.fit; empty if the sizes are not known."""

    format: str  # "GGUF Q4_K_M", "safetensors bfloat16", "safetensors awq int4"
    num_bytes: int  # of the files with weights
    architecture: str | None = None
    num_parameters: int | None = None
    context_length: int | None = None
    sampling: dict[str, int | float] = {}
    template: str | None = None  # the chat template's text
    media: str | None = None  # "image" or "audio", which prompts may have besides text
    license: str | None = None
    needs: list[Need] = []


def facts_of_folder(folder: Path) -> ModelFacts:
    """Return the facts of a checkpoint of safetensors. ConfigError if it cannot be served."""
    model = load_model_config(folder)
    tensors = stored_tensors(folder)
    kind = model.dtype if model.quantization is None else _quantization(folder, model)
    return ModelFacts(
        format=f"safetensors {kind}",
        num_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
        architecture=model.architecture,
        num_parameters=_num_parameters(tensors, model),
        context_length=model.max_position_embeddings,
        sampling=stored_sampling_params(folder),
        template=_template_in(folder),
        media=None if model.encoder is None else model.encoder.kind,
        license=_license_in(folder),
        needs=_needs(folder, tensors, (ROUNDED,) if model.quantization is None else ()),
    )


def facts_of_gguf(path: Path) -> ModelFacts:
    """Return the facts of a GGUF file, or of the model with this first part, and of its mmproj file. ConfigError if it
    cannot be served."""
    with tempfile.TemporaryDirectory() as spare:
        return _facts_of_gguf(path, with_encoder(path, ANY_MMPROJ, Path(spare)))


def _facts_of_gguf(path: Path, folder: Path) -> ModelFacts:
    model = load_model_config(folder)
    tensors = stored_tensors(folder)
    metadata = read_gguf(path, "").metadata
    return ModelFacts(
        format=f"GGUF {format_of(path.name) or _commonest(tensors)}",
        num_bytes=sum(each.stat().st_size for each in folder.glob("*.gguf")),
        architecture=model.architecture,
        num_parameters=sum(tensor.num_elements for tensor in tensors.values()),
        context_length=model.max_position_embeddings,
        sampling=stored_sampling_params(folder),
        template=_text(metadata.get(_TEMPLATE)),
        media=None if model.encoder is None else model.encoder.kind,
        license=_text(metadata.get(_LICENSE)),
        needs=_needs(folder, tensors, ()),
    )


def facts_of_repository(repository: HubRepository, first: str | None, num_bytes: int, folder: Path) -> ModelFacts:
    """Return the facts of a model that was not fetched: of the GGUF file `first`, or of safetensors. num_bytes: of its
    files with weights; folder: the SMALL_FILES of its repository."""
    count = repository.num_parameters
    if first is not None:
        keeps_codes = device_of(EngineConfig()) == "cpu" and has_avx2()
        needed = num_bytes if keeps_codes else 2 * (count or 0)
        return ModelFacts(
            format=f"GGUF {format_of(first)}".rstrip(),
            num_bytes=num_bytes,
            architecture=repository.architecture,
            num_parameters=count,
            context_length=repository.context_length,
            template=repository.chat_template,
            license=repository.license,
            needs=[Need("", needed)] if needed else [],
        )
    model = load_model_config(folder)
    dtype = dtype_of(EngineConfig(), model)
    kind = model.dtype if model.quantization is None else _quantization(folder, model)
    needed = num_bytes + kv_bytes(model, dtype, NUM_TOKENS)
    return ModelFacts(
        format=f"safetensors {kind}",
        num_bytes=num_bytes,
        architecture=model.architecture,
        num_parameters=count,
        context_length=model.max_position_embeddings,
        sampling=stored_sampling_params(folder),
        template=_template_in(folder),
        media=None if model.encoder is None else model.encoder.kind,
        license=repository.license,
        needs=[Need("", needed, model.num_heads)],
    )


def _needs(folder: Path, tensors: dict[str, StoredTensor], others: tuple[str, ...]) -> list[Need]:
    """Return what a model needs with the default options, and with those of `others`."""
    found: list[Need] = []
    for options in ("", *others):
        config = EngineConfig(quantization="int8" if options == ROUNDED else "none")
        served = as_served(config, served_model(config, folder))
        num_bytes = served_bytes(tensors, served, config) + kv_bytes(served.model, served.dtype, NUM_TOKENS)
        found.append(Need(options, num_bytes, served.model.num_heads))
    return found


def _quantization(folder: Path, model: ModelConfig) -> str:
    """Return the method that config.json names, and the kind of its numbers."""
    assert model.quantization is not None
    raw = read_json(folder / "config.json").get("quantization_config")
    method = str(raw.get("quant_method", "")) if isinstance(raw, dict) else ""
    words = dict.fromkeys((method or model.quantization.layout, model.quantization.weight_dtype))
    return " ".join(words)


def _num_parameters(tensors: Mapping[str, StoredTensor], model: ModelConfig) -> int:
    """Count the weights; packed ones by the bits of each."""
    count = 0
    for name, tensor in tensors.items():
        if name.endswith(_SCALES) or (name == "lm_head.weight" and model.tie_word_embeddings):
            continue
        is_packed = tensor.dtype in ("I32", "U8") and model.quantization is not None
        bits = 8 if is_packed and model.quantization and model.quantization.weight_dtype == "int8" else 4
        count += tensor.num_bytes * 8 // bits if is_packed else tensor.num_elements
    return count


def _commonest(tensors: Mapping[str, StoredTensor]) -> str:
    """Return the format of most weights."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_elements
    return max(sizes, key=lambda kind: sizes[kind], default="")


def _template_in(folder: Path) -> str | None:
    """Return the chat template that a checkpoint has in one of three places."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8", errors="replace")
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = folder / name
        found = read_json(path).get("chat_template") if path.is_file() else None
        if found:
            return found if isinstance(found, str) else json.dumps(found)  # several templates by name
    return None


def _license_in(folder: Path) -> str | None:
    """Return the licence that the head of README.md names."""
    try:
        with (folder / "README.md").open(encoding="utf-8", errors="replace") as file:
            text = file.read(_README_BYTES)
    except OSError:
        return None
    return next(_head_values(text, "license"), None)


def _head_values(text: str, name: str) -> Iterator[str]:
    """Yield the values of a field in the lines between the first two `---`."""
    lines = text.splitlines()
    if not lines or lines[0].strip() != "---":
        return
    for line in lines[1:]:
        if line.strip() == "---":
            return
        key, _, value = line.partition(":")
        if key.strip() == name and value.strip():
            yield value.strip().strip("\"'")


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def facts_of(path: Path) -> ModelFacts:
    """Return the facts of the model at a path: a folder, or a GGUF file. ConfigError if it cannot be served."""
    if path.is_dir():
        file = gguf_in(path)
        return facts_of_folder(path) if file is None else facts_of_gguf(file)
    if path.is_file():
        return facts_of_gguf(path)
    raise ConfigError(f"{path}: there is no such file")

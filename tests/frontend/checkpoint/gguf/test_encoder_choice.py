"""A GGUF model gets the encoder that --mmproj names, or the one beside it; an unusable file is refused by its name."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tokenloom.frontend.checkpoint.gguf.encoder_choice import with_encoder
from tokenloom.frontend.checkpoint.gguf.folder import add_tokenizer, checkpoint_folder, gguf_in
from tokenloom.frontend.checkpoint.gguf.mmproj.projectors import PROJECTORS
from tokenloom.frontend.checkpoint.hub import find_checkpoint
from tokenloom.frontend.checkpoint.model_facts import facts_of
from tokenloom.frontend.checkpoint.weight_memory import weight_bytes
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.checkpoint_digest import checkpoint_digest
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.gguf_index import read_gguf_index
from tokenloom.ipc.spec.config.weight_files import stored_tensors
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.scripts.bench.inputs.write_gguf import convert
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.hybrid_conversions import convert_hybrid
from tokenloom.tests.support.recurrent_families import recurrent_checkpoint

HIDDEN, SIZE, LAYERS = 96, 32, 2  # rows of the language model and of the encoder; layers of the encoder
SHAPES = {
    "v.patch_embd.weight": (SIZE, 3, 8, 8),
    "v.patch_embd.bias": (SIZE,),
    "v.position_embd.weight": (16, SIZE),
    "v.post_ln.weight": (SIZE,),
    "v.post_ln.bias": (SIZE,),
    "mm.model.fc.weight": (HIDDEN, 4 * SIZE),
}
IN_LAYER = {
    **{f"{name}.{kind}": (SIZE,) for name in ("ln1", "ln2") for kind in ("weight", "bias")},
    **{f"attn_{name}.weight": (SIZE, SIZE) for name in ("q", "k", "v", "out")},
    **{f"attn_{name}.bias": (SIZE,) for name in ("q", "k", "v", "out")},
    "ffn_up.weight": (48, SIZE),
    "ffn_up.bias": (48,),
    "ffn_down.weight": (SIZE, 48),
    "ffn_down.bias": (SIZE,),
}
ENCODED = "images are encoded by"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    convert(tiny_checkpoint(folder / "model", "llama"), folder / "tiny.gguf", "F32")
    return folder / "tiny.gguf"


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return Path(shutil.copy(llama, tmp_path / "files" / "tiny.gguf"))


def write_encoder(path: Path, hidden_size: int = HIDDEN, without: str = "", seed: int = 0, **keys: Any) -> Path:
    """Write an mmproj file of Idefics3's family for a language model with rows of `hidden_size`, without one tensor and
    with other values of keys; __ stands for a dot in their names."""
    writer, rng = gguf.GGUFWriter(path, "clip"), np.random.default_rng(seed)
    values: dict[str, Any] = {
        "projector_type": "idefics3",
        "has_vision_encoder": True,
        "vision__image_size": 32,
        "vision__patch_size": 8,
        "vision__embedding_length": SIZE,
        "vision__feed_forward_length": 48,
        "vision__block_count": LAYERS,
        "vision__attention__head_count": 2,
        "vision__projector__scale_factor": 2,
        "vision__image_mean": [0.5, 0.5, 0.5],
        "vision__image_std": [0.5, 0.5, 0.5],
    } | keys
    kinds: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for name, value in values.items():
        if value is not None:
            kinds[type(value)](f"clip.{name.replace('__', '.')}", value)
    shapes = SHAPES | {"mm.model.fc.weight": (hidden_size, 4 * SIZE)}
    shapes |= {f"v.blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in IN_LAYER.items()}
    for name, shape in shapes.items():
        if name != without:
            writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def encodes(folder: Path) -> bool:
    return load_model_config(folder).encoder is not None


def test_the_file_beside_the_model_is_its_encoder_unless_an_option_says_none(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not encodes(find_checkpoint(str(model), None)), "there is none"
    mmproj = write_encoder(model.parent / "mmproj-F16.gguf")
    folder = find_checkpoint(str(model), None)
    assert encodes(folder) and f"{ENCODED} {mmproj}; --no-mmproj serves text alone" in caplog.text
    assert find_checkpoint(str(model.parent), None) == folder == find_checkpoint(str(model), None)
    assert gguf_in(model.parent) == model
    assert not encodes(find_checkpoint(str(model), None, config=EngineConfig(mmproj="none")))
    assert not encodes(find_checkpoint(str(model), None, "--tokenizer")), "a tokenizer needs none"
    assert add_tokenizer(folder) == folder
    index = read_gguf_index(folder)
    assert index is not None and index["vision_model.post_layernorm.bias"].file == "mmproj.gguf"


def test_a_model_whose_images_are_not_served_is_served_without_the_encoder_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "Qwen3.5-tiny-F32.gguf"
    convert_hybrid(recurrent_checkpoint(tmp_path / "model", "qwen3_5"), path)
    mmproj = write_encoder(tmp_path / "mmproj-F16.gguf", 64)
    assert not encodes(find_checkpoint(str(path), None))
    reason = f"{mmproj}: images of qwen35 models are not served"
    assert f"text alone is served: {reason}" in caplog.text
    with pytest.raises(ConfigError, match=f"^{reason}$"):
        find_checkpoint(str(path), None, config=EngineConfig(mmproj=str(mmproj)))


def test_a_named_file_is_the_encoder_wherever_it_is(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_encoder(model.parent / "mmproj-F16.gguf")
    named = write_encoder(tmp_path / "sha256-0123", seed=1)
    folder = find_checkpoint(str(model), None, config=EngineConfig(mmproj=str(named)))
    assert (folder / "mmproj.gguf").resolve() == named and f"{ENCODED} {named}" in caplog.text
    with pytest.raises(ConfigError, match=r"^--mmproj x.gguf: there is no such file; it may be a file, auto or none$"):
        find_checkpoint(str(model), None, config=EngineConfig(mmproj="x.gguf"))


def test_of_several_files_the_one_with_the_best_floats_is_taken_and_the_log_says_so(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for form in ("Q8_0", "F32", "F16", "BF16"):
        write_encoder(model.parent / f"MMPROJ-tiny-{form.lower()}.gguf")
    folder = find_checkpoint(str(model), None)
    taken = model.parent / "MMPROJ-tiny-bf16.gguf"
    assert (folder / "mmproj.gguf").resolve() == taken
    assert f"{ENCODED} {taken}, one of 4 such files: --mmproj FILE takes another" in caplog.text


def test_other_files_give_other_folders_and_digests(model: Path) -> None:
    one, two = (write_encoder(model.parent.parent / f"{seed}.gguf", seed=seed) for seed in (1, 2))
    folders = [checkpoint_folder(model), checkpoint_folder(model, None, one), checkpoint_folder(model, None, two)]
    assert len(set(folders)) == len({checkpoint_digest(folder) for folder in folders}) == 3


def test_an_encoder_of_another_size_is_refused_with_both_sizes(model: Path) -> None:
    other = write_encoder(model.parent / "mmproj.gguf", hidden_size=64)
    words = rf"^{other}: its projector makes embeddings of 64, {model} takes 96: it belongs to another model"
    with pytest.raises(ConfigError, match=rf"{words}; --no-mmproj serves text alone$"):
        find_checkpoint(str(model), None)
    with pytest.raises(ConfigError, match=rf"{words}$"):
        find_checkpoint(str(model), None, config=EngineConfig(mmproj=str(other)))


def test_an_encoder_of_a_neighbour_is_passed_over_and_a_fitting_one_taken(
    model: Path, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = write_encoder(model.parent / "a-mmproj-F16.gguf", hidden_size=64)
    shutil.copy(llama, model.parent / "neighbour.gguf")
    assert not encodes(find_checkpoint(str(model), None))
    assert f"not used: {other}: its projector makes embeddings of 64" in caplog.text
    mine = write_encoder(model.parent / "b-mmproj-F16.gguf")
    assert (find_checkpoint(str(model), None) / "mmproj.gguf").resolve() == mine


def test_a_family_that_is_not_served_is_named_with_those_that_are(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_encoder(model.parent / "mmproj.gguf", projector_type="ultravox")
    words = f"{file}: clip.projector_type 'ultravox' is not served, these are: {', '.join(PROJECTORS)}"
    assert not encodes(find_checkpoint(str(model), None)), "its text is served as without the file"
    assert f"text alone is served: {words}" in caplog.text
    with pytest.raises(ConfigError, match="'ultravox' is not served, these are: gemma3, idefics3"):
        find_checkpoint(str(model), None, config=EngineConfig(mmproj=str(file)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"projector_type": "gemma3"}, "tensor mm.input_projection.weight is missing"),
        ({"without": "v.blk.1.ffn_up.weight"}, "tensor v.blk.1.ffn_up.weight is missing, among 37: fetch the file"),
        ({"without": "v.blk.1.attn_q.bias"}, "tensor v.blk.1.attn_q.bias is missing"),
        ({"without": "v.post_ln.weight"}, "tensor v.post_ln.weight is missing"),
        ({"without": "mm.model.fc.weight"}, "tensor mm.model.fc.weight is missing"),
        ({"vision__block_count": 3}, "tensor v.blk.2.attn_k.bias is missing"),
        ({"vision__block_count": 1 << 30}, "clip.vision.block_count must be a whole number of at most"),
        ({"vision__patch_size": 0}, "clip.vision.patch_size must be a whole number of at least 1"),
        ({"vision__attention__head_count": None}, "clip.vision.attention.head_count must be a number"),
        ({"vision__attention__head_count": 5}, "clip.vision.embedding_length 32 has no even share for each of 5 heads"),
        ({"vision__image_mean": [0.5]}, r"clip.vision.image_mean must be 3 numbers, it is \[0.5\]"),
    ],
    ids=str,
)
def test_a_file_that_does_not_fit_its_family_is_refused_by_the_tensor_or_key(
    model: Path, change: dict[str, Any], words: str
) -> None:
    file = write_encoder(model.parent / "mmproj.gguf", **change)
    with pytest.raises(ConfigError, match=rf"^{file}: {words}.*; --no-mmproj serves text alone$"):
        find_checkpoint(str(model), None)


def test_a_truncated_file_is_refused_and_text_can_be_served(model: Path) -> None:
    file = write_encoder(model.parent / "mmproj.gguf")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=rf"^{file} \(.* is truncated or damaged .*; --no-mmproj serves text alone$"):
        find_checkpoint(str(model), None)
    assert not encodes(find_checkpoint(str(model), None, config=EngineConfig(mmproj="none")))


def test_an_mmproj_file_is_no_model_and_a_model_no_mmproj_file(model: Path, llama: Path) -> None:
    file = write_encoder(model.parent / "mmproj.gguf")
    with pytest.raises(ConfigError, match=f"^{file}: it is an mmproj file, the encoder of a model: give the model's"):
        find_checkpoint(str(file), None)
    with pytest.raises(ConfigError, match=r"general.architecture is 'llama', that of an mmproj file is clip"):
        find_checkpoint(str(model), None, config=EngineConfig(mmproj=str(llama)))


def test_memory_and_facts_count_the_encoder_as_floats(model: Path) -> None:
    plain, alone = find_checkpoint(str(model), None), facts_of(model)
    write_encoder(model.parent / "mmproj.gguf")
    folder = find_checkpoint(str(model), None)
    tensors = stored_tensors(folder)
    sizes = (np.prod(shape) for shape in (*SHAPES.values(), *LAYERS * [*IN_LAYER.values()]))
    num_elements = int(sum(sizes))
    options: dict[str, bool] = {"keeps_codes": True, "has_integer_products": True}
    before = weight_bytes(stored_tensors(plain), load_model_config(plain), "bfloat16", **options)
    after = weight_bytes(tensors, load_model_config(folder), "bfloat16", **options)
    assert after - before == 2 * num_elements
    facts = facts_of(model)
    assert (alone.media, facts.media) == (None, "image")
    assert facts.num_parameters == (alone.num_parameters or 0) + num_elements


def test_the_processor_has_the_settings_of_the_file(model: Path) -> None:
    write_encoder(model.parent / "mmproj.gguf", vision__preproc_image_size=96)
    settings = json.loads((find_checkpoint(str(model), None) / "preprocessor_config.json").read_text(encoding="utf-8"))
    assert settings["size"] == {"longest_edge": 96} and settings["max_image_size"] == {"longest_edge": 32}
    assert settings["image_mean"] == [0.5, 0.5, 0.5]


def test_encoder_choice_follows_the_value_of_the_option(model: Path) -> None:
    mmproj = write_encoder(model.parent / "mmproj.gguf")
    assert with_encoder(model, "auto") == with_encoder(model, str(mmproj)) != with_encoder(model, "none")

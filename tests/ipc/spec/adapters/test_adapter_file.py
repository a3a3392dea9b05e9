"""An adapter is read if every tensor of its file fits the model; else the error names the first that does not."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.spec.adapters.adapter_config import CONFIG_NAME
from tokenloom.ipc.spec.adapters.adapter_file import AdapterFile, AdapterReader, read_adapter
from tokenloom.ipc.spec.adapters.tensor_header import TENSORS_NAME
from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.tests.support.adapter_bytes import Shapes, linear_pair, write_adapter_bytes
from tokenloom.tests.support.checkpoints import tiny_model

HIDDEN, INNER, VOCAB = 96, 200, 307  # of the tiny Llama
Q = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    families = ("llama", "mixtral", "gpt_oss", "qwen3_moe", "apertus")
    return {family: tiny_model(tmp_path_factory.mktemp(family), family) for family in families}


@pytest.fixture
def llama(models: dict[str, ModelConfig]) -> ModelConfig:
    return models["llama"]


def pair(module: str = Q, rank: int = 8, num_inputs: int = HIDDEN, num_outputs: int = HIDDEN) -> Shapes:
    return linear_pair(module, rank, num_inputs, num_outputs)


def embedding(rank: int = 8) -> Shapes:
    prefix = "base_model.model.model.embed_tokens."
    return {f"{prefix}lora_embedding_A": ("F32", [rank, VOCAB]), f"{prefix}lora_embedding_B": ("F32", [HIDDEN, rank])}


def of(name: str, *shape: int) -> Shapes:
    return {f"base_model.model.{name}": ("F32", shape)}


def read(
    folder: Path,
    model: ModelConfig,
    tensors: Shapes,
    max_rank: int = 16,
    chosen: list[str] | None = None,
    **config: object,
) -> AdapterFile:
    return read_adapter(write_adapter_bytes(folder, tensors, **config), model, max_rank=max_rank, target_modules=chosen)


def test_a_sound_adapter_is_read(tmp_path: Path, llama: ModelConfig) -> None:
    down = pair("model.layers.1.mlp.down_proj", 4, INNER, HIDDEN)
    adapter = read(tmp_path, llama, {**pair(), **down}, rank_pattern={"down_proj": 4}, alpha_pattern={"down_proj": 6})
    assert [each.target.module for each in adapter.modules] == [Q, "model.layers.1.mlp.down_proj"]
    assert [(each.rank, each.scale) for each in adapter.modules] == [(8, 2.0), (4, 1.5)]
    assert (adapter.rank, adapter.copies) == (8, [])
    assert adapter.num_bytes == 4 * (8 * 2 * HIDDEN + 4 * (HIDDEN + INNER))


def test_weights_of_the_base_beside_an_update_are_named_as_copies(tmp_path: Path, llama: ModelConfig) -> None:
    head = {**pair("lm_head", 8, HIDDEN, VOCAB), **of("lm_head.base_layer.weight", VOCAB, HIDDEN)}
    adapter = read(
        tmp_path, llama, {**head, **embedding(), **of("model.embed_tokens.base_layer.weight", VOCAB, HIDDEN)}
    )
    assert [each.target.kind for each in adapter.modules] == ["head", "embedding"]
    assert [(each.target.kind, each.place.name) for each in adapter.copies] == [
        ("head", "base_model.model.lm_head.base_layer.weight"),
        ("embedding", "base_model.model.model.embed_tokens.base_layer.weight"),
    ]


A, B = f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"
OTHERS: dict[str, Shapes] = {
    f"tensor {A} has shape [8, 64] and its B [96, 8], the module has 96 inputs and 96 outputs": pair(num_inputs=64),
    f"tensor {A} has shape [8, 96] and its B [64, 8]": pair(num_outputs=64),
    f"tensor {A} has shape [96]": {**of(f"{Q}.lora_A.weight", 96), **of(f"{Q}.lora_B.weight", 96, 8)},
    f"tensor {A} has rank 4 and its B 4, {CONFIG_NAME} says 8": pair(rank=4),
    f"tensor {A} has rank 8 and its B 4": {**pair(), **of(f"{Q}.lora_B.weight", HIDDEN, 4)},
    f"tensor {A} has no B beside it": of(f"{Q}.lora_A.weight", 8, HIDDEN),
    f"tensor {B} has no A beside it": of(f"{Q}.lora_B.weight", HIDDEN, 8),
    "tensor base_model.model.lm_head.base_layer.weight has no A and B beside it": {
        **pair(),
        **of("lm_head.base_layer.weight", VOCAB, HIDDEN),
    },
    "x_proj.lora_A.weight updates a module that LlamaForCausalLM does not have": pair("model.layers.0.x_proj"),
    "model.layers.2.self_attn.q_proj.lora_A.weight updates a module": pair("model.layers.2.self_attn.q_proj"),
    "tensor base_model.model.lm_head.weight is neither A, B nor magnitude": {
        **pair(),
        **of("lm_head.weight", VOCAB, HIDDEN),
    },
    "lora_B.bias is neither A, B nor magnitude": {**pair(), **of(f"{Q}.lora_B.bias", HIDDEN)},
    "lora_A.default.weight is neither A, B nor magnitude": of(f"{Q}.lora_A.default.weight", 8, HIDDEN),
    "base_layer.weight replaces a weight of the base": {**pair(), **of(f"{Q}.base_layer.weight", HIDDEN, HIDDEN)},
    "has shape [310, 96], the model's has [307, 96]: an adapter may not add tokens": {
        **embedding(),
        **of("model.embed_tokens.base_layer.weight", 310, HIDDEN),
    },
    "embed_tokens.lora_A.weight is of another kind than its module": pair("model.embed_tokens", 8, VOCAB, HIDDEN),
    "update the same module: remove one": {**pair(), **pair("model.language_model.layers.0.self_attn.q_proj")},
    "lora_magnitude_vector is of DoRA": {**pair(), **of(f"{Q}.lora_magnitude_vector", 96)},
}
OTHERS_BY_CONFIG: dict[str, tuple[Shapes, dict[str, object]]] = {
    f"tensor {A} has rank 32, --max-lora-rank is 16: raise it": (pair(rank=32), {"r": 32}),
    "are the same part of a module: remove one": (
        {**pair(), **of(f"{Q}.lora_magnitude_vector", 96), **of(f"{Q}.lora_magnitude_vector.weight", 96)},
        {"use_dora": True},
    ),
    "has no lora_magnitude_vector, use_dora is true": (pair(), {"use_dora": True}),
    "lora_magnitude_vector has shape [8], the module has 96 outputs": (
        {**pair(), **of(f"{Q}.lora_magnitude_vector", 8)},
        {"use_dora": True},
    ),
    "is of DoRA, which embeddings and experts in one tensor lack": (embedding(), {"use_dora": True}),
    "keys of rank_pattern or alpha_pattern cannot be used, '(q_proj': missing ): write plain paths": (
        pair(),
        {"alpha_pattern": {"(q_proj": 4}},
    ),
    "peft_type 'IA3' is not supported": (pair(), {"peft_type": "IA3"}),
}


@pytest.mark.parametrize("message", [*OTHERS, *OTHERS_BY_CONFIG])
def test_each_misfit_has_its_own_error(tmp_path: Path, llama: ModelConfig, message: str) -> None:
    tensors, config = OTHERS_BY_CONFIG.get(message) or (OTHERS[message], {})
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        read(tmp_path, llama, tensors, **config)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_modules_that_are_not_chosen_are_refused(tmp_path: Path, llama: ModelConfig) -> None:
    assert read(tmp_path, llama, pair(), chosen=["q_proj"]).rank == 8
    with pytest.raises(
        RequestError, match=r"q_proj\.lora_A\.weight updates a module that --lora-target-modules leaves"
    ):
        read(tmp_path, llama, pair(), chosen=["k_proj", "v_proj"])


def test_models_of_transformers_layers_take_no_adapters(tmp_path: Path, models: dict[str, ModelConfig]) -> None:
    with pytest.raises(RequestError, match="ApertusForCausalLM runs by transformers' layers, which take no adapters"):
        read(tmp_path, models["apertus"], pair())


def test_magnitudes_of_both_spellings_are_read(tmp_path: Path, llama: ModelConfig) -> None:
    for end in ("", ".weight"):
        tensors = {**pair(), **of(f"{Q}.lora_magnitude_vector{end}", HIDDEN)}
        (module,) = read(tmp_path, llama, tensors, use_dora=True).modules
        assert module.magnitude is not None
        assert module.magnitude.shape == (HIDDEN,)


def experts(model: ModelConfig, num_inputs: int, num_outputs: int, wrapper: str = "", rank: int = 4) -> Shapes:
    assert model.experts is not None
    name, num = f"{EXPERTS}{wrapper}", model.experts.num_experts
    return {
        **of(f"{name}.lora_A.weight", rank * num, num_inputs),
        **of(f"{name}.lora_B.weight", num_outputs, rank * num),
    }


def test_experts_in_one_tensor_are_told_apart_by_shapes(tmp_path: Path, models: dict[str, ModelConfig]) -> None:
    model = models["mixtral"]
    assert model.experts is not None
    hidden, size = model.hidden_size, model.experts.intermediate_size
    for first, second in (("", ".base_layer"), (".base_layer", "")):
        tensors = {**experts(model, hidden, 2 * size, first), **experts(model, size, hidden, second)}
        up, down = read(tmp_path, model, tensors, r=4, alpha_pattern={r".*\.down_proj": 2}).modules
        assert (up.target.kind, up.rank, up.scale, up.are_swapped) == ("experts_up", 4, 4.0, False)
        assert (down.target.kind, down.rank, down.scale, down.are_swapped) == ("experts_down", 4, 0.5, False)
    with pytest.raises(RequestError, match="which fit neither gate_up_proj nor down_proj of 5 experts"):
        read(tmp_path, model, experts(model, hidden, hidden), r=4)
    with pytest.raises(RequestError, match="update the same module"):
        read(
            tmp_path,
            model,
            {**experts(model, hidden, 2 * size), **experts(model, hidden, 2 * size, ".base_layer")},
            r=4,
        )
    with pytest.raises(RequestError, match="is of DoRA, which"):
        read(tmp_path, model, experts(model, hidden, 2 * size), r=4, use_dora=True)


def test_swapped_experts_are_noticed_also_where_their_shapes_do_not_tell(
    tmp_path: Path, models: dict[str, ModelConfig]
) -> None:
    model = models["gpt_oss"]
    assert model.experts is not None
    size = model.experts.intermediate_size
    model = msgspec.structs.replace(model, hidden_size=size)  # as GPT-OSS 20B, whose down is square
    for inputs, outputs, are_swapped in ((size, 2 * size, False), (2 * size, size, True)):
        tensors = {**experts(model, size, size), **experts(model, inputs, outputs, ".base_layer")}
        down, up = read(tmp_path, model, tensors, r=4).modules
        assert (down.target.kind, down.are_swapped) == ("experts_down", are_swapped)
        assert (up.target.kind, up.are_swapped) == ("experts_up", are_swapped)
    (down,) = read(tmp_path, model, experts(model, size, size), r=4).modules
    assert not down.are_swapped


def test_experts_one_by_one_are_read_and_not_beside_all_at_once(tmp_path: Path, models: dict[str, ModelConfig]) -> None:
    model = models["mixtral"]
    assert model.experts is not None
    hidden, size = model.hidden_size, model.experts.intermediate_size
    one = pair("model.layers.0.block_sparse_moe.experts.3.w2", 8, size, hidden)
    (module,) = read(tmp_path, model, one).modules
    assert (module.expert, module.target.kind, module.target.layer) == (3, "experts_down", 0)
    with pytest.raises(RequestError, match="update the same experts: remove one"):
        read(tmp_path, model, {**one, **experts(model, size, hidden, rank=8)})


def test_patterns_match_parameters_that_are_targets_by_their_own_names(
    tmp_path: Path, models: dict[str, ModelConfig]
) -> None:
    model, name = models["qwen3_moe"], "model.layers.0.mlp.gate"
    assert model.experts is not None
    tensors = pair(name, 8, model.hidden_size, model.experts.num_experts)
    config: dict[str, object] = {"alpha_pattern": {"gate.weight": 80, "gate": 8}}
    assert read(tmp_path, model, tensors, **config).modules[0].scale == 1.0
    config["target_parameters"] = ["mlp.gate.weight"]
    assert read(tmp_path, model, tensors, **config).modules[0].scale == 10.0


def test_a_reader_reads_each_adapter_as_a_new_one_does(tmp_path: Path, llama: ModelConfig) -> None:
    other = pair("model.layers.1.self_attn.q_proj")
    folders = [
        write_adapter_bytes(tmp_path / "a", pair()),
        write_adapter_bytes(tmp_path / "same", pair()),
        write_adapter_bytes(tmp_path / "alpha", pair(), lora_alpha=3),
        write_adapter_bytes(tmp_path / "pattern", pair(), alpha_pattern={"q_proj": 5, "proj": 7}),
        write_adapter_bytes(tmp_path / "order", pair(), alpha_pattern={"proj": 7, "q_proj": 5}),
        write_adapter_bytes(tmp_path / "other", other),
        write_adapter_bytes(tmp_path / "longer", pair()),
    ]
    with (folders[-1] / TENSORS_NAME).open("ab") as file:
        file.write(b"x")
    reader = AdapterReader(llama, max_rank=16)
    for folder in [each for after in folders for before in folders for each in (before, after)]:
        if folder.name == "longer":
            with pytest.raises(RequestError, match=r"longer.* truncated or damaged"):
                reader.read(folder)
        else:
            assert reader.read(folder) == read_adapter(folder, llama, max_rank=16)

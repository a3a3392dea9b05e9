"""Folders of sentence-transformers: their modules make the vectors, and a module that is wrong is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tokenloom import LLM, ConfigError, PoolingParams, RequestError
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.tests.support.headed_checkpoints import Headed, headed_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.system.test_parity import VOCAB_SIZE, make_prompts

TOLERANCE = 1e-5
SIZE, INNER = 96, 40
MODULES = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Normalize", "Normalize")]
MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
PROMPTS = [prompt for prompt in make_prompts(10, 90, seed=3) if len(prompt) > 1]


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def modules(names: list[tuple[str, str]]) -> list[dict[str, object]]:
    package = "sentence_transformers.models"
    return [
        {"idx": index, "name": str(index), "path": path, "type": f"{package}.{kind}"}
        for index, (path, kind) in enumerate(names)
    ]


def sentence_folder(folder: Path, modes: list[str], *, is_old: bool = False) -> tuple[Headed, dict[str, torch.Tensor]]:
    """Write a folder with all modules; return the transformer and the dense layer's tensors."""
    made = headed_checkpoint(folder, "llama", "none", vocab_size=VOCAB_SIZE, hidden_size=SIZE, num_attention_heads=6)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write(folder, "config.json", config | {"matryoshka_dimensions": [INNER, 8]})
    write(folder, "modules.json", modules(MODULES))
    of_modes: dict[str, object] = {FLAGS[mode]: mode in modes for mode in MODES} if is_old else {"pooling_mode": modes}
    write(folder, "1_Pooling/config.json", {"word_embedding_dimension": SIZE, **of_modes})
    num_inputs = SIZE * len(modes)
    dense = {
        "in_features": num_inputs,
        "out_features": INNER,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    write(folder, "2_Dense/config.json", {**dense, "bias": True})
    torch.manual_seed(1)
    tensors = {"linear.weight": torch.randn(INNER, num_inputs) * 0.1, "linear.bias": torch.randn(INNER)}
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    return made, tensors


def pooled(states: torch.Tensor, mode: str) -> torch.Tensor:
    count = len(states)
    weights = torch.arange(1, count + 1.0).unsqueeze(1)
    found: dict[str, torch.Tensor] = {
        "cls": states[0],
        "max": states.amax(0),
        "mean": states.mean(0),
        "mean_sqrt_len_tokens": states.sum(0) / count**0.5,
        "weightedmean": (states * weights).sum(0) / weights.sum(),
        "lasttoken": states[-1],
    }
    return found[mode]


@pytest.mark.parametrize("modes", some([[mode] for mode in MODES], 1))
@pytest.mark.parametrize("is_old", some([True, False], 1))
def test_vectors_pass_the_modules_in_their_order(modes: list[str], is_old: bool, tmp_path: Path) -> None:
    made, dense = sentence_folder(tmp_path, modes, is_old=is_old)
    check(tmp_path, made, dense, modes)


@pytest.mark.parametrize("is_old", [True, False])
def test_the_vectors_of_several_modes_are_joined_in_the_order_of_their_list(is_old: bool, tmp_path: Path) -> None:
    modes = ["lasttoken", "cls", "mean"]
    made, dense = sentence_folder(tmp_path, modes, is_old=is_old)
    check(tmp_path, made, dense, [mode for mode in MODES if mode in modes] if is_old else modes)


def check(folder: Path, made: Headed, dense: dict[str, torch.Tensor], modes: list[str]) -> None:
    with LLM(folder, in_process=True, num_threads=1, max_model_len=128, max_num_batched_tokens=24) as llm:
        outputs = llm.embed(PROMPTS * 2, use_tqdm=False)
        cut = llm.embed(PROMPTS, PoolingParams(dimensions=8, use_activation=False), use_tqdm=False)
        with pytest.raises(RequestError, match=f"dimensions is {INNER + 1}, this model's vectors have {INNER}"):
            llm.embed(PROMPTS[:1], PoolingParams(dimensions=INNER + 1), use_tqdm=False)
        with pytest.raises(RequestError, match=rf"dimensions is 9, this model is trained for \[8, {INNER}\]: use one"):
            llm.embed(PROMPTS[:1], PoolingParams(dimensions=9), use_tqdm=False)
    for index, prompt in enumerate(PROMPTS * 2):
        joined = torch.cat([pooled(made.states(prompt), mode) for mode in modes])
        bare = torch.tanh(dense["linear.weight"] @ joined + dense["linear.bias"])
        found = torch.tensor(outputs[index].outputs.embedding)
        assert (found - bare / bare.norm()).abs().max() <= TOLERANCE
        if index < len(PROMPTS):
            assert (torch.tensor(cut[index].outputs.embedding) - bare[:8]).abs().max() <= TOLERANCE


def test_a_prompt_by_name_comes_before_a_text(tmp_path: Path) -> None:
    sentence_folder(tmp_path, ["mean"])
    prompts = {"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": "query"}
    write(tmp_path, "config_sentence_transformers.json", prompts)
    with LLM(tmp_path, in_process=True, num_threads=1, max_model_len=128) as llm:

        def ids(text: str, name: str | None) -> list[int]:
            (output,) = llm.embed(text, PoolingParams(prompt_name=name), use_tqdm=False)
            return output.prompt_token_ids

        assert ids("Oslo", None) == ids("Oslo", "query") == ids("Find: Oslo", "")
        assert ids("Oslo", "document") == ids("Oslo", "") == llm.tokenize("Oslo")
        with pytest.raises(
            RequestError, match=r"prompt_name is 'other', which the model does not have: name one of query, document"
        ):
            ids("Oslo", "other")


def test_the_length_at_which_texts_are_cut_is_the_models_limit(tmp_path: Path) -> None:
    sentence_folder(tmp_path, ["mean"])
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 64})
    with LLM(tmp_path, in_process=True, num_threads=1) as llm:
        assert llm.info().max_model_len == 64


REFUSED: list[tuple[str, Any, str]] = [
    ("modules.json", modules([*MODULES[:2], ("2_CNN", "CNN")]), "a module CNN, which is not supported"),
    ("modules.json", modules(MODULES[1:]), "the first module must be a Transformer"),
    ("modules.json", modules([*MODULES[:2], MODULES[3], MODULES[2]]), "Normalize must be the last module"),
    ("modules.json", modules([MODULES[0], *MODULES[2:]]), "no Pooling module before Dense"),
    ("modules.json", modules([*MODULES[:2], ("../x", "Dense")]), "leads out of the folder"),
    ("modules.json", modules([*MODULES[:2], ("9_Dense", "Dense")]), "9_Dense/config.json does not exist"),
    ("modules.json", {"a": 1}, "must list modules"),
    ("1_Pooling/config.json", {"pooling_mode": "median"}, r"the pooling \['median'\] is not supported"),
    ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "include_prompt false"),
    ("1_Pooling/config.json", {"pooling_mode": "mean", "embedding_dimension": 7}, "embedding_dimension is 7"),
    ("2_Dense/config.json", {"in_features": 7, "out_features": 8}, "in_features is 7, the module before gives 96"),
    ("2_Dense/config.json", {"in_features": SIZE, "activation_function": "my.Own"}, "activation_function Own"),
]


@pytest.mark.parametrize(("name", "content", "said"), REFUSED)
def test_a_wrong_module_is_refused_by_name(name: str, content: object, said: str, tmp_path: Path) -> None:
    sentence_folder(tmp_path, ["mean"])
    load_model_config(tmp_path)
    write(tmp_path, name, content)
    with pytest.raises(ConfigError, match=said):
        load_model_config(tmp_path)

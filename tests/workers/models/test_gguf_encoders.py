"""A GGUF file of each encoder of text has the hidden states of the checkpoint that it was made of, and pools as the
file says."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tokenloom import LLM, PoolingParams
from tokenloom.frontend.checkpoint.gguf.encoders.encoder_architectures import ENCODER_ARCHITECTURES
from tokenloom.frontend.checkpoint.gguf.folder import checkpoint_folder
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.served_model import served_model, with_floats
from tokenloom.scripts.bench.inputs.adapter_requests import linked_cache
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.encoder_conversions import POOLING, WRITERS, convert_encoder
from tokenloom.tests.support.headed_checkpoints import headed_checkpoint
from tokenloom.tests.support.text_encoders import encode, load, reference_hidden
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.models.test_text_encoders import TOLERANCE, error, prompts_of, types_of

CASES: dict[str, dict[str, object]] = {  # family: its fields
    "bert": {},
    "roberta": {"hidden_act": "gelu"},
    "xlm_roberta": {"architectures": ["XLMRobertaModel"]},
    "nomic": {"hidden_act": "silu"},
    "modernbert": {},
    "embedding_gemma": {
        "num_hidden_layers": 7,
        "sliding_window_pattern": 6,
        "rope_scaling": None,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 24,
    },
}
Q8_BOUND = 0.03  # of the largest element, for matrices of Q8_0 with random weights


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(linked_cache(tmp_path / "cache")))


def test_all_architectures_are_tested() -> None:
    assert {architecture for architecture, _ in WRITERS.values()} == {*ENCODER_ARCHITECTURES, "qwen3"}


@pytest.mark.parametrize("family", some(list(CASES), 3))
def test_hidden_states_are_those_of_the_original(family: str, tmp_path: Path) -> None:
    folder, prompts = tiny_checkpoint(tmp_path / "model", family, seed=1, **CASES[family]), prompts_of(2)
    types = types_of(folder, prompts)
    expected = reference_hidden(folder, prompts, types)
    for form, bound in (("F32", TOLERANCE), ("Q8_0", Q8_BOUND)):
        file = tmp_path / f"{form}.gguf"
        convert_encoder(folder, file, form)
        made = checkpoint_folder(file)
        config = with_floats(served_model(EngineConfig(), made))
        assert config.is_encoder and config.pooling.methods == ["mean"] and config.pooling.is_normalized
        actual = encode(load(made, config=config), [prompts], types)
        errors = [error(actual[name], expected[name]) for name in prompts]
        assert max(errors) <= bound
        assert form == "F32" or max(errors) > TOLERANCE


def start(file: Path) -> LLM:
    return LLM(file, in_process=True, num_threads=1, max_model_len=128, dtype="float32")


POOLED = [("embedding_gemma", POOLING.MEAN, 2), ("embedding_gemma", POOLING.CLS, 2), ("qwen3", POOLING.LAST, 0)]


@pytest.mark.parametrize(("family", "pooling", "num_dense"), some(POOLED, 2))
def test_vectors_pass_the_pooling_and_the_dense_layers_of_the_file(
    family: str, pooling: int, num_dense: int, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(tmp_path / "model", family, seed=1, **CASES.get(family, {}))
    generator = np.random.default_rng(1)
    dense = [generator.standard_normal(shape, np.float32) * 0.1 for shape in ((96, 64), (64, 96))][:num_dense]
    convert_encoder(folder, tmp_path / "model.gguf", pooling=pooling, dense=dense)
    prompts = {name: ids for name, ids in prompts_of(2).items() if name in "ac"}
    states = reference_hidden(folder, prompts, {})
    with start(tmp_path / "model.gguf") as llm:
        outputs = llm.embed(list(prompts.values()), use_tqdm=False)
    for name, output in zip(prompts, outputs, strict=True):
        own = states[name]
        vector = {POOLING.MEAN: own.mean(0), POOLING.CLS: own[0], POOLING.LAST: own[-1]}[gguf.PoolingType(pooling)]
        for matrix in dense:
            vector = torch.from_numpy(matrix) @ vector
        assert (torch.tensor(output.outputs.embedding) - vector / vector.norm()).abs().max() <= TOLERANCE


def test_the_head_of_a_reranker_gives_its_logits(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    made = headed_checkpoint(tmp_path / "model", "bert", "sequence", 2)
    convert_encoder(tmp_path / "model", tmp_path / "model.gguf", pooling=POOLING.RANK)
    prompts = [list(range(5, 5 + length)) for length in (1, 9, 40)]
    with start(tmp_path / "model.gguf") as llm:
        outputs = llm.encode(prompts, PoolingParams(use_activation=False), pooling_task="classify", use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert (torch.tensor(output.outputs.data) - made.logits(prompt)).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    ("pooling", "words"),
    [
        (9, r"bert.pooling_type 9 is not known, known are 0, 1, 2, 3, 4"),
        (POOLING.RANK, "tensor cls.weight of the head"),
    ],
)
def test_a_pooling_that_cannot_be_served_is_refused_by_name(pooling: int, words: str, tmp_path: Path) -> None:
    convert_encoder(tiny_checkpoint(tmp_path / "model", "bert"), tmp_path / "model.gguf", pooling=pooling)
    with pytest.raises(ConfigError, match=words):
        checkpoint_folder(tmp_path / "model.gguf")

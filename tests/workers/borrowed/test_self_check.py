"""The self-check passes the models that are served correctly, and no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import transformers
from torch import Tensor

from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.checkpoints import tiny_config
from tokenloom.tests.support.today import some
from tokenloom.workers.borrowed.attention import Unserved
from tokenloom.workers.borrowed.check_steps import LENGTHS, STEPS, packed_steps
from tokenloom.workers.borrowed.reduced_config import WINDOW, reduced_config
from tokenloom.workers.borrowed.self_check import check_architecture


def config_of(model_type: str, **fields: object) -> transformers.PreTrainedConfig:
    """Return the defaults of a model type, with small layers."""
    config: transformers.PreTrainedConfig = transformers.CONFIG_MAPPING[model_type](**fields)
    return reduced_config(config, has_small_sizes=True)


def gemma3() -> transformers.PreTrainedConfig:
    fields = tiny_config("gemma3_text")
    found: transformers.PreTrainedConfig = transformers.CONFIG_MAPPING["gemma3_text"].from_dict(fields)
    return found


class Forgetful(ReferenceOps):
    """Stores no key of a chunk's first token if the chunk continues a prompt."""

    def store_kv(self, key: Tensor, value: Tensor, *rest: Any) -> None:
        metadata = rest[-1]
        if metadata.seq_lens_host[0] > metadata.query_starts_host[1]:
            key = key.clone()
            key[0] = 0
        super().store_kv(key, value, *rest)


class LeftHanded(ReferenceOps):
    """Gives one head of each token the numbers of another."""

    def paged_attention(self, *args: Any) -> Tensor:
        return super().paged_attention(*args).roll(1, dims=1)


class Farsighted(ReferenceOps):
    """Lets a token attend beyond its window by a position."""

    def paged_attention(self, *args: Any) -> Tensor:
        *others, spec = args
        window = None if spec.window is None else spec.window + 1
        return super().paged_attention(*others, dataclasses.replace(spec, window=window))


class Blurred(ReferenceOps):
    """Is off by a tenth of a percent."""

    def paged_attention(self, *args: Any) -> Tensor:
        return super().paged_attention(*args) * 1.001


@pytest.mark.parametrize("broken", some([Forgetful, LeftHanded, Farsighted, Blurred], 1))
def test_a_broken_attention_is_found_and_its_layer_named(broken: Callable[[], ReferenceOps]) -> None:
    with pytest.raises(Unserved, match=r"in the self-check.* its layer 0 .sliding_attention. differs"):
        check_architecture(gemma3(), broken())


def test_a_sound_model_passes() -> None:
    assert check_architecture(gemma3()) is False


@pytest.mark.parametrize("model_type", some(["mamba", "falcon_mamba"], 1))
def test_layers_that_forget_their_state_in_a_chunk_get_single_tokens(model_type: str) -> None:
    assert check_architecture(config_of(model_type)) is True


@pytest.mark.parametrize("window", some([None, 4096], 1))
def test_a_window_that_no_row_fills_is_not_missed(window: int | None) -> None:
    config = transformers.CONFIG_MAPPING["phimoe"](sliding_window=window, max_position_embeddings=4096)
    assert check_architecture(config) is False


@pytest.mark.parametrize(
    ("model_type", "fields"),
    some(
        [
            ("phimoe", {"sliding_window": WINDOW}),
            ("diffllama", {}),
            ("doge", {}),
            ("inkling_text", {}),
            ("rwkv", {}),
            ("codegen", {}),
            ("bloom", {}),
            ("recurrent_gemma", {}),
            ("hrm_text", {}),
        ],
        2,
    ),
)
def test_types_that_compute_beside_our_attention_are_found_without_their_names(
    model_type: str, fields: dict[str, object]
) -> None:
    with pytest.raises(Unserved):
        check_architecture(config_of(model_type, **fields))


def test_the_steps_of_a_check_compute_each_token_once_over_scattered_blocks() -> None:
    tokens = [np.arange(length, dtype=np.int32) for length in LENGTHS]
    slots = []
    seen: dict[int, list[int]] = {row: [] for row in range(len(LENGTHS))}
    for inputs, spans in packed_steps(tokens):
        slots += inputs.groups[0].slots.tolist()
        for span in spans:
            seen[span.row] += inputs.token_ids[span.tokens].tolist()
    assert [seen[row] for row in seen] == [token.tolist() for token in tokens]
    assert len(set(slots)) == sum(LENGTHS) == sum(map(sum, STEPS)) and sorted(slots) != slots
    assert max(LENGTHS) > 3 * WINDOW

"""Positions of prompts with images are those of transformers' get_rope_index."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from tokenloom.tests.workers.features.media.test_media_rows import IMAGE_ID, MERGE, Prompt
from tokenloom.workers.features.media.row_spans import RowSpans

THEIRS = {"qwen2_vl": Qwen2VLModel, "qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}


@pytest.mark.parametrize("family", THEIRS)
def test_positions_are_those_of_transformers(family: str) -> None:
    theirs: Any = object.__new__(THEIRS[family])
    tower = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=4, temporal_patch_size=2)
    theirs.__dict__["config"] = SimpleNamespace(vision_config=tower)
    rng = np.random.default_rng(3)
    for _ in range(20):
        parts = list[int | tuple[int, int]]()
        for _ in range(rng.integers(1, 5)):
            parts += [int(rng.integers(1, 5)), (int(rng.integers(1, 6)), int(rng.integers(1, 6)))]
        prompt = Prompt([*parts, 2])
        ids = torch.tensor([prompt.token_ids])
        grids = torch.tensor([span[2:] for span in prompt.spans])
        expected, deltas = theirs.get_rope_index(ids, (ids == IMAGE_ID).int(), image_grid_thw=grids)
        spans = RowSpans(prompt.new_row(0), IMAGE_ID, MERGE)
        assert np.array_equal(spans.positions(0, ids.shape[1]), expected[:, 0].numpy())
        assert spans.shift == int(deltas[0, 0])

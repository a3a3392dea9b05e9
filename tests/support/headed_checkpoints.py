"""Tiny random-weight checkpoints of models with a classification head, and of models without any.

transformers makes and saves them, so that names and files are its own; `oracle` is the model that it made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from . import text_encoders
from .checkpoints import tiny_checkpoint

Head = Literal["none", "sequence", "token", "reward", "steps"]
CLASSES: dict[Head, Any] = {
    "none": AutoModel,
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}
REWARDS = {"reward": "ForRewardModel", "steps": "ForProcessRewardModel"}


class Headed(NamedTuple):
    folder: Path
    oracle: nn.Module

    @torch.inference_mode()
    def states(self, token_ids: list[int]) -> torch.Tensor:
        """Return transformers' last hidden states [tokens, hidden_size] of a prompt."""
        base = self.oracle.base_model if isinstance(self.oracle, PreTrainedModel) else self.oracle[0]
        found: torch.Tensor = base(torch.tensor([token_ids])).last_hidden_state[0]
        return found

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Return transformers' logits of a prompt: [classes], or [tokens, classes] of a head of tokens."""
        if isinstance(self.oracle, nn.Sequential):
            return self.oracle[1](self.states(token_ids))
        found: torch.Tensor = self.oracle(torch.tensor([token_ids])).logits[0]
        return found


def headed_checkpoint(folder: Path, family: str, head: Head, num_labels: int = 3, **fields: object) -> Headed:
    """Write a checkpoint of `family` with a head. `fields` replace those of config.json, of the head's too."""
    layers = {} if family in text_encoders.CONFIGS else {"num_hidden_layers": 2}
    tiny_checkpoint(folder, family, **layers, **fields)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    path = folder / "config.json"
    config = AutoConfig.from_pretrained(folder)
    config.num_labels = num_labels
    if layers:
        config.pad_token_id = None  # else transformers looks for it in a prompt, whose last token it reads
    torch.manual_seed(7)
    if head in REWARDS:
        return _reward_checkpoint(folder, config, head, num_labels)
    model = CLASSES[head].from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.startswith(("score", "classifier")):
            nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(folder)
    written = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(written | fields), encoding="utf-8")
    return Headed(folder, model)


def _reward_checkpoint(folder: Path, config: Any, head: Head, num_labels: int) -> Headed:
    """Write a checkpoint of Qwen2.5-Math's form, whose code is not in transformers."""
    base = AutoModel.from_config(config, dtype=torch.float32).eval()
    size = config.hidden_size
    score = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, num_labels))
    for parameter in score.parameters():
        nn.init.normal_(parameter, std=0.3)
    tensors = {f"model.{name}": value for name, value in base.state_dict().items()}
    tensors |= {f"score.{name}": value for name, value in score.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    written = config.to_dict() | {"architectures": [f"Qwen2{REWARDS[head]}"], "num_labels": num_labels}
    (folder / "config.json").write_text(json.dumps(written), encoding="utf-8")
    return Headed(folder, nn.Sequential(base, score))

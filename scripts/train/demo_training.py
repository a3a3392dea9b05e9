"""Parts of the trainings of the demo's vision and audio models: steps, state between runs, options and files.

A linear layer, the helper, names the content of its input. It trains the encoder several times faster than
the answers alone, and is thrown away at the end.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tokenloom.scripts.train.train_demo_model import learning_rate, new_optimizer

DEMO = Path(__file__).resolve().parents[2] / "demo"
PEAK_LEARNING_RATE = 2e-3
NO_LOSS = -100  # label of a token that is not learned
STEPS_TO_SAVE = 50


class HelpedTraining:
    """The model, its helper and the optimizer. `save` and `load` keep all of them between runs."""

    def __init__(self, model: PreTrainedModel, helper: torch.nn.Linear) -> None:
        self._helped, self._helper = model, helper
        self._parameters = [each for each in (*model.parameters(), *helper.parameters()) if each.requires_grad]
        self._optimizer = new_optimizer(self._parameters)
        self.step_number = 0

    def losses(self) -> tuple[Tensor, Tensor]:
        """Return the losses of the answers and of the helper for the batch of `step_number`."""
        raise NotImplementedError

    def step(self, num_steps: int) -> tuple[float, float]:
        """Train with one batch; return the losses of the answers and of the helper."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.step_number, num_steps, PEAK_LEARNING_RATE)
        loss, helper_loss = self.losses()
        torch.autograd.backward(loss + helper_loss)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step_number += 1
        return loss.item(), helper_loss.item()

    def save(self, file: Path) -> None:
        states = [self._helped.state_dict(), self._helper.state_dict(), self._optimizer.state_dict()]
        torch.save([self.step_number, *states], file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def load(self, file: Path) -> None:
        self.step_number, *states = torch.load(file, weights_only=True)
        parts: tuple[Any, ...] = (self._helped, self._helper, self._optimizer)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)

    def run(self, file: Path, num_steps: int) -> None:
        """Train from the state in `file`, if there is one, up to `num_steps`; save the state and print the losses."""
        begun = time.process_time()
        if file.exists():
            self.load(file)
        print(f"{self._helped.num_parameters()} parameters, from step {self.step_number}", flush=True)
        while self.step_number < num_steps:
            loss, helper_loss = self.step(num_steps)
            if self.step_number % STEPS_TO_SAVE == 0 or self.step_number == num_steps:
                self.save(file)
                seconds = time.process_time() - begun
                print(f"step {self.step_number} loss {loss:.3f} + {helper_loss:.3f} after {seconds:.0f} s", flush=True)


def parse_options(description: str, name: str, kind_of_state: str, num_steps: int, step: str) -> argparse.Namespace:
    """Parse the command line of the training of demo/`name`, set torch's seed and threads. step: the content of one."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, default=DEMO / name, help=f"folder (default: demo/{name})")
    state = Path(f"demo_{name}.state")
    parser.add_argument("--state", type=Path, default=state, help=f"{kind_of_state} to go on from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=num_steps, help=f"of {step} each")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; another number gives other roundings")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    return arguments

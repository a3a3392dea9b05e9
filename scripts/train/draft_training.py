"""The training of a draft head: its first weights, the loss of several guesses behind each other, and the share of
guesses that are right.

The loss is EAGLE-3's: each guess feeds the next one with the head's own state, and is compared with the probabilities
that the model gives the draft vocabulary at that place. The rows of lm_head are the model's and stay so: few texts
hardly teach those of seldom tokens. fc's inputs are scaled by channel while it is trained: the states of some
channels are thousands of times as large as those of others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tokenloom.scripts.train.draft_head import DraftHead, Keys
from tokenloom.scripts.train.draft_target import States, Target
from tokenloom.scripts.train.draft_windows import GREEDY, StateFile, Windows
from tokenloom.scripts.train.train_demo_model import new_optimizer

LATER_WEIGHT = 0.8  # of a guess, to that of the guess before
WARM_UP = 0.05  # of the time
FC_SHARE = 0.1  # of the learning rate: fc begins with a good fit, which steps of all its many inputs would spoil
LEAST_RATE = 0.02  # of the peak, at the end
RIDGE = 0.1  # of the mean square of an input
SAMPLED_WINDOWS = 40  # for the scale of fc's inputs
FITTED_WINDOWS = 1000  # for its first weights
LAYER_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
REPORT_S = 20


class Batch(NamedTuple):
    """Some windows and the model's states of them, fc's inputs already scaled."""

    windows: Windows
    states: States


class Accepted(NamedTuple):
    """Counts of greedy answers' places with that many drafts: how many there are, and for how many all were right."""

    places: list[int]
    right: list[int]

    def __str__(self) -> str:
        rates = [right / max(places, 1) for right, places in zip(self.right, self.places, strict=True)]
        joint = ", ".join(f"{rate:.3f}" for rate in rates)
        given = ", ".join(f"{rate / max(before, 1e-9):.3f}" for before, rate in zip([1.0, *rates], rates, strict=False))
        return f"first n drafts all right {joint}; each if those before were {given}; places {self.places[0]}"


class HeadTraining:
    """A head, the model and the data of its training. `num_held_out` windows at the end are for measuring alone."""

    def __init__(
        self, target: Target, head: DraftHead, windows: Windows, states: StateFile, num_held_out: int, num_steps: int
    ) -> None:
        """num_steps: guesses behind each other."""
        self._target, self.head, self._windows, self._states = target, head, windows, states
        self._num_steps = num_steps
        self._num_trained = states.num_windows - num_held_out
        self._scale = torch.ones(head.fc.in_features)
        self._rows = target.head[head.draft_ids]  # of the draft vocabulary
        self._scale = self._measured_scale()

    def start(self) -> None:
        """Set the first weights: fc gives, as nearly as a linear map can, the model's last state of the next token. The
        layer adds nothing to it yet; its inner weights are those of the model's last layer. norm and lm_head are the
        model's."""
        head = self.head
        layer = dict(self._target.layers[-1].named_parameters())
        with torch.no_grad():
            for name, parameter in head.midlayer.named_parameters():
                if name in LAYER_OUTPUTS:
                    parameter.zero_()
                elif name == "hidden_norm.weight":
                    parameter.copy_(layer["input_layernorm.weight"])
                elif parameter.shape == layer[name].shape:
                    parameter.copy_(layer[name])
                else:  # q, k and v read the embedding and the state
                    width = layer[name].shape[1]
                    parameter[:, :width].normal_(std=width**-0.5)
                    parameter[:, width:].copy_(layer[name])
            head.midlayer.input_layernorm.weight.fill_(1.0)
            head.norm.weight.copy_(self._target.norm)
            head.lm_head.weight.copy_(self._rows)
            head.fc.weight.copy_(self._linear_map())
        head.lm_head.weight.requires_grad_(False)

    def train(self, seconds: float, max_steps: int, peak_rate: float, num_windows: int) -> None:
        """Train with batches of `num_windows` until the seconds are over, at most `max_steps`."""
        trained = [each for each in self.head.parameters() if each.requires_grad]
        optimizer = new_optimizer([each for each in trained if each is not self.head.fc.weight])
        optimizer.add_param_group({"params": [self.head.fc.weight], "weight_decay": 0.0, "share": FC_SHARE})
        begun = reported = time.monotonic()
        step = num_tokens = 0
        while (share := max((time.monotonic() - begun) / max(seconds, 1e-3), step / max_steps)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = peak_rate * rate_at(share) * group.get("share", 1.0)
            batch = self._batch(self._drawn(step, num_windows))
            losses = self.losses(batch)
            weights = torch.tensor([LATER_WEIGHT**index for index in range(len(losses))])
            torch.autograd.backward((torch.stack(losses) * weights).sum() / weights.sum())
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            num_tokens += batch.windows.ids.numel()
            if step in (1, max_steps) or time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                each = " ".join(f"{loss.item():.3f}" for loss in losses)
                print(f"step {step} loss {each} after {reported - begun:.0f} s, {num_tokens} tokens", flush=True)

    def losses(self, batch: Batch) -> list[Tensor]:
        """Return each guess's loss: the mean cross entropy to the model's probabilities in the draft vocabulary."""
        windows, length = batch.windows, batch.windows.ids.shape[1]
        with torch.no_grad():
            wanted = (batch.states.last.flatten(0, 1) @ self._rows.T).softmax(-1)
        losses = []
        for step, states in enumerate(self._guesses(batch)):
            is_known = windows.later(windows.texts, step + 1, -1) >= 0
            is_known &= windows.positions > 0  # a text's first token has states like no other
            places = is_known.flatten().nonzero().squeeze(1)
            logits = self.head.logits(states.flatten(0, 1)[places])
            aims = wanted[places + step + 1]
            losses.append((logits.logsumexp(-1) - (logits * aims).sum(-1)).mean())
            assert places[-1] + step + 1 < len(windows.ids) * length
        return losses

    @torch.inference_mode()
    def accepted(self, num_drafts: int, at_once: int = 4) -> Accepted:
        """Count, in greedy answers of held-out windows, the places where the next 1 … num_drafts drafts are right."""
        counts = Accepted([0] * num_drafts, [0] * num_drafts)
        for start in range(self._num_trained, self._states.num_windows, at_once):
            stop = min(start + at_once, self._states.num_windows)
            batch = self._batch(torch.arange(start, stop))
            windows = batch.windows
            are_right = windows.later(windows.kinds, 1, 0) == GREEDY
            for step, states in enumerate(self._guesses(batch, num_drafts)):
                drafts = self.head.draft_ids[self.head.logits(states).argmax(-1)]
                has_next = windows.later(windows.kinds, step + 2, 0) == GREEDY
                has_next &= windows.later(windows.kinds, 1, 0) == GREEDY
                are_right &= has_next & (drafts == windows.later(windows.ids, step + 2, -1))
                counts.places[step] += int(has_next.sum())
                counts.right[step] += int(are_right.sum())
        return counts

    def finished(self) -> DraftHead:
        """Return the head for states that are not scaled. It is to be trained no more."""
        with torch.no_grad():
            self.head.fc.weight.div_(self._scale)
        self._scale = torch.ones_like(self._scale)
        return self.head

    def _guesses(self, batch: Batch, num_steps: int = 0) -> Iterator[Tensor]:
        """Yield the head's states of each guess of all places."""
        windows, earlier = batch.windows, list[Keys]()
        places = windows.places()
        states = self.head.fc(batch.states.aux)
        for step in range(num_steps or self._num_steps):
            tokens = windows.later(windows.ids, step + 1, 0)
            states = self.head.step(self._target.embeddings[tokens], states, places, earlier)
            yield states

    def _drawn(self, step: int, num_windows: int) -> Tensor:
        """Return the windows of a step: all once, in any order, before one comes again."""
        per_round = max(self._num_trained // num_windows, 1)
        order = torch.randperm(self._num_trained, generator=torch.Generator().manual_seed(step // per_round))
        index = step % per_round
        return order[index * num_windows : (index + 1) * num_windows]

    def _batch(self, chosen: Tensor) -> Batch:
        aux, last = self._states.read(chosen)
        return Batch(Windows(*(each[chosen] for each in self._windows)), States(aux / self._scale, last))

    def _measured_scale(self) -> Tensor:
        """Return the root mean square of each of fc's inputs, over some windows."""
        batch = self._batch(torch.arange(min(self._num_trained, SAMPLED_WINDOWS)))
        is_used = batch.windows.positions > 0
        return batch.states.aux[is_used].square().mean(0).sqrt().clamp_min(1e-6)

    def _linear_map(self) -> Tensor:
        """Return the weights that fit fc's outputs to the model's last states of the next tokens, without their norm's
        weights, by least squares."""
        square = torch.zeros(len(self._scale), len(self._scale))
        product = torch.zeros(len(self._scale), self.head.config.hidden_size)
        num_tokens = 0
        for number in range(min(self._num_trained, FITTED_WINDOWS)):
            windows, (aux, last) = self._batch(torch.tensor([number]))
            is_used = (windows.later(windows.texts, 1, -1) >= 0) & (windows.positions > 0)
            inputs = aux[is_used]
            square += inputs.T @ inputs
            product += inputs.T @ (last.roll(-1, 1)[is_used] / self._target.norm)
            num_tokens += len(inputs)
        square.diagonal().add_(RIDGE * num_tokens)
        return torch.linalg.solve(square, product).T


def rate_at(share: float) -> float:
    """Return the learning rate's share of its peak after that share of the time."""
    if share < WARM_UP:
        return max(share / WARM_UP, LEAST_RATE)
    return LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP)))

"""Resampler: audio of any rate at SAMPLE_RATE, block by block, by a windowed sinc.

Output n is the sum of inputs k times h(n · down / up - k). h is a sinc that cuts at ROLLOFF of the lower of both
Nyquist frequencies, under a Kaiser window over ZEROS of its zeros on each side. It passes frequencies up to 0.87 of the
lower Nyquist frequency and suppresses those above 1.03 of it by more than 100 dB. Outputs repeat their weights after
`up`; those of some adjacent outputs are a matrix, by which the inputs of many periods are multiplied at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...ipc.spec.models.audio_config import SAMPLE_RATE
from .sound import Samples

ZEROS = 64
ROLLOFF = 0.9475
BETA = 14.77  # of the Kaiser window
GROUP = 128  # outputs that a matrix makes; fewer only if the period has fewer
MIN_PERIODS = 16  # that are made at once: a rate like 44,099 Hz has a period of a second, and 125 matrices
MAX_PRODUCT = 1 << 20  # elements of the inputs of a matrix product
WEIGHTS_AT_ONCE = 1 << 18


class Resampler:
    """Holds the inputs that further outputs need."""

    def __init__(self, rate: int) -> None:
        """`rate`: of the input, in Hz."""
        divisor = math.gcd(rate, SAMPLE_RATE)
        up, down = SAMPLE_RATE // divisor, rate // divisor
        repeats = max(1, GROUP // up)  # a period of outputs, and of inputs
        self._outputs, self._inputs = up * repeats, down * repeats
        self._ratio = down / up
        self._reach = math.ceil(ZEROS * max(1.0, self._ratio))  # inputs on each side of an output
        self._weights = None if rate == SAMPLE_RATE else self._all_weights(up, down)
        self._held: Samples = np.zeros(self._reach, np.float32)  # from `reach` inputs before the next output
        self._num_inputs = self._num_outputs = 0

    def feed(self, block: Samples) -> Samples:
        """Return the outputs that further inputs cannot change, of all those that were not returned before."""
        if self._weights is None:
            return block
        self._num_inputs += len(block)
        self._held = np.concatenate([self._held, block])
        is_enough = len(self._held) >= 2 * self._reach + MIN_PERIODS * self._inputs
        return self._made() if is_enough else np.zeros(0, np.float32)

    def finish(self) -> Samples:
        """Return the last outputs: in all, those at times before the end of the input."""
        if self._weights is None:
            return np.zeros(0, np.float32)
        num_left = -(-self._num_inputs * self._outputs // self._inputs) - self._num_outputs
        self._held = np.concatenate([self._held, np.zeros(self._inputs + 2 * self._reach, np.float32)])
        return self._made()[:num_left]

    def _made(self) -> Samples:
        """Make the outputs of whole periods, and drop the inputs that no later one needs."""
        num_periods = max(0, (len(self._held) - 2 * self._reach) // self._inputs)
        made = np.empty((num_periods, self._outputs), np.float32)
        if num_periods:
            for first, last in self._groups():
                self._multiply(made[:, first:last], first)
        self._held = self._held[num_periods * self._inputs :].copy()
        self._num_outputs += made.size
        return made.reshape(-1)

    def _groups(self) -> Iterator[tuple[int, int]]:
        for first in range(0, self._outputs, GROUP):
            yield first, min(first + GROUP, self._outputs)

    def _multiply(self, made: Samples, first: int) -> None:
        """Write the outputs [first, first + n) of all periods: made is [periods, n]."""
        num_periods, num_outputs = made.shape
        begin = self._base(first)
        span = self._base(first + num_outputs - 1) + 2 * self._reach - begin
        matrix = np.zeros((span, num_outputs), np.float32)
        assert self._weights is not None
        for column in range(num_outputs):
            row = self._base(first + column) - begin
            matrix[row : row + 2 * self._reach, column] = self._weights[(first + column) % len(self._weights)]
        inputs = np.lib.stride_tricks.sliding_window_view(self._held[begin:], span)[:: self._inputs][:num_periods]
        step = max(1, MAX_PRODUCT // span)
        for period in range(0, num_periods, step):
            np.matmul(inputs[period : period + step].copy(), matrix, out=made[period : period + step])

    def _base(self, output: int) -> int:
        """Return the first input of an output of a period, from the first held one."""
        return output * self._inputs // self._outputs + 1

    def _all_weights(self, up: int, down: int) -> Samples:
        """Return the weights of the inputs of each output: [up, 2 · reach]. Those of an output sum to 1."""
        weights = np.empty((up, 2 * self._reach), np.float32)
        cutoff = ROLLOFF / max(1.0, self._ratio)
        places = np.arange(1 - self._reach, self._reach + 1)
        step = max(1, WEIGHTS_AT_ONCE // len(places))
        for first in range(0, up, step):
            phases = np.arange(first, min(first + step, up)) * down % up / up
            times = phases[:, None] - places
            window = np.i0(BETA * np.sqrt(np.maximum(0.0, 1 - (times / self._reach) ** 2)))
            rows = np.sinc(cutoff * times) * window
            weights[first : first + step] = rows / rows.sum(axis=1, keepdims=True)
        return weights

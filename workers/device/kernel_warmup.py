"""KernelWarmup: compiles and loads Triton kernels in threads while the weights are read.

A model of the same shapes on meta tensors runs the steps of the start and common steps, and the kernels that it
launches are compiled. So there is no list of kernels to maintain; a missing kernel is compiled when first launched.
Triton caches compiled kernels on disk for the next start.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import torch
from torch import Tensor

from ...ipc.errors import ConfigError
from ...ipc.spec.models.model_config import ModelConfig
from ...kernels.gpu.compile import Kernels, compiling, load, unfinished
from ...kernels.gpu.sampling.logprobs import logsumexp
from ..machine.parallel import NullGroup
from ..sampling.sampling_columns import SamplingColumns
from ..step.model_step import Model, StepContext, cache_groups, compute, step_arrays
from ..step.profile import StepLimits, dummy_step, largest_steps, with_adapters
from ..step.step_inputs import StepInputs
from ..step.step_layout import MediaInputs
from .cuda_graphs import Step
from .device_runner import DeviceRunner

logger = logging.getLogger("tokenloom.worker")

MAX_THREADS = 8

META_DEVICE = torch.device("meta")


class KernelWarmup:
    """Compilation in a thread that the constructor starts. If it fails, the error is logged, and kernels are compiled
    when they are first launched."""

    def __init__(self, launch: Callable[[], None], device: torch.device) -> None:
        """Start a thread that calls `launch` and, instead of running the kernels launched there, compiles them for
        `device`."""
        self.num_kernels = 0
        self.duration_s = 0.0
        self._launch, self._device = launch, device
        self._kernels: Kernels = {}
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="compile", daemon=True)
        self._thread.start()

    def wait(self, limit_s: float) -> None:
        """Block until all kernels are compiled. ConfigError if that takes more than `limit_s` since the
        construction."""
        self._thread.join(max(self._begun + limit_s - time.monotonic(), 0.0))
        if self._thread.is_alive():
            names = ", ".join(unfinished(self._kernels)) or "none in threads"
            raise ConfigError(
                f"kernels are still compiling after {limit_s:.3g} s ({names}): raise --start-timeout-s, or set "
                "--enforce-reference to run without kernels"
            )

    def _run(self) -> None:
        try:
            self._choose_device()
            num_threads = min(os.cpu_count() or 1, MAX_THREADS)
            with ThreadPoolExecutor(num_threads, initializer=self._choose_device) as threads:
                with torch.inference_mode(), compiling(threads) as self._kernels:
                    self._launch()
                    self.num_kernels = len(self._kernels)
                load(self._kernels, threads)
        except ConfigError:
            pass  # loading the weights raises the same error
        except Exception as error:
            logger.warning(
                "kernels are compiled when first launched, not ahead: %s: %.100s", type(error).__name__, error
            )
        self.duration_s = time.monotonic() - self._begun

    def _choose_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)


def run_eagerly(step: Step) -> Step:
    """Return the step itself as its replay: a Recorder that records nothing."""
    return step


def distinct_layers(config: ModelConfig) -> ModelConfig:
    """Return the config cut to the first layers that include every kind of layer: the others launch the same
    kernels."""
    count = 1 + max(config.layers.index(layer) for layer in config.layers)
    return msgspec.structs.replace(config, num_layers=count, layers=config.layers[:count])


def _doubling_prompts(most: int, longest: int) -> Iterator[list[int]]:
    """Yield the prompt lengths of steps of about 1, 2, 4, … ≤ `most` tokens, each prompt at most `longest`."""
    for k in range(most.bit_length()):
        num_rows = -(-(1 << k) // longest)
        yield [(1 << k) // num_rows] * num_rows


def launch_steps(
    model: Model,
    kv_caches: Sequence[Tensor],
    limits: StepLimits,
    group: NullGroup,
    has_graphs: bool,
    has_adapters: bool = False,
    *,
    has_shifts: bool = False,
    has_spans: bool = False,
) -> None:
    """Launch the decode steps recorded at the start, the largest steps, prompts of 1, 2, 4, … tokens, and logprobs;
    with `has_adapters` (the model's layers have slots) also with adapters. `has_shifts`: rows have position shifts.
    `has_spans`: also launch a prompt with spans, whose tokens attend to later ones."""
    block_size, num_groups = kv_caches[0].shape[4], len(kv_caches)
    recorder = run_eagerly if has_graphs else None
    max_num_seqs = limits.max_num_seqs
    longest = limits.max_model_len
    shifts = np.zeros(max_num_seqs, np.int64) if has_shifts else None
    runner = DeviceRunner(
        model, kv_caches, max_num_seqs, longest, group, recorder, has_adapters=has_adapters, shifts=shifts
    )
    most = min(limits.max_num_tokens, max_num_seqs * longest)
    prompts = [dummy_step(counts, counts, block_size, num_groups) for counts in _doubling_prompts(most, longest)]
    steps = [*largest_steps(limits, block_size, num_groups), *prompts]
    for inputs in [*steps, *(map(with_adapters, steps) if has_adapters else ())]:
        runner.rows.clear()  # the next dummy step has other blocks
        runner.launch(inputs, SamplingColumns.greedy(len(inputs.sampled_rows)))
    logsumexp(compute(model, prompts[0], kv_caches)[1])
    if has_adapters:
        compute(model, with_adapters(prompts[0]), kv_caches)
    if has_spans:
        launch_spans(model, prompts[-1], kv_caches)


def launch_spans(model: Model, inputs: StepInputs, kv_caches: Sequence[Tensor]) -> None:
    """Launch a step in which tokens attend to later tokens."""
    arrays = (inputs.token_ids, inputs.sampled_tokens, *step_arrays(inputs))
    token_ids, logits_indices, *rest = [torch.from_numpy(each).to(kv_caches[0].device) for each in arrays]
    seeing = MediaInputs(is_behind_spans=False, see_until=token_ids.int())
    groups = cache_groups(inputs._replace(media=seeing), kv_caches, rest)
    model.forward_logits(token_ids, logits_indices, StepContext(groups))

"""The self-check of a borrowed architecture: packed, chunked and paged steps must give the numbers of transformers.

A model that ignores our attention function, or keeps a state in a place of its own, still runs, and its answers look
plausible. So, when a model is loaded, a small model of its architecture with random weights runs twice in float32: as
it is served, and as transformers runs it. Every layer's output and all logits must agree.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ...kernels.reference import ReferenceOps
from ...kernels.select import Ops
from ..machine.parallel import ParallelGroup
from ..step.model_step import compute
from .attention import IMPLEMENTATION, Unserved
from .check_steps import BLOCK_SIZE, LENGTHS, NUM_BLOCKS, packed_steps
from .model import BorrowedModel
from .reduced_config import VOCAB_SIZE, WINDOW, reduced_config
from .shards import shard_model

TOLERANCE = 2e-4  # of logits and hidden states, relative to the largest
MAX_PARAMETERS = 24_000_000  # of a reduced model that is checked with its real widths
SPREAD = 0.3  # standard deviation added to weights that are initialized with constants, such as norms
STALE = 1e3  # initial content of KV blocks
CHECKED_RANKS = 2  # the only group size that is checked: the heads of a reduced model do not suffice for more ranks


@dataclass(frozen=True)
class Difference:
    """The first place where the two models disagree. layer: −1 if all layers agree but logits do not. position: the
    index of the chunk's first token in its row."""

    layer: int
    kind: str
    position: int

    def __str__(self) -> str:
        if self.layer < 0:
            return "its logits differ from those of its own forward pass, though its layers agree"
        kind = f" ({self.kind})" if self.kind else ""
        where = "in a chunk that continues a prompt" if self.position else "at the begin of a prompt"
        return f"its layer {self.layer}{kind} differs {where} from its own forward pass"


def check_architecture(config: PreTrainedConfig, ops: Ops | None = None, group: ParallelGroup | None = None) -> bool:
    """Check, on a small random model of its architecture, that models like `config` are served correctly. Return
    whether recurrent layers must run token by token if a chunk continues a prompt. Raises Unserved if the check fails.

    ops: operations to use; None: plain torch. group: the engine's ranks. If their number is CHECKED_RANKS, they share
    the small model as they share the served one; otherwise each checks the whole small model.
    """
    reference = _reduced_model(config)
    try:
        with torch.inference_mode():
            difference = _compare(reference, ops or ReferenceOps(), False, group)
            if difference is None:
                return False
            if _compare(reference, ops or ReferenceOps(), True, group) is None:
                return True
    except Unserved:
        raise
    except Exception as error:  # a model's code may raise anything if it needs something that we do not support
        raise Unserved(f"a reduced model fails in the self-check: {_shown(error)}") from error
    raise Unserved(f"in the self-check, of a reduced model, {difference}")


def _compare(reference: PreTrainedModel, ops: Ops, is_stepwise: bool, group: ParallelGroup | None) -> Difference | None:
    """Run `reference`, by transformers' code, and a copy, as it is served, on the same rows. Return the first
    difference; None if the two agree. Raises Unserved if they cannot be compared."""
    try:
        twin = _build(reference.config, IMPLEMENTATION)
    except KeyError:
        raise Unserved("its attention is not chosen among transformers' attention functions") from None
    twin.load_state_dict(reference.state_dict())
    if group is not None and group.size == CHECKED_RANKS:
        shard_model(twin, group)
    served = BorrowedModel(twin, ops)
    served.rows.is_stepwise = is_stepwise
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, VOCAB_SIZE - 1, (length,), generator=draw, dtype=torch.int32) for length in LENGTHS]
    expected = [_own_outputs(reference, row) for row in rows]
    if all(bool((outputs[-1] == outputs[-1][:1]).all()) for outputs in expected):
        raise Unserved("the self-check is void: a reduced model gives the same logits for all tokens")
    (spec,) = served.kv_cache_specs(BLOCK_SIZE, torch.float32)
    kv_caches = [torch.full(spec.shape(NUM_BLOCKS), STALE)]
    kinds = getattr(reference.config.get_text_config(decoder=True), "layer_types", None) or []
    for inputs, spans in packed_steps([row.numpy() for row in rows]):
        with _layer_outputs(twin, len(inputs.token_ids)) as outputs:
            outputs.append(compute(served, inputs, kv_caches)[1])
        for span in spans:
            for layer, (ours, theirs) in enumerate(zip(outputs, expected[span.row], strict=True)):
                if not _agrees(ours[span.tokens], theirs[span.start : span.stop]):
                    is_layer = layer < len(outputs) - 1
                    kind = str(kinds[layer]) if is_layer and layer < len(kinds) else ""
                    return Difference(layer if is_layer else -1, kind, span.start)
    return None


def _own_outputs(reference: PreTrainedModel, row: Tensor) -> list[Tensor]:
    """Return the output of each layer and the logits, all [tokens, n], of the model's own pass over a row."""
    with _layer_outputs(reference, len(row)) as outputs:
        logits = reference(input_ids=row[None].long(), use_cache=False).logits[0]
    return [*outputs, logits.float()]


def _agrees(actual: Tensor, expected: Tensor) -> bool:
    bound = TOLERANCE * expected.abs().max().clamp(min=1e-3)
    return bool(((actual.float() - expected.float()).abs() <= bound).all())


@contextlib.contextmanager
def _layer_outputs(model: PreTrainedModel, num_tokens: int) -> Iterator[list[Tensor]]:
    """Yield a list that, while the model runs in this context, gets the outputs of its decoder layers, [num_tokens, n]
    each; it stays empty if no layers are found."""
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    stacks = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    outputs: list[Tensor] = []

    def note(_module: nn.Module, _args: Any, output: Any) -> None:
        found = output[0] if isinstance(output, tuple) else output
        # Models with parallel streams have a further axis before the axis of tokens.
        axis = next(i for i in range(1, found.dim()) if found.shape[i] == num_tokens)
        outputs.append(found.movedim(axis, 0).flatten(1))

    hooks = [layer.register_forward_hook(note) for layer in (stacks[0] if stacks else ())]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _reduced_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a reduced model in float32 with random weights, with the real widths if it is small enough. Raises Unserved
    if none can be built."""
    failures = []
    for has_small_sizes in (False, True):
        try:
            reduced = reduced_config(config, has_small_sizes=has_small_sizes)
            with torch.device("meta"):
                size = sum(each.numel() for each in _build(reduced, "eager").parameters())
            if size > MAX_PARAMETERS:
                failures.append(f"{size} parameters are too many")
                continue
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return _tried(_build(reduced, "eager"))
        except Exception as error:  # configuration and model classes raise many types
            failures.append(_shown(error))
    raise Unserved(f"no reduced model for the self-check can be made: {', '.join(failures)}")


def _tried(model: PreTrainedModel) -> PreTrainedModel:
    """Make constant weights random, run the model once and return it. ValueError if its logits are not finite."""
    for parameter in model.parameters():
        if parameter.dim() <= 1 or bool((parameter == parameter.flatten()[0]).all()):
            parameter.data += SPREAD * torch.randn_like(parameter)
    with torch.inference_mode():
        logits = model(input_ids=torch.arange(2 * WINDOW)[None], use_cache=False).logits
    if not logits.isfinite().all():
        raise ValueError("its logits are not finite")
    return model


def _build(config: PreTrainedConfig, implementation: str) -> PreTrainedModel:
    make: Any = AutoModelForCausalLM.from_config
    model: PreTrainedModel = make(copy.deepcopy(config), attn_implementation=implementation, dtype=torch.float32)
    model.train(False)
    return model


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]

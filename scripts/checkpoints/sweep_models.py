"""Serve a tiny model of every causal language model that the installed transformers knows, and tell which are right.

    python -m tokenloom.scripts.checkpoints.sweep_models [--types gemma2 lfm2 …] [--write docs/learn/models.md]

For each type: the defaults of its configuration, with few small layers, short windows and random weights, are saved as
a checkpoint, loaded as the engine loads it, and run on packed rows that are cut into chunks. Every logit is compared
with transformers' own forward pass in float32. A type is equal, refused with a reason, or wrong; the exit status is 1
if one is wrong. `--write` puts the table between the marks of a page.
"""

from __future__ import annotations

import argparse
import collections
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.models.model_config import ModelImplementation
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.select import select_ops
from tokenloom.workers.borrowed.check_steps import BLOCK_SIZE, LENGTHS, NUM_BLOCKS, packed_steps
from tokenloom.workers.borrowed.load import load_borrowed
from tokenloom.workers.borrowed.reduced_config import VOCAB_SIZE, WINDOW, reduced_config
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.load import load_model
from tokenloom.workers.step.model_step import Model, compute
from tokenloom.workers.step.step_inputs import StateInputs

CPU = torch.device("cpu")
TOLERANCE = 2e-4  # of logits, relative to the largest
MAX_PARAMETERS = 30_000_000
MAX_MODEL_LEN = 64
SPREAD = 0.3
MARKS = "<!-- sweep: begin -->", "<!-- sweep: end -->"

# Types that are no decoders of text: encoders, decoders of an encoder's output, parts of models that see or hear, and
# names of the same model within a larger one.
OTHERS = frozenset(
    (
        *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small"),
        *("camembert", "data2vec-text", "electra", "ernie", "marian", "mbart", "megatron-bert", "musicgen"),
        *("musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "rembert", "roberta", "roberta-prelayernorm"),
        *("roc_bert", "roformer", "trocr", "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
        *("mllama", "moshi", "git", "reformer", "got_ocr2", "moss_transcribe_diarize", "fuyu", "emu3"),
        *("gemma3", "gemma3n", "gemma4", "gemma4_unified", "gemma4_assistant", "gemma4_unified_assistant"),
        *("qwen3_5", "qwen3_5_moe", "qwen4_exp", "dots3_note", "llama4", "gpt-sw3", "phi4_multimodal"),
    )
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Fields that a type's defaults leave out though its models have them, or that its defaults switch off.
FIELDS: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE)},
    "phimoe": {"sliding_window": 64},
    "mistral": {"sliding_window": 64},
    "starcoder2": {"sliding_window": 64},
}


@dataclass(frozen=True)
class Result:
    """The result of one type. outcome: equal, refused, wrong, or untried if no tiny model of it can be built."""

    model_type: str
    architecture: str
    implementation: str
    outcome: str
    reason: str = ""


def results_of(model_type: str) -> Iterator[Result]:
    """Try a type as the engine chooses and, if that is a native model, on transformers' layers, too."""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    try:
        reference = tiny_model(model_type)
    except Exception as error:  # anything in the type's classes
        yield Result(model_type, architecture, "", "untried", shown(error))
        return
    with tempfile.TemporaryDirectory() as name:
        reference.save_pretrained(name)
        folder = Path(name)
        implementations: list[ModelImplementation] = ["auto", "transformers"]
        for implementation in implementations:
            used = "transformers"
            try:
                used = load_model_config(folder, implementation=implementation).implementation
                if used == "transformers" and implementation == "auto":
                    continue
                is_equal = agrees(reference, load(folder, implementation))
                yield Result(model_type, architecture, used, "equal" if is_equal else "wrong")
            except ConfigError as error:
                reason = str(error).removeprefix(f"{folder / 'config.json'}: ").replace(str(folder), "the folder")
                yield Result(model_type, architecture, used, "refused", reason)
            except Exception as error:  # a failure without a reason is ours
                yield Result(model_type, architecture, used, "wrong", shown(error))


def tiny_model(model_type: str) -> PreTrainedModel:
    """Build the type's model with few small layers and random weights; its logits are finite and vary."""
    config = transformers.CONFIG_MAPPING[model_type](**FIELDS.get(model_type, {})).get_text_config(decoder=True)
    config = reduced_config(config, has_small_sizes=True)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in make(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"the smallest model has {size} parameters")
    torch.manual_seed(0)
    model: PreTrainedModel = make(config, attn_implementation="eager", dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() <= 1 or bool((parameter == parameter.flatten()[0]).all()):
            parameter.data += SPREAD * torch.randn_like(parameter)
    model.train(False)
    logits = own_logits(model, torch.arange(2 * WINDOW, dtype=torch.int32))
    if not logits.isfinite().all() or bool((logits == logits[:1]).all()):
        raise ValueError("its logits do not vary, or are not finite")
    return model


def load(folder: Path, implementation: ModelImplementation) -> Model:
    config, ops = load_model_config(folder, implementation=implementation), select_ops(CPU, torch.float32)
    if config.implementation == "transformers":
        return load_borrowed(folder, config, EngineConfig(max_num_seqs=4), MAX_MODEL_LEN, torch.float32, CPU, ops)
    return load_model(folder, config, MAX_MODEL_LEN, torch.float32, CPU, ops, ParallelGroup())


@torch.inference_mode()
def agrees(reference: PreTrainedModel, model: Model) -> bool:
    """Whether all logits of packed, chunked and paged rows are those of the model's own pass over each row."""
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, VOCAB_SIZE - 1, (length,), generator=draw, dtype=torch.int32) for length in LENGTHS]
    expected = [own_logits(reference, row) for row in rows]
    (spec,) = model.kv_cache_specs(BLOCK_SIZE, torch.float32)
    kv_cache = torch.full(spec.shape(NUM_BLOCKS), 1e3)
    states = None
    if model.state_spec is not None:  # a block for each row
        states = model.state_spec.view(torch.full(((1 + len(rows)) * model.state_spec.block_bytes,), 255).byte())
    bound = TOLERANCE * max(float(each.abs().max()) for each in expected)
    for inputs, spans in packed_steps([row.numpy() for row in rows]):
        if states is not None:
            writes = np.array([1 + span.row for span in spans], np.int32)
            reads = np.where([span.start > 0 for span in spans], writes, -1).astype(np.int32)
            inputs = inputs._replace(states=StateInputs(inputs.query_starts, reads, writes))
        logits = compute(model, inputs, [kv_cache], states)[1]
        for span in spans:
            if not bool(((logits[span.tokens] - expected[span.row][span.start : span.stop]).abs() <= bound).all()):
                return False
    return True


@torch.inference_mode()
def own_logits(model: PreTrainedModel, row: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=row[None].long(), use_cache=False).logits[0].float()
    return logits


def shown(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def summary_of(results: list[Result]) -> str:
    """Return one line that counts types by their best outcome."""
    order = ("equal", "wrong", "refused", "untried")
    best: dict[str, Result] = {}
    for result in results:
        known = best.get(result.model_type)
        if known is None or order.index(result.outcome) < order.index(known.outcome):
            best[result.model_type] = result
    count = collections.Counter(result.outcome for result in best.values())
    num_native = sum(result.outcome == "equal" and result.implementation == "native" for result in best.values())
    return (
        f"{len(best)} types: {count['equal']} equal ({num_native} of them native), {count['refused']} refused, "
        f"{count['wrong']} wrong and not refused, {count['untried']} without a tiny model"
    )


def page_of(results: list[Result]) -> str:
    """Return the summary and a table with a line for each type, in Markdown."""
    by_type: dict[str, dict[str, Result]] = collections.defaultdict(dict)
    for result in results:
        by_type[result.model_type][result.implementation] = result
    lines = [
        f"With transformers {transformers.__version__}: {summary_of(results)}.",
        "",
        "| model_type | architecture | native | transformers' layers |",
        "|---|---|---|---|",
    ]
    for model_type, found in sorted(by_type.items()):
        cells = []
        for implementation in ("native", "transformers"):
            result = found.get(implementation) or found.get("")
            reason = "" if result is None else result.reason.split("transformers' layers: ")[-1].replace("|", "\\|")
            cells.append("–" if result is None else f"{result.outcome}{': ' if reason else ''}{reason}")
        architecture = next(iter(found.values())).architecture
        lines.append(f"| `{model_type}` | {architecture} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", help="model types; default: all")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    results = []
    for model_type in options.types or [each for each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if each not in OTHERS]:
        for result in results_of(model_type):
            results.append(result)
            print(f"{result.outcome:8} {result.implementation:12} {model_type}  {result.reason}", flush=True)
    print(summary_of(results))
    if options.write is not None:
        text = options.write.read_text(encoding="utf-8")
        head, tail = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
        options.write.write_text(f"{head}{MARKS[0]}\n{page_of(results)}\n{MARKS[1]}{tail}", encoding="utf-8")
    return int(any(result.outcome == "wrong" for result in results))


if __name__ == "__main__":
    sys.exit(main())

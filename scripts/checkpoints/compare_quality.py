"""Compare the answers of a checkpoint's forms with those of its floats: what rounding costs.

    python -m tokenloom.scripts.checkpoints.compare_quality MODEL [FORM ...] [--texts FILE ...]

MODEL is a folder or a GGUF file. A form is what engine-launch is told: `float32`, `bfloat16`, or a kind of
--quantization (int8, int4, fp8), with products as floats; `stored` keeps a file's own codes. After a +, `integers`
stands for --quantized-products integers, `int8-cache` and `fp8-cache` for --kv-cache-dtype. Each form computes the same
pieces of texts as prompts.
`perplexity` is of their tokens. Over all places, `mean_kl` and `p99_kl` are the Kullback-Leibler divergence from the
model in float32, in nats and over the whole vocabulary; `top1` is the share of places with the same likeliest token.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tokenloom.frontend.checkpoint.gguf.folder import SUFFIX, add_tokenizer
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.served_model import served_model, with_floats
from tokenloom.kernels.byte_cache import CACHE_DTYPES
from tokenloom.kernels.select import select_ops
from tokenloom.scripts.bench.cases.kernels import BLOCK_SIZE, CPU
from tokenloom.scripts.bench.report import ROOT
from tokenloom.scripts.bench.runner import REQUIRED, Case, Setup, run_case
from tokenloom.scripts.bench.workload import find_checkpoint
from tokenloom.tests.workers.paged_run import PagedRun
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.decoder import DecoderModel
from tokenloom.workers.models.load import load_model

FLOATS = ("float32", "bfloat16")
FORMS = [
    "float32",
    "bfloat16",
    "bfloat16+int8-cache",
    "bfloat16+fp8-cache",
    "int8",
    "int8+integers",
    "int4",
    "int4+integers",
]
STORED = "stored+integers"
TEXTS = ["LICENSE", "docs/design/failures.md", "core/scheduling/scheduler.py"]
PIECE_TOKENS, NUM_BLOCKS = 900, 128


class Form:
    """A model in one form."""

    def __init__(self, folder: Path, name: str) -> None:
        kind, *added = name.split("+")
        self.dtype = getattr(torch, kind) if kind in FLOATS else torch.bfloat16
        kinds = (each.removesuffix("-cache") for each in added if each.endswith("-cache"))
        self.cache_dtype = next((CACHE_DTYPES[each] for each in kinds), self.dtype)
        quantization = "none" if kind in (*FLOATS, "stored") else kind
        has_integers = "integers" in added
        config = EngineConfig(quantization=quantization)  # type: ignore[arg-type]
        ops = select_ops(CPU, self.dtype, has_integer_products=has_integers)
        begun = time.perf_counter()
        model = served_model(config, folder)
        model = model if has_integers else with_floats(model)
        self.model: DecoderModel = load_model(folder, model, PIECE_TOKENS, self.dtype, CPU, ops, ParallelGroup())
        self.load_s = time.perf_counter() - begun

    def logprobs(self, tokens: list[int]) -> Tensor:
        """Compute the log probabilities of all tokens at each place: [n, vocabulary]."""
        run = PagedRun(self.model, BLOCK_SIZE, NUM_BLOCKS, self.cache_dtype)
        return run.step({"text": tokens})["text"].float().log_softmax(1)


def read_pieces(folder: Path, texts: list[str]) -> tuple[list[list[int]], str]:
    """Return the first tokens of each text, and a digest of all of them."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces = [tokenizer.encode((ROOT / text).read_text(encoding="utf-8")).ids[:PIECE_TOKENS] for text in texts]
    return pieces, hashlib.sha256(repr(pieces).encode()).hexdigest()[:16]


def measure(setup: Setup) -> None:
    options, report = setup.arguments, setup.report
    torch.set_num_threads(options.threads)
    folder = find_checkpoint(options.model)
    if options.model.endswith(SUFFIX):
        add_tokenizer(folder)
    pieces, digest = read_pieces(folder, options.texts)
    report.note("tokens", sum(map(len, pieces)))
    report.note("digest of the tokens", digest)
    forms = options.forms or [*FORMS, *([STORED] if options.model.endswith(SUFFIX) else [])]
    exact = Form(folder, "float32")
    expected = [exact.logprobs(piece) for piece in pieces]
    del exact
    for name in forms:
        form = Form(folder, name)
        losses, divergences, agreements = list[Tensor](), list[Tensor](), list[Tensor]()
        for piece, reference in zip(pieces, expected, strict=True):
            found = form.logprobs(piece)
            losses.append(-found[:-1].gather(1, torch.tensor(piece[1:])[:, None])[:, 0])
            divergences.append((reference.exp() * (reference - found)).sum(1))
            agreements.append((reference.argmax(1) == found.argmax(1)).float())
        kl = torch.cat(divergences)
        report.add(
            form=name,
            perplexity=float(torch.cat(losses).double().mean().exp()),
            mean_kl=float(kl.mean()),
            p99_kl=float(kl.quantile(0.99)),
            top1=float(torch.cat(agreements).mean()),
            weights_mib=form.model.weight_bytes / 2**20,
            load_s=form.load_s,
        )


OPTIONS = {
    "model": (REQUIRED, "a folder or a GGUF file", str),
    "forms": ([], f"default: {' '.join(FORMS)}, and {STORED} of a GGUF file"),
    "--texts": (TEXTS, "files, from the folder of the source"),
    "--threads": (1,),
}
CASE = Case("quality", measure, OPTIONS, model="", rounds=0)


if __name__ == "__main__":
    sys.exit(run_case(CASE, __doc__))

"""Compare the answers of a checkpoint's forms with those of its floats: what rounding costs.

    python -m tokenloom.scripts.checkpoints.compare_quality MODEL [FORM ...] [--texts FILE ...] [--pieces N]
        [--piece-tokens N]

MODEL is a folder or a GGUF file. A form is what engine-launch is told: `float32`, `bfloat16`, or a kind of
--quantization (int8, int4, fp8), with products as floats in bfloat16; `stored` keeps a file's own codes. After a +,
`integers` stands for --quantized-products integers, `float32` for --dtype float32, `int8-cache` and `fp8-cache` for
--kv-cache-dtype. Each form computes the same pieces of texts as prompts.
`perplexity` is of their tokens. `ratio` is that to the perplexity of `relative_to`: the form without its cache, or, of
products as integers, the same codes as floats in float32, or else the model in float32. `ratio_error` is the ratio's
standard error, from the differences of the two at each token. Over all places, `mean_kl` and `p99_kl` are the
Kullback-Leibler divergence from the model in float32, in nats and over the whole vocabulary; `top1` is the share of
places with the same likeliest token.
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
EXACT = "float32"
TEXTS = ["LICENSE", "docs/design/failures.md", "core/scheduling/scheduler.py"]
PIECE_TOKENS = 900


class Form:
    """A model in one form, and what it computed of the pieces so far, one tensor for each."""

    def __init__(self, folder: Path, name: str, piece_tokens: int) -> None:
        """`piece_tokens`: of the longest piece."""
        kind, *added = name.split("+")
        self.dtype = getattr(torch, kind) if kind in FLOATS else torch.bfloat16
        if EXACT in added:
            self.dtype = torch.float32
        caches = [each for each in added if each.endswith("-cache")]
        self.cache_dtype = next((CACHE_DTYPES[each.removesuffix("-cache")] for each in caches), self.dtype)
        quantization = "none" if kind in (*FLOATS, "stored") else kind
        has_integers = "integers" in added
        if caches:
            self.relative_to = "+".join([kind, *(each for each in added if each not in caches)])
        else:
            self.relative_to = f"{kind}+{EXACT}" if has_integers and quantization != "none" else EXACT
        config = EngineConfig(quantization=quantization)  # type: ignore[arg-type]
        ops = select_ops(CPU, self.dtype, has_integer_products=has_integers)
        begun = time.perf_counter()
        model = served_model(config, folder)
        model = model if has_integers else with_floats(model)
        self.model: DecoderModel = load_model(folder, model, piece_tokens, self.dtype, CPU, ops, ParallelGroup())
        self._num_blocks = piece_tokens // BLOCK_SIZE + 2
        self.load_s = time.perf_counter() - begun
        self.losses: list[Tensor] = []  # in nats, of each token but the first
        self.divergences: list[Tensor] = []  # at each place
        self.agreements: list[Tensor] = []

    def logprobs(self, tokens: list[int]) -> Tensor:
        """Compute the log probabilities of all tokens at each place: [n, vocabulary]."""
        run = PagedRun(self.model, BLOCK_SIZE, self._num_blocks, self.cache_dtype)
        return run.step({"text": tokens})["text"].float().log_softmax(1)

    def note(self, tokens: list[int], found: Tensor, exact: Tensor) -> None:
        """Add what a piece gave. found, exact: the log probabilities of this form and of the model in float32."""
        self.losses.append(-found[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].double())
        self.divergences.append((exact.exp() * (exact - found)).sum(1))
        self.agreements.append((exact.argmax(1) == found.argmax(1)).float())

    def row(self, other: Form) -> dict[str, float | str]:
        """Return the figures of all pieces. other: the form that this one is relative to."""
        losses, kl = torch.cat(self.losses), torch.cat(self.divergences)
        differences = losses - torch.cat(other.losses)
        ratio = float(differences.mean().exp())
        return {
            "perplexity": float(losses.mean().exp()),
            "relative_to": self.relative_to,
            "ratio": ratio,
            "ratio_error": ratio * float(differences.std()) / len(differences) ** 0.5,
            "mean_kl": float(kl.mean()),
            "p99_kl": float(kl.sort().values[int(0.99 * len(kl))]),
            "top1": float(torch.cat(self.agreements).mean()),
            "weights_mib": self.model.weight_bytes / 2**20,
            "load_s": self.load_s,
        }


def read_pieces(folder: Path, texts: list[str], num_pieces: int, size: int) -> tuple[list[list[int]], str]:
    """Return the first pieces of each text, of at most `size` tokens each, and a digest of all of them."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces = list[list[int]]()
    for text in texts:
        tokens = tokenizer.encode((ROOT / text).read_text(encoding="utf-8")).ids[: num_pieces * size]
        pieces += [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]
    return pieces, hashlib.sha256(repr(pieces).encode()).hexdigest()[:16]


def measure(setup: Setup) -> None:
    options, report = setup.arguments, setup.report
    torch.set_num_threads(options.threads)
    folder = find_checkpoint(options.model)
    if options.model.endswith(SUFFIX):
        add_tokenizer(folder)
    size = options.piece_tokens
    pieces, digest = read_pieces(folder, options.texts, options.pieces, size)
    report.note("tokens", sum(map(len, pieces)))
    report.note("digest of the tokens", digest)
    names = options.forms or [*FORMS, *([STORED] if options.model.endswith(SUFFIX) else [])]
    forms = {name: Form(folder, name, size) for name in dict.fromkeys((EXACT, *names))}
    others = {form.relative_to for form in forms.values()} - forms.keys()
    forms |= {name: Form(folder, name, size) for name in others}
    for piece in pieces:
        exact = forms[EXACT].logprobs(piece)
        for name, form in forms.items():
            form.note(piece, exact if name == EXACT else form.logprobs(piece), exact)
    for name in names:
        report.add(form=name, **forms[name].row(forms[forms[name].relative_to]))


OPTIONS = {
    "model": (REQUIRED, "a folder or a GGUF file", str),
    "forms": ([], f"default: {' '.join(FORMS)}, and {STORED} of a GGUF file"),
    "--texts": (TEXTS, "files, from the folder of the source"),
    "--pieces": (1, "of each text"),
    "--piece-tokens": (PIECE_TOKENS, "of a piece"),
    "--threads": (1,),
}
CASE = Case("quality", measure, OPTIONS, model="", rounds=0)


if __name__ == "__main__":
    sys.exit(run_case(CASE, __doc__))

"""Measure embeddings and scores: N texts of mixed length, all in one call; texts and tokens in each second.

    engine-launch bench pooling ./all-MiniLM-L6-v2 --texts 1000 --with-sentence-transformers
    engine-launch bench pooling ./all-MiniLM-L6-v2 --texts 1000 --with-sentence-transformers --with-onnxruntime
    engine-launch bench pooling ./reranker --scores --texts 200
    engine-launch bench pooling demo --beside 16 --rate 50 --seconds 20

The lengths of the texts are those of sentences and paragraphs: a lognormal draw of words, the same in each round. The
words are drawn anew, so that no prefix is cached. With --with-sentence-transformers the texts go to that library in
this process as well, in turn with the engine (A B A B), with as many threads. The ratio is the median of the rounds'
ratios; the largest difference of a number is reported, too. --with-onnxruntime adds the same library with the
transformer as an ONNX graph (onnx_encoder.py), as its backend "onnx" has it, in the same rounds. All flags of
engine-launch are taken.

With --beside, so many rows generate in a model that serves both, alone and beside --rate texts a second of --words
tokens, in turn, for --seconds each: p50 and p99 of the times between tokens and to the first token, and of those to a
vector.
"""

from __future__ import annotations

import importlib
import os
import random
import time
from collections.abc import Callable
from typing import Any

from tokenloom import LLM
from tokenloom.frontend.launcher.options.options import config_from_keywords
from tokenloom.frontend.llm import open_private
from tokenloom.scripts.bench.onnx_encoder import compute_with_onnxruntime
from tokenloom.scripts.bench.report import median
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.texts_beside import Shape, measure_beside
from tokenloom.workers.machine.cpu_threads import num_cpu_threads

WORDS = """a the of and city lies at fjord brick red blue sea capital how many ships sail there every day when wind
blows from north we write code that serves models quickly with numbers close to those of others""".split()  # noqa: SIM905
QUERY = "how many ships sail from the city every day"
Results = list[list[float]]
Call = Callable[[list[str]], Results]


class Texts:
    """Source of texts, whose lengths are equal in all rounds."""

    def __init__(self, count: int, median_words: int) -> None:
        draw = random.Random(5)
        self._lengths = [max(1, round(median_words * draw.lognormvariate(0, 0.8))) for _ in range(count)]

    def of_round(self, number: int) -> list[str]:
        draw = random.Random(number)
        return [" ".join(draw.choices(WORDS, k=length)) for length in self._lengths]


class Engine:
    """The engine's results for texts, and the number of their tokens."""

    def __init__(self, llm: LLM, has_scores: bool) -> None:
        self._llm, self._has_scores = llm, has_scores
        self.num_tokens = 0

    def __call__(self, texts: list[str]) -> Results:
        if self._has_scores:
            scores = self._llm.score(QUERY, texts, truncate_prompt_tokens=-1, use_tqdm=False)
            self.num_tokens = sum(len(each.prompt_token_ids) for each in scores)
            return [[each.outputs.score] for each in scores]
        vectors = self._llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
        self.num_tokens = sum(len(each.prompt_token_ids) for each in vectors)
        return [each.outputs.embedding for each in vectors]


def sentence_transformers_peer(
    folder: str, has_scores: bool, threads: int, batch_size: int, is_onnx: bool = False
) -> Call:
    """Return the function by which sentence-transformers makes the same results, over onnxruntime if `is_onnx`."""
    library: Any = importlib.import_module("sentence_transformers")
    importlib.import_module("torch").set_num_threads(threads)
    if has_scores:
        reranker = library.CrossEncoder(folder, device="cpu")
        if is_onnx:
            compute_with_onnxruntime(reranker.model, threads)

        def score(texts: list[str]) -> Results:
            pairs = [(QUERY, text) for text in texts]
            return [[float(each)] for each in reranker.predict(pairs, batch_size=batch_size, show_progress_bar=False)]

        return score
    model = library.SentenceTransformer(folder, device="cpu")
    if is_onnx:
        compute_with_onnxruntime(model[0].auto_model, threads)

    def embed(texts: list[str]) -> Results:
        found: Results = model.encode(texts, batch_size=batch_size, show_progress_bar=False).tolist()
        return found

    return embed


def timed(call: Call, texts: list[str]) -> tuple[float, Results]:
    begun = time.perf_counter()
    found = call(texts)
    return time.perf_counter() - begun, found


def largest_difference(ours: Results, theirs: Results) -> float:
    return max(abs(a - b) for one, two in zip(ours, theirs, strict=True) for a, b in zip(one, two, strict=True))


def measure(setup: Setup) -> None:
    asked, report = setup.arguments, setup.report
    if asked.beside:
        transport, close = open_private(config_from_keywords("LLM", setup.folder, setup.options))
        setup.stack.callback(close)
        shape = Shape(asked.beside, asked.rate, asked.words, asked.seconds)
        measure_beside(transport, shape, asked.rounds, setup.workload.vocab_size, report)
        return
    llm = setup.stack.enter_context(LLM(setup.folder, **setup.options))
    engine = Engine(llm, asked.scores)
    texts = Texts(asked.texts, asked.words)
    peers: dict[str, Call] = {}
    threads = num_cpu_threads(asked.num_threads if "num_threads" in setup.options else None, 1)
    asked_peers = {"sentence-transformers": asked.with_sentence_transformers, "onnxruntime": asked.with_onnxruntime}
    for name in [name for name, is_asked in asked_peers.items() if is_asked]:
        is_onnx = name == "onnxruntime"
        peers[name] = sentence_transformers_peer(str(setup.folder), asked.scores, threads, asked.batch_size, is_onnx)
    calls: list[Call] = [engine, *peers.values()]
    for call in calls:
        call(texts.of_round(0)[: max(asked.texts // 8, 1)])  # warm up
    ours: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in peers}
    worst = 0.0
    for number in range(1, asked.rounds + 1):
        chosen = texts.of_round(number)
        seconds, found = timed(engine, chosen)
        ours.append(seconds)
        for name, peer in peers.items():
            their_seconds, theirs = timed(peer, chosen)
            ratios[name].append(their_seconds / seconds)
            worst = max(worst, largest_difference(found, theirs))
    seconds = median(ours)
    num_texts = asked.texts
    report.add(texts_per_s=num_texts / seconds, tokens_per_s=engine.num_tokens / seconds)
    for name, found_ratios in ratios.items():
        report.note(f"throughput relative to {name}", median(found_ratios))
    if peers:
        report.note("largest difference of a number", worst)
        report.note("load of the machine", os.getloadavg()[0])


OPTIONS = {
    "--texts": (1000, "number of texts"),
    "--words": (16, "median words of a text"),
    "--scores": (False, "score pairs of a query and each text, of a reranker"),
    "--with-sentence-transformers": (False, "compare with that library, which must be installed"),
    "--with-onnxruntime": (False, "compare with that library over onnxruntime; onnx must be installed, too"),
    "--batch-size": (32, "batch size of sentence-transformers"),
    "--beside": (0, "measure texts beside so many rows that generate, instead"),
    "--rate": (50.0, "texts a second, with --beside"),
    "--seconds": (20.0, "of each arm, with --beside"),
}
CASE = Case("pooling", measure, OPTIONS, rounds=3)

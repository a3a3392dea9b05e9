"""Measure the masks of calls in a model's own form: microseconds of CPU of one mask, by the size of the vocabulary.

    engine-launch bench masks --sizes 151936 260000

An answer of prose and two calls is read token by token, and the mask before each token is made as the engine makes it.
Parts: prose before a start that is plain text; the start; a call up to its end; the end of the answer. All tools are
strict. The first round has cold tables; its largest masks count, too. Needs no model and no engine.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import numpy as np

from tokenloom.core.features.grammar.compiler import GrammarCompiler, Matcher
from tokenloom.frontend.forms.answer_forms.form import AnswerForm
from tokenloom.frontend.forms.answer_forms.grammar import forced_calls, strict_calls
from tokenloom.frontend.forms.answer_forms.named import FORMS
from tokenloom.ipc.codec import JsonObject
from tokenloom.ipc.params.call_form import CallForm
from tokenloom.scripts.bench.inputs.large_vocabulary import encode, write_vocabulary
from tokenloom.scripts.bench.report import median
from tokenloom.scripts.bench.runner import Case, Setup

SIZES = [151_936, 196_703, 260_000]
PROSE = "I look at the weather first, in {both} cities, since you asked for 2 of them; then I compare. " * 3
SCHEMAS: dict[str, JsonObject] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 16},
            "tags": {"type": "array", "items": {"type": "string"}},
            "scale": {"type": "number"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    **{f"tool_{i}": {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}} for i in range(20)},
}
OBJECT = '{"city": "Rio de Janeiro, in the south", "days": 12, "tags": ["sun", "rain and wind"], "scale": -1.5e3}'
TAGGED = (
    "<parameter=city>\nRio de Janeiro, in the south\n</parameter>\n<parameter=days>\n12\n</parameter>\n"
    '<parameter=tags>\n["sun", "rain and wind"]\n</parameter>\n<parameter=scale>\n-1.5e3'
)
CALLS: dict[str, tuple[CallForm, str]] = {  # by kind: a form, and a call in it up to the joint behind
    "object": (FORMS["hermes"].calls[0], '{"name": "get_weather", "arguments": ' + OBJECT + "}"),
    "json": (FORMS["mistral"].calls[1], "get_weather[ARGS]" + OBJECT),
    "tagged": (FORMS["qwen3_coder"].calls[0], "get_weather>\n" + TAGGED),
}


class MaskTimer:
    """Timer of the masks of one vocabulary."""

    def __init__(self, folder: Path, size: int) -> None:
        self._ids = write_vocabulary(folder, size)
        self._compiler = GrammarCompiler(folder, size, [0])
        self._words = np.zeros(self._compiler.num_words, np.uint32)

    def times(self, kind: str, *, is_forced: bool) -> Iterator[tuple[str, float]]:
        """Read an answer; yield the part of it and the CPU microseconds of each mask. SystemExit if the grammar refuses
        it."""
        form, call = CALLS[kind]
        answers = AnswerForm(calls=(form,))
        if is_forced:
            params = forced_calls(answers, SCHEMAS, has_one_call=False, may_think=False)
        else:
            params = strict_calls(answers, SCHEMAS, SCHEMAS, has_one_call=False, has_text=True)
        begun = PROSE * (not is_forced) + form.start
        text = begun + call + form.next + call + form.end
        matcher = self._compiler.compile(params.kind, params.text)
        for place, token_id in encode(text, self._ids):
            part = "prose" if place < len(begun) - len(form.start) else "start" if place < len(begun) else "call"
            yield part, self._fill_us(matcher)
            matcher.consume([token_id])
            if matcher.error is not None:
                raise SystemExit(f"{kind}: {matcher.error} at {text[place : place + 40]!r}")
        yield "end", self._fill_us(matcher)

    def _fill_us(self, matcher: Matcher) -> float:
        start = time.thread_time()
        matcher.fill(self._words)
        return 1e6 * (time.thread_time() - start)


def measure(setup: Setup) -> None:
    for size in setup.arguments.sizes:
        timer = MaskTimer(Path(setup.stack.enter_context(tempfile.TemporaryDirectory())), size)
        for kind, mode in itertools.product(CALLS, ("forced", "strict")):
            times: defaultdict[str, list[float]] = defaultdict(list)
            for _ in range(setup.arguments.rounds):
                for part, us in timer.times(kind, is_forced=mode == "forced"):
                    times[part].append(us)
            for part, each in times.items():
                row = {"masks": len(each), "median_us": median(each), "mean_us": fmean(each), "max_us": max(each)}
                setup.report.add(tokens=size, calls=kind, mode=mode, part=part, **row)


OPTIONS = {"--sizes": (SIZES, "tokens of the vocabularies")}
CASE = Case("masks of calls", measure, OPTIONS, model="", rounds=5)

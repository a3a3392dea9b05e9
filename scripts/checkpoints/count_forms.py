"""Count the chat templates of a folder whose form of calls is found and proved: count_forms.py FOLDER [--cuts N]

Prints a line per template: learned, named or unknown, the kind of its calls, probes returned of those shown, CPU
milliseconds, renderings, and the first difference; then the totals. --cuts N also reads N random cuts of fuzzed probes
with each proved form, and counts those that are read otherwise than the whole text. --walk N makes N random answers of
each kind of calls, forced and strict under auto, with and without a thought, through the masks of their grammars
(tests/support/form_walks.py), and counts those that are invalid.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, get_args

from tokenloom.frontend.server.answer_forms.choose import Choice, choose
from tokenloom.frontend.server.answer_forms.probe import PROBES, ProbeAnswer, ProbeCall
from tokenloom.frontend.server.answer_forms.prove import begins_inside, read_answer, shown_text
from tokenloom.frontend.server.answer_forms.renderings import HostileTemplate, Render, Renderings
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.messages.client import ChatForm
from tokenloom.ipc.params.call_form import CallKind
from tokenloom.tests.support.form_walks import MODES, FormWalks

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
CUTS_PER_TEXT = 10
NESTED = "nested values"  # a probe
LETTERS = "abc äß字🙂\"'\\<>[]{}|=/\n\t 0123"


class Proved(NamedTuple):
    """A template whose form is proved. `name`: of its file."""

    name: str
    choice: Choice
    shown: Renderings
    render: Render


class Rendered:
    """A template with the number of its renderings."""

    def __init__(self, source: str) -> None:
        self._template = ChatTemplate(source, SPECIAL_TOKENS)
        self.num_renders = 0

    def render(self, messages: Any, variables: dict[str, Any]) -> str:
        self.num_renders += 1
        return self._template.render(messages, ChatForm(variables=variables))


def line_of(name: str, choice: Choice, cpu_ms: float, num_renders: int) -> str:
    kind = choice.form.calls[0].kind if choice.form.calls else choice.form.reader
    returned = f"{choice.num_returned}/{choice.num_shown}"
    found = f"{choice.origin:9} {choice.form.name:12} {kind:8} {returned:6} {cpu_ms:5.0f} ms {num_renders:4} renders"
    first = choice.different[0] if choice.different else None
    why = choice.why if first is None else f"{first.probe}: {first.difference}"
    return f"{name:52.52} {found}  {why}"


def fuzzed(answer: ProbeAnswer, chance: random.Random) -> ProbeAnswer:
    """Return an answer with other values of the same types."""
    calls = tuple(
        ProbeCall(call.name, {key: _fuzzed_value(value, chance) for key, value in call.arguments.items()})
        for call in answer.calls
    )
    return ProbeAnswer(thought=answer.thought, content=answer.content, calls=calls)


def _fuzzed_value(value: object, chance: random.Random) -> object:
    if isinstance(value, str):
        return "".join(chance.choice(LETTERS) for _ in range(chance.randrange(30)))
    if isinstance(value, bool):
        return chance.random() < 0.5
    if isinstance(value, int):
        return chance.randrange(-(10**6), 10**6)
    return value


def cut(text: str, chance: random.Random) -> list[str]:
    """Return a text in pieces: cut at random places, often into single characters."""
    share = chance.choice((1.0, 0.5, 0.1, 0.02))
    places = [0, *(place for place in range(1, len(text)) if chance.random() < share), len(text)]
    return [text[one:other] for one, other in itertools.pairwise(places)]


def count_cuts(proved: list[Proved], num_cuts: int, chance: random.Random) -> tuple[int, int, int]:
    """Return the numbers of texts, of cuts, and of cuts that were read otherwise than the whole text."""
    num_texts = num_read = num_different = 0
    probes = [probe.answer for probe in PROBES]
    while num_read < num_cuts:
        _, choice, shown, _ = chance.choice(proved)
        answer = fuzzed(chance.choice(probes), chance)
        text = shown_text(shown, answer).text
        if not text:
            continue
        num_texts += 1
        is_inside = begins_inside(choice.form, text)
        whole = read_answer(choice.form, answer, [text], is_inside_thought=is_inside)
        for _ in range(CUTS_PER_TEXT):
            read = read_answer(choice.form, answer, cut(text, chance), is_inside_thought=is_inside)
            num_read += 1
            if read != whole:
                num_different += 1
                print(f"DIFFERENT {choice.form.name}: {json.dumps(text, ensure_ascii=False)[:400]}", file=sys.stderr)
    return num_texts, num_read, num_different


def walk(proved: list[Proved], kinds: Collection[str], count: int, seed: int) -> int:
    """Print the number of invalid answers of each kind of calls and each mode, and the templates that render the calls
    of some otherwise. Return the number of the invalid ones. count: answers of each, spread over the templates."""
    num_invalid = 0
    for kind, mode in itertools.product(kinds, MODES):
        own = [each for each in proved if each.choice.form.calls and each.choice.form.calls[0].kind == kind]
        own = [each for each in own if each.choice.form.thought is not None or not mode[1]]
        found, others = Counter[str](), Counter[str]()
        start = time.monotonic()
        for number, (name, choice, _, render) in enumerate(own):
            with tempfile.TemporaryDirectory() as folder:
                walks = FormWalks(Path(folder), choice.form, render, has_nested=NESTED not in failed(choice))
                for answer in walks.answers(mode, (count + number) // len(own), seed + number):
                    found.update(answers=1, calls=answer.num_calls, invalid=bool(answer.fault))
                    others.update([name] * bool(answer.difference))
                    if why := answer.fault or answer.difference:
                        print(f"{name}: {why}: {json.dumps(answer.text, ensure_ascii=False)}", file=sys.stderr)
        num_invalid += found["invalid"]
        rendered = "".join(f"; {other} rendered otherwise by {name}" for name, other in others.items())
        print(
            f"{kind}, {'forced' if mode[0] else 'strict'}{', with a thought' * mode[1]}: {found['invalid']} invalid of "
            f"{found['answers']} answers with {found['calls']} calls, {len(own)} templates, "
            f"{time.monotonic() - start:.0f} s{rendered}",
            flush=True,
        )
    return num_invalid


def failed(choice: Choice) -> set[str]:
    """Return the names of the probes that a template does not return."""
    return {each.probe for each in choice.different}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cuts", type=int, default=0)
    parser.add_argument("--walk", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(get_args(CallKind)), help="kinds of calls for --walk")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    origins, cpu_ms, renders = Counter[str](), list[float](), list[int]()
    proved: list[Proved] = []
    num_showing = 0
    for path in sorted(options.folder.rglob("*.jinja")):
        try:
            rendered = Rendered(path.read_text(encoding="utf-8"))
        except ConfigError as error:
            print(f"{path.stem}: {error}")
            continue
        start = time.process_time()
        source = path.read_text(encoding="utf-8")
        choice = choose(rendered.render, source)
        cpu_ms.append((time.process_time() - start) * 1000)
        renders.append(rendered.num_renders)
        shows = any(each.outcome != "not shown" for each in choice.results if "call" in each.probe)
        num_showing += shows or choice.origin == "unknown"
        origins[choice.origin] += 1
        print(line_of(path.stem, choice, cpu_ms[-1], rendered.num_renders))
        if choice.origin in ("learned", "tried"):
            try:
                shown = Renderings(rendered.render)
                if choice.form.thought is not None:
                    shown.know_thought(*choice.form.thought)
                proved.append(Proved(path.stem, choice, shown, rendered.render))
            except HostileTemplate as error:
                print(error)
    cpu_ms.sort()
    renders.sort()
    print(f"{sum(origins.values())} templates: " + ", ".join(f"{count} {name}" for name, count in origins.items()))
    if cpu_ms:
        middle = len(cpu_ms) // 2
        print(f"CPU {cpu_ms[0]:.0f} to {cpu_ms[-1]:.0f} ms, median {cpu_ms[middle]:.0f}")
        print(f"renderings {renders[0]} to {renders[-1]}, median {renders[middle]}")
    if options.cuts and proved:
        num_texts, num_read, num_different = count_cuts(proved, options.cuts, random.Random(options.seed))
        print(f"{num_read} cuts of {num_texts} texts: {num_different} different")
        if num_different:
            return 1
    if options.walk:
        return int(walk(proved, options.kinds.split(","), options.walk, options.seed) > 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())

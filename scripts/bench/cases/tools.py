"""Measure calls of tools: how many conform to their schemas, with and without `strict`, and the cost.

    engine-launch bench tools FILE.gguf 96 --parts validity,steps

validity: one server with a template in the form of Hermes; N conversations with up to five tools, once in each mode.
  The model may call (auto), may call with every tool strict, must call (required), and must call a strict tool. A row
  has the answers with calls, those whose calls are all valid, and those with something else: an unknown name, or
  arguments that jsonschema refuses. Answers that max_tokens cut are not counted.
steps: times between the tokens of --streams unconstrained answers beside one that is unconstrained, one with a strict
  tool that writes prose, and one that must write a strict call. All run in turn in each round; the ratio is the median
  of the rounds' ratios of medians. Prose has masks if the model's calls begin with text, and none if with a token of
  their own: --call-tags '<a>,</a>' puts other tags into the template.
All flags of engine-launch are taken; --max-model-len must have room for the prompts, of about 1,000 tokens.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema

from tokenloom.ipc.codec import JsonObject
from tokenloom.scripts.bench.contestant import ANSWER_TIMEOUT_S
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.inputs.tool_prompts import TEMPLATE, conversations, schema_of, tools
from tokenloom.scripts.bench.report import median
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.workload import flags_of

CHAT = "/v1/chat/completions"
PARTS = ("validity", "steps")
MODES: Mapping[str, JsonObject] = {  # fields of the request beside its tools
    "auto": {},
    "auto, strict": {},
    "required": {"tool_choice": "required"},
    "required, strict": {"tool_choice": "required"},
}
LONG_CALL: JsonObject = {  # a call that does not end before the measurement does
    "type": "object",
    "properties": {"days": {"type": "array", "minItems": 2000, "items": {"enum": ["sunny", "cloudy", "windy"]}}},
    "required": ["days"],
    "additionalProperties": False,
}
BESIDE: Mapping[str, JsonObject] = {  # fields of the row beside the unconstrained ones
    "unconstrained": {},
    "strict, prose": {"strict": True},
    "strict, call": {"strict": True, "tool_choice": "required"},
}
STORY = "Tell me a long story about a lighthouse and its keeper."  # a question after which a model calls nothing
SKIPPED = 8  # tokens of a stream that are not timed: the other streams' prompts are computed meanwhile


class ChatServer:
    """An engine with an HTTP server, and requests to it."""

    def __init__(self, engine: Engine) -> None:
        self._place = urlsplit(engine.url)

    @contextlib.contextmanager
    def _asked(self, body: JsonObject) -> Iterator[http.client.HTTPResponse]:
        """Send a chat and yield its answer. SystemExit if it is refused."""
        connection = http.client.HTTPConnection(self._place.netloc, timeout=ANSWER_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != HTTPStatus.OK:
                raise SystemExit(f"the engine answered {answer.status}: {answer.read(2000).decode(errors='replace')}")
            yield answer

    def choice(self, body: JsonObject) -> Any:
        """Return the only choice of an answer."""
        with self._asked(body) as answer:
            return json.loads(answer.read())["choices"][0]

    def times(self, body: JsonObject, count: int) -> list[float]:
        """Stream an answer and return the arrival times of its first `count` pieces; then drop it."""
        found: list[float] = []
        with self._asked(body | {"stream": True}) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    found.append(time.perf_counter())
                if len(found) == count:
                    break
        return found


def verdict(choice: Any) -> str:
    """Return the kind of an answer: prose, valid calls, or the fault of one of its calls."""
    if choice["finish_reason"] == "length":
        return "cut"
    calls = choice["message"].get("tool_calls") or ()
    for call in calls:
        function = call["function"]
        try:
            jsonschema.validate(json.loads(function["arguments"]), schema_of(function["name"]))
        except KeyError:
            return "other name"
        except (ValueError, jsonschema.ValidationError):
            return "other arguments"
    return "valid" if calls else "prose"


def measure_validity(setup: Setup, server: ChatServer) -> None:
    """Send every conversation in every mode, several at once, and add a row for each mode."""
    arguments = setup.arguments
    for mode, fields in MODES.items():
        bodies = [
            {
                "messages": messages,
                "tools": tools(names, is_strict="strict" in mode),
                "max_tokens": arguments.num_out,
                "temperature": arguments.temperature,
                "seed": seed,
                **fields,
            }
            for seed, (messages, names) in enumerate(conversations(arguments.num_requests))
        ]
        with ThreadPoolExecutor(arguments.streams) as pool:
            found = Counter(map(verdict, pool.map(server.choice, bodies)))
        whole = found.total() - found["cut"]
        num_calling = whole - found["prose"]
        setup.report.add(
            part="validity",
            mode=mode,
            answers=whole,
            with_calls=num_calling,
            valid=found["valid"],
            other_name=found["other name"],
            other_arguments=found["other arguments"],
            cut=found["cut"],
            valid_share=found["valid"] / num_calling if num_calling else None,
        )


def measure_steps(setup: Setup, server: ChatServer) -> None:
    """Time the tokens of unconstrained answers beside each kind of row, in turn in each round."""
    arguments, medians = setup.arguments, dict[str, list[float]]()
    common: JsonObject = {
        "messages": [{"role": "user", "content": STORY}],
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": arguments.tokens * 2,
    }
    for number, (kind, fields) in itertools.product(range(arguments.rounds + 1), BESIDE.items()):
        function = {"name": "tell_weather", "parameters": LONG_CALL, "strict": bool(fields.get("strict"))}
        more = {name: value for name, value in fields.items() if name != "strict"}
        beside = common | {"tools": [{"type": "function", "function": function}], **more}
        with ThreadPoolExecutor(arguments.streams + 1) as pool:
            other = pool.submit(server.times, beside, arguments.tokens)
            plain = [pool.submit(server.times, common, arguments.tokens) for _ in range(arguments.streams)]
            streams = [each.result()[SKIPPED:] for each in plain]
            other.result()
        gaps = [after - before for times in streams for before, after in itertools.pairwise(times)]
        if number:  # 0 warms up: grammars are compiled, prompts are cached
            medians.setdefault(kind, []).append(median(gaps))
            setup.report.add(part="steps", mode=kind, round=number, step_p50_ms=median(gaps) * 1e3)
    plain_medians, *others = medians.values()
    for kind, values in zip(list(medians)[1:], others, strict=True):
        setup.report.note_ratios(f"step beside one that is {kind}, of unconstrained", values, plain_medians)


def engine_flags(setup: Setup) -> list[str]:
    setup.options.setdefault("model", str(setup.folder))
    setup.options.setdefault("http", "0")
    begin, end = setup.arguments.call_tags.split(",")
    template = TEMPLATE.replace("</tool_call>", end).replace("<tool_call>", begin)
    setup.options.setdefault("chat_template", template)
    return flags_of(setup.options)


def measure(setup: Setup) -> None:
    parts = setup.arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"--parts has {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    runtime = Path(setup.stack.enter_context(tempfile.TemporaryDirectory()))
    engine = setup.stack.enter_context(Engine(runtime, engine_flags(setup), has_faults=False))
    engine.wait_ready()
    setup.report.note("lines about calls", [line for line in engine.lines if "calls" in line])
    server = ChatServer(engine)
    if "validity" in parts:
        measure_validity(setup, server)
    if "steps" in parts:
        measure_steps(setup, server)
    engine.stop()


OPTIONS = {
    "--parts": (",".join(PARTS), "parts to measure"),
    "--call-tags": ("<tool_call>,</tool_call>", "begin and end of calls in the template"),
    "--temperature": (0.7, "of the answers of `validity`"),
    "--streams": (4, "answers that run at once"),
    "--tokens": (120, "pieces of each answer of `steps`"),
}
CASE = Case("tools", measure, OPTIONS, num_requests=96)

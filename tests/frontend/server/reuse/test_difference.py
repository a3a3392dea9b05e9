"""A prompt is compared with the nearest earlier one of its conversation: a difference has a place and a kind."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.frontend.forms.cache_report import DIFFERENCES, MISSES, report_json
from tokenloom.frontend.launch import main
from tokenloom.frontend.server.reuse.difference import difference
from tokenloom.frontend.server.reuse.moved_tokens import LEAST, moved_tokens, num_common
from tokenloom.frontend.server.reuse.seen_prompts import SeenPrompts
from tokenloom.frontend.server.reuse.template_check import unstable_line
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.messages.base import CacheMisses, CacheReport, PromptDifference
from tokenloom.ipc.messages.client import ChatForm, ChatMessage, Submit
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.scripts.fleet.explain_misses import ModellessCore

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}</{{ m.role }}>"
    "{% endfor %}<assistant>"
)
RULES = " ".join(f"Rule {i}: look at file {i} before you change it, and say why." for i in range(8))
NUM_TURNS = 43


class Agent:
    """A conversation with a core and a frontend's memory of prompts; a test may disturb its turns."""

    def __init__(self) -> None:
        self.core = ModellessCore(2500, num_open=4)
        self.template = ChatTemplate(TEMPLATE, {})
        self.tokenizer = Tokenizer.load(DEMO_FOLDER)
        self.seen = SeenPrompts()
        self.tools: list[Any] = [
            {"name": name, "description": f"{name} a file of the project, by its path and a line"}
            for name in ("read", "write", "list", "run")
        ]
        self.turns = [ChatMessage("system", f"It is 09:00:01. {RULES}"), ChatMessage("user", "Mend the bug, please.")]
        self.num = 0

    def ask(self) -> tuple[dict[str, int], PromptDifference | None, int]:
        """Send the conversation; return the misses of the core, the difference, and the number of tokens found."""
        form = ChatForm(variables={"tools": self.tools})
        text = self.template.render(self.turns, form, 0.0)
        prompt = self.tokenizer.encode(text, add_special_tokens=False)
        submit = Submit(request_id="a", params=SamplingParams(), chat=list(self.turns), chat_form=form)
        seen, earlier = self.seen.visit("caller", submit, encode_ids(prompt))
        self.num += 1
        self.core.add(self.num, prompt)
        self.core.run()
        seen.add_answer([1, 2, 3])
        found = None if earlier is None else difference(earlier, seen)
        return dict(self.core.missed.get(self.num, {})), found, self.core.cached[self.num]


def edit(agent: Agent, index: int, content: str, **more: Any) -> None:
    agent.turns[index] = ChatMessage(agent.turns[index].role, content, more)


def test_each_miss_of_an_agents_turns_is_explained_by_its_injected_cause_and_no_other_turn_has_one() -> None:
    agent, rng = Agent(), random.Random(3)
    system = agent.turns[0].text
    causes: dict[int, tuple[str, Any]] = {
        5: ("time", lambda: edit(agent, 0, system.replace("09:00:01", "09:04:32"))),
        9: ("tools_order", agent.tools.reverse),
        13: ("tools", lambda: agent.tools.insert(1, {"name": "new", "description": "a tool that nobody needs"})),
        17: ("system", lambda: edit(agent, 0, "Be brief. " + agent.turns[0].text)),
        21: ("thoughts", lambda: edit(agent, 4, agent.turns[4].text)),
        25: ("message", lambda: edit(agent, 3, "Another result of the tool")),
        29: ("cleared", agent.core.core.reset_prefix_cache),
        33: ("evicted", lambda: flood(agent)),
        37: ("lost", agent.core.lose_workers),
        41: ("time", lambda: edit(agent, 0, agent.turns[0].text.replace("09:04:32", "10:14:07"))),
    }
    for turn in range(NUM_TURNS):
        agent.turns += [
            ChatMessage("assistant", f"I look at file {rng.random()}.", {"reasoning_content": f"So {rng.random()}"}),
            ChatMessage("tool", f"Line {rng.random()} of the file has {rng.random()}."),
        ]
        cause, inject = causes.get(turn, ("", lambda: None))
        inject()
        misses, found, num_cached = agent.ask()
        expected = {cause} - {""}
        assert {*misses, *([] if found is None else [found.kind])} == expected, f"turn {turn}"
        assert (num_cached > 0) or turn == 0 or cause in ("cleared", "evicted", "lost"), f"turn {turn}"
        if found is not None:
            assert found.field.startswith(("tools", "messages[")) and found.num_tokens >= LEAST


def flood(agent: Agent) -> None:
    for i in range(12):
        agent.core.add(1000 + i, [i, *((i * 251 + j * j) % 997 for j in range(1000))])
    agent.core.run()


def test_moved_tokens_are_those_that_stand_in_both_behind_the_difference() -> None:
    rng = random.Random(5)
    for _ in range(300):
        common, moved = [[rng.randrange(1 << 20) for _ in range(rng.randrange(0, 60))] for _ in range(2)]
        old, new = [[1 << 21 | rng.randrange(1 << 20) for _ in range(rng.randrange(0, 40))] for _ in range(2)]
        earlier, later = [*common, 1 << 22, *old, *moved], [*common, 1 << 23, *new, *moved, *new[:3]]
        first = num_common(encode_ids(earlier), encode_ids(later))
        assert first == len(common)
        found = moved_tokens(encode_ids(earlier), encode_ids(later), first)
        assert found.num_tokens == len(moved) or (found.num_tokens == 0 and len(moved) < 2 * LEAST)
        cut = moved_tokens(encode_ids(earlier), encode_ids(common + moved + new), first)
        assert len(moved) < 2 * LEAST or cut == (len(moved), True)
    assert list(decode_ids(encode_ids(common))) == common


@pytest.mark.parametrize(("salt", "caller"), [("other", "a"), (None, "b")])
def test_prompts_of_other_callers_and_salts_are_not_compared_and_the_memory_is_bounded(
    salt: str | None, caller: str
) -> None:
    seen, prompt = SeenPrompts(max_bytes=20_000), encode_ids(range(100))
    seen.visit("a", Submit(request_id="1", params=SamplingParams()), prompt)
    other = Submit(request_id="2", params=SamplingParams(cache_salt=salt))
    assert seen.visit(caller, other, prompt)[1] is None
    same = Submit(request_id="3", params=SamplingParams())
    assert seen.visit("a", same, prompt)[1] is not None
    for i in range(200):
        seen.visit("a", same, encode_ids([i] * 100))
        assert seen.num_bytes <= 20_000
    assert seen.visit("a", same, prompt)[1] is None


def test_a_report_adds_up_and_has_a_sentence_for_each_reason() -> None:
    for reason in MISSES:
        report = CacheReport(misses=CacheMisses(num_tokens={reason: 32}, evicted_s=1.5, memory_s=60.0))
        found = report_json([report], 100, 48)
        assert found["missed_tokens"] == {reason: 32} and found["new_tokens"] == 20
        assert "{" not in str(found["explanation"]) and found["memory_seconds"] == 60.0
    for kind in DIFFERENCES:
        changed = PromptDifference(kind=kind, field="tools[0]", token=3, num_tokens=40)
        found = report_json([CacheReport(difference=changed)], 100, 48)
        assert found["missed_tokens"] == {kind: 40} and "tools[0] at token 3" in str(found["explanation"])


@pytest.mark.parametrize(
    ("written", "often"),
    [
        ("{{ strftime_now('%H:%M') }}", "with the time of day, from character 7 of"),
        ("{{ strftime_now('%d %b %Y') }}", "from day to day, from character 4 of"),
        ("{{ date_string }}", ""),
        ("{{ raise_exception('no') }}", ""),
    ],
)
def test_a_template_that_renders_equal_chats_differently_is_said_at_the_start(written: str, often: str) -> None:
    line = unstable_line(ChatTemplate("<s>" + written + TEMPLATE, {}))
    assert (often in line) if often else not line


def test_explain_shows_where_two_bodies_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body(name: str, **fields: object) -> str:
        path = tmp_path / name
        path.write_text(json.dumps(fields))
        return str(path)

    turns = [{"role": "user", "content": "Where is Rome?"}]
    first, later = (f"It is {time}. {RULES}" for time in ("12:01:07", "12:02:33"))
    one = body("one", model="demo", messages=[{"role": "system", "content": first}, *turns])
    assert main(["explain", one, body("two", system=later, messages=turns, max_tokens=3)]) == 3
    output = capsys.readouterr().out
    assert "in messages[0].content (time)" in output and "2:33. Rule 0" in output
    assert main(["explain", one, body("three", input=turns, instructions=first)]) == 0
    assert "one prompt continues the other" in capsys.readouterr().out
    assert main(["explain", "--model", "demo", body("four", prompt="A b"), body("five", prompt="A c")]) == 3
    assert main(["explain", one]) == 2
    assert "1 bodies are given" in capsys.readouterr().err

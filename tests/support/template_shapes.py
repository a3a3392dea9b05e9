"""Chat templates written for the tests, each in the shape of a family of published ones, with a description by hand.

The templates lie in tests/fixtures/templates, in a folder by the kind of their calls; the comment at the head of each
says how it is special. SHAPES was written by reading them: it is an oracle that shares no code with the product.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from tokenloom.frontend.server.text.turn_shape import UNSHOWN, TurnShape

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "templates"
Ids: TypeAlias = Literal["none", "own", "place"]  # a call has none of its own, any text, or one of its name and place
GIVEN, TEXT_ALONE = TurnShape(), TurnShape(keeps_null=False)
SPLIT = TurnShape(keeps_text=False)  # a turn with calls shows no text: it has a turn of its own
SPLIT_WITH_SHORT_IDS = TurnShape(keeps_text=False, has_short_ids=True)
EITHER = TurnShape(keeps_text_arguments=True)  # arguments are shown alike as objects and as text
EITHER_BUT_NULL = TurnShape(keeps_text_arguments=True, keeps_null=False)
THINK, PREFIXED = ("<think>", "</think>"), ("<seed:think>", "</seed:think>")
CALLS, CALL, SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
SECTION = "<|tool_calls_section_begin|><|tool_call_begin|>functions."


class Shape(NamedTuple):
    """The form of a template's answers. Markers are given without white space."""

    kind: str = ""  # of its calls, as in CallForm; "": no form of calls can be learned
    begin: str = ""  # the end of the text before the name, or the object, of a first call
    thought: tuple[str, str] | None = None  # the end of its opening text, and the begin of its closing one
    ids: Ids = "none"
    history: TurnShape = GIVEN
    most_calls: int | None = None  # calls that a turn can show
    shows_content: bool = True  # content is shown beside calls
    has_prompt: bool = False  # a prompt of some variables opens a thought
    has_minor: bool = False  # nested values are written so that no reader of the form finds their ends
    why: str = ""  # the reason that its calls have no form


SHAPES: dict[str, Shape] = {
    "object/hermes": Shape("object", "<tool_call>"),
    "object/hermes_thoughts": Shape("object", "<tool_call>", THINK, history=EITHER_BUT_NULL),
    "object/json_list": Shape("object", "<TOOLCALL>[", THINK, has_prompt=True, history=EITHER),
    "object/call_ids": Shape("object", "[TOOL_CALLS][", ids="own", history=SPLIT_WITH_SHORT_IDS, shows_content=False),
    "object/name_as_key": Shape("object", "<|tools_prefix|>["),
    "object/indented_ids": Shape(
        "object", "<|START_ACTION|>[", ("<|START_THINKING|>", "<|END_THINKING|>"), history=SPLIT, shows_content=False
    ),
    "object/line_breaks_between": Shape("object", "<tool_calls>", history=SPLIT, shows_content=False),
    "object/calls_as_turn": Shape("object", "<|message_sep|>functioncall<|role_sep|>", most_calls=1, history=EITHER),
    "object/single_call": Shape("object", "<|function_call|>", most_calls=1, history=EITHER),
    "object/list_with_ids": Shape(
        "object", "<tool_calls>[", ("Herearemysteps:", "[BEGINFINALRESPONSE]"), "own", has_prompt=True
    ),
    "object/no_break_between": Shape("object", "<tool_call>", THINK, has_prompt=True, history=EITHER),
    "object/signatures": Shape(
        "object", "<tool_call>", shows_content=False, history=TurnShape(keeps_text_arguments=True, keeps_text=False)
    ),
    "object/thought_before_calls": Shape(
        "object", "<|act|>[", ("<|plan|>", "<|plan_end|>"), history=SPLIT, shows_content=False
    ),
    "json/place_in_name": Shape("json", SECTION, ids="place", history=EITHER),
    "json/place_and_thoughts": Shape("json", SECTION, THINK, "place", history=EITHER),
    "json/marker_each": Shape("json", "[TOOL_CALLS]", ("[THINK]", "[/THINK]"), history=EITHER_BUT_NULL),
    "json/marker_and_id": Shape("json", "[TOOL_CALLS]", ids="own", history=SPLIT_WITH_SHORT_IDS, shows_content=False),
    "json/function_tag": Shape("json", "<function="),
    "json/code_fence": Shape(
        "json",
        f"{CALLS}{CALL}function{SEPARATOR}",
        THINK,
        history=TurnShape(has_text_arguments=True, keeps_empty=False, keeps_text=False),
        shows_content=False,
        has_prompt=True,
    ),
    "json/separator": Shape("json", f"{CALLS}{CALL}", THINK, has_prompt=True),
    "json/headers_between": Shape(
        "json",
        "<|tool_calls|><|tool_call:begin|>{ID}<|tool_call:name|>",
        ("<|think|>", "<|end|>"),
        "own",
        history=EITHER,
    ),
    "tagged/lines": Shape("tagged", "<tool_call><function="),
    "tagged/lines_and_thoughts": Shape("tagged", "<tool_call><function=", THINK, has_prompt=True),
    "tagged/one_line": Shape("tagged", "<seed:tool_call><function=", PREFIXED),
    "tagged/key_value": Shape("tagged", "<tool_call>", THINK, history=TEXT_ALONE),
    "tagged/key_value_joined": Shape("tagged", "<tool_call>", THINK, has_prompt=True),
    "tagged/closed_turn": Shape("tagged", "<tool_call>", THINK, has_prompt=True),
    "tagged/invokes": Shape("tagged", '<minimax:tool_call><invokename="', THINK, history=TEXT_ALONE, has_prompt=True),
    "tagged/typed": Shape("tagged", '<｜DSML｜calls><｜DSML｜invokename="', THINK, has_prompt=True),
    "tagged/typed_and_counted": Shape(
        "tagged",
        '<|open|>tools<|sep|><|open|>calltool="',
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        has_prompt=True,
    ),
    "tagged/cdata": Shape("tagged", '<functionname="', THINK, has_prompt=True),
    "tagged/suffixed": Shape("tagged", "<tool_calls:open><tool_call:open>", ("<think:open>", "</think:open>")),
    "tagged/recipients": Shape("tagged", 'to={NAME}<|message|><calls><invokename="', ("to=self<|message|>", "<|eom|>")),
    "tagged/uneven": Shape("tagged", "<tool_call>", THINK, has_prompt=True),
    "literal/python_calls": Shape("literal", "<|tool_call_start|>[", THINK, history=TEXT_ALONE),
    "literal/python_lists": Shape("literal", "<|tool_call_start|>[", THINK, history=TEXT_ALONE),
    "literal/lines": Shape("literal", "<function_calls>"),
    "literal/quoted_by_marker": Shape("literal", "<|tool_call>call:", ("<|channel>thought", "<channel|>")),
    "thoughts/in_the_prompt": Shape(thought=THINK, history=UNSHOWN, has_prompt=True),
    "thoughts/tools_without_calls": Shape(thought=THINK, history=UNSHOWN, why="the template shows no calls"),
    "thoughts/no_tools": Shape(history=UNSHOWN, why="the template shows no calls"),
    "thoughts/shown_without_calls": Shape(thought=THINK, history=UNSHOWN, why="the template shows no calls"),
    "odd/bare_object": Shape(most_calls=1, shows_content=False, history=SPLIT),
    "odd/repeated_instruction": Shape("object", "Action:```json[", history=TEXT_ALONE),
    "odd/recipient_in_prompt": Shape(
        history=TurnShape(has_text_arguments=True), why="calls begin without a marker, or in the prompt"
    ),
    "odd/channels": Shape(most_calls=1),
    "odd/elements_by_name": Shape(
        "tagged", ']<]ns[>[<tool_call>]<]ns[>[<invokename="', ("<mm:think>", "</mm:think>"), has_minor=True
    ),
    "odd/own_variable": Shape(history=UNSHOWN, why="'functions' is undefined"),
    "odd/printed_messages": Shape(
        history=TurnShape(has_text_arguments=True, keeps_null=False), why="the template prints calls as Python does"
    ),
}


def template_of(name: str) -> str:
    """Return the source of a template of SHAPES."""
    return (FOLDER / f"{name}.jinja").read_text("utf-8")

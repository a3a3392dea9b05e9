"""Forms of model families by the names of --tool-call-parser and --reasoning-parser."""

from __future__ import annotations

import msgspec

from ....ipc.params.call_form import first_marker
from .form import AnswerForm, CallForm

HARMONY = "gpt_oss"
THOUGHTS: dict[str, tuple[str, str]] = {  # name of --reasoning-parser → texts that open and close a thought
    "think": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "granite": ("Here is my thought process:", "Here is my response:"),
}
BEGIN_INSIDE = frozenset(("deepseek_r1",))  # answers start inside a thought, without a text that opens it anywhere

HERMES = CallForm(
    kind="object",
    start="<tool_call>\n",
    next="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
    name_path=("name",),
    arguments_path=("arguments",),
)
_MISTRAL_LIST = CallForm(
    kind="object", start="[TOOL_CALLS][", next=", ", end="]", name_path=("name",), arguments_path=("arguments",)
)
_MISTRAL = CallForm(kind="json", start="[TOOL_CALLS]", next="[TOOL_CALLS]", end="", mid="[ARGS]")
_GRANITE = CallForm(
    kind="object", start="<|tool_call|>[", next=", ", end="]", name_path=("name",), arguments_path=("arguments",)
)
_CODER = CallForm(
    kind="tagged",
    start="<tool_call>\n<function=",
    next="\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=",
    end="\n</parameter>\n</function>\n</tool_call>",
    first=">\n<parameter=",
    mid=">\n",
    pair="\n</parameter>\n<parameter=",
    empty_next=">\n</function>\n</tool_call>\n<tool_call>\n<function=",
    empty_end=">\n</function>\n</tool_call>",
)
_PYTHON = CallForm(
    kind="literal",
    start="[",
    next=", ",
    end="]",
    mid="(",
    pair=", ",
    assign="=",
    close=")",
    quote="'",
    texts="python",
)
_FORMS: dict[str, tuple[CallForm, ...]] = {
    "granite": (_GRANITE,),
    "hermes": (HERMES,),
    "mistral": (
        _MISTRAL_LIST,
        _MISTRAL,
        msgspec.structs.replace(_MISTRAL, mid="[CALL_ID]{ID}[ARGS]"),
        msgspec.structs.replace(_MISTRAL, mid=""),
    ),
    "pythonic": (
        _PYTHON,
        msgspec.structs.replace(_PYTHON, start="<|python_start|>[", end="]<|python_end|>"),
    ),
    "lfm2": (msgspec.structs.replace(_PYTHON, start="<|tool_call_start|>[", end="]<|tool_call_end|>"),),
    "olmo3": (
        msgspec.structs.replace(
            _PYTHON,
            start="<function_calls>\n",
            next="\n",
            end="\n</function_calls>",
            quote='"',
            texts="json",
            lists="json",
            objects="json",
            words=("null", "false", "true"),
        ),
    ),
    "qwen3_coder": (
        _CODER,
        msgspec.structs.replace(  # as models also write them
            _CODER,
            start="<function=",
            next="\n</function>\n<function=",
            end="\n</function>",
            pair="\n<parameter=",
            empty_next=">\n</function>\n<function=",
            empty_end=">\n</function>",
        ),
    ),
}
_ALSO_WRITTEN: tuple[tuple[CallForm, ...], ...] = (  # a form that templates show, and how its models also write calls
    _FORMS["mistral"],
    _FORMS["qwen3_coder"],
)
_LEFT_OUT = {  # by the start of a form, without white space: a word of it that its models also leave out
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.": "functions.",
    "<|tool_call>call:": "call",
}
_DSML = "<｜DSML｜"  # begins all tags of DeepSeek's calls from V3.2 on, whose models leave out those around the calls
FORMS: dict[str, AnswerForm] = {name: AnswerForm(name=name, calls=calls) for name, calls in _FORMS.items()} | {
    "llama": AnswerForm(name="llama", reader="llama"),
    "openai": AnswerForm(name="openai", reader="harmony"),
}
NO_FORM = AnswerForm()


def with_also_written(form: AnswerForm) -> AnswerForm:
    """Return a form of one kind of calls with the ways in which models of its family also write them: models leave out
    markers that their templates show."""
    if len(form.calls) != 1:
        return form
    (shown,) = form.calls
    if shown.kind == "tagged" and shown.start.startswith(_DSML):
        return msgspec.structs.replace(form, calls=(shown, *_without_wrapper(shown)))
    if (word := _LEFT_OUT.get("".join(shown.start.split()))) is not None:
        return msgspec.structs.replace(form, calls=(shown, _without_word(shown, word)))
    for first, *others in _ALSO_WRITTEN:
        if shown.kind == first.kind and "".join(shown.start.split()) == "".join(first.start.split()):
            return msgspec.structs.replace(form, calls=(shown, *others))
    return form


def _without_word(shown: CallForm, word: str) -> CallForm:
    """Return a form without a word before the name, and before the name in the id."""
    names = ("start", "next", "empty_next", "id_text")
    return msgspec.structs.replace(shown, **{name: "".join(getattr(shown, name).rsplit(word, 1)) for name in names})


def _without_wrapper(shown: CallForm) -> list[CallForm]:
    """Return a form without the tags around all calls of a turn; none if it has no such tags."""
    wrapper = first_marker(shown.start)
    closing = wrapper.replace("<", "</", 1)
    start = shown.start.removeprefix(wrapper).lstrip()
    if not start or not shown.end.endswith(closing):
        return []
    ends = {name: getattr(shown, name).removesuffix(closing).rstrip() for name in ("end", "empty_end")}
    return [msgspec.structs.replace(shown, start=start, **ends)]


def named_form(tool_parser: str, reasoning_parser: str) -> AnswerForm:
    """Return the form of answers by the names of --tool-call-parser and --reasoning-parser, none for either included.

    A call inside a thought is part of it: these names say nothing of a model that leaves thoughts open."""
    if tool_parser == "openai" or reasoning_parser == HARMONY:
        return msgspec.structs.replace(FORMS["openai"], name=tool_parser)
    return msgspec.structs.replace(
        FORMS.get(tool_parser, NO_FORM),
        thought=THOUGHTS.get(reasoning_parser),
        begins_inside=reasoning_parser in BEGIN_INSIDE,
        calls_end_thought=False,
    )


def ends_inside(prompt: str, *, is_continued: bool = False) -> bool:
    """Return whether the prompt shows that the answer starts inside reasoning: it ends with any parser's opening
    marker, and white space at most.

    `is_continued`: the answer continues the last turn, so that the reasoning may have started anywhere in the prompt.
    Otherwise earlier markers do not count, since a user may have written them."""
    if is_continued:
        return any(prompt.rfind(opening) > prompt.rfind(closing) for opening, closing in THOUGHTS.values())
    return prompt.rstrip().endswith(tuple(opening for opening, _ in THOUGHTS.values()))

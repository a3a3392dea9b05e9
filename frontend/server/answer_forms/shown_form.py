"""Words for a choice of a form: the lines of the start, and the object of /server_info."""

from __future__ import annotations

import msgspec

from ....ipc.codec import JsonObject
from .choose import Choice

KINDS = {
    "object": "JSON objects",
    "json": "a name and JSON arguments",
    "tagged": "tagged arguments",
    "literal": "arguments as in a program",
}
_ORIGINS = {
    "named": "as --tool-call-parser names",
    "response_template": "read from the checkpoint's response template",
    "learned": "learned from the chat template",
    "tried": "found by trial",
    "sign": "taken by a sign in the chat template, which shows no calls",
    "unknown": "form unknown",
}
REMEDY = "tool calls will be text. Name a parser with --tool-call-parser, or force calls with tool_choice"


def form_line(choice: Choice) -> str:
    """Return the line of the start about the form of answers."""
    form = choice.form
    thoughts = "no thoughts"
    if form.reader == "harmony":
        thoughts = "thoughts: the analysis channel"
    elif form.thought is not None:
        thoughts = "thoughts: " + "…".join(form.thought)
    if choice.origin == "unknown":
        return f"calls: form unknown ({choice.why}): {REMEDY}; {thoughts}"
    kinds = [KINDS[call.kind] for call in form.calls[:1]]
    several = ["several at a time" for call in form.calls[:1] if call.next]
    details = ", ".join([*kinds, *several]) or form.name
    if choice.origin != "learned" and details != form.name:
        details = f"{form.name}: {details}"
    line = f"calls: {_ORIGINS[choice.origin]} ({details}), {thoughts}; {_probes(choice)}"
    failed = [each.probe for each in choice.different]
    if failed:
        return f"{line}; not returned: {', '.join(failed)}"
    return line


def difference_line(choice: Choice) -> str:
    """Return the warning for a named form that does not return a probe; empty if all return."""
    if choice.origin != "named" or not choice.different:
        return ""
    first = choice.different[0]
    what = f"{first.probe}: {first.difference}"
    return f"--tool-call-parser {choice.form.name} does not read what the chat template writes: {what}"


def history_line(choice: Choice) -> str:
    """Return the line of the start about the answer whose cached prefix the next turn does not find; empty if there is
    none."""
    lost = choice.lost_prefix
    if lost is None:
        return ""
    answer = " ".join([lost.answer, *(f"({name}: {value})" for name, value in lost.variables.items())])
    what = "the next turn's prompt differs from what was generated at"
    return f"history: {answer}: {what}: {lost}, so its KV blocks are computed again"


def form_object(choice: Choice) -> JsonObject:
    """Return a choice as /server_info shows it."""
    shown: JsonObject = {
        "origin": choice.origin,
        "form": msgspec.to_builtins(choice.form),
        "probes_returned": choice.num_returned,
        "probes_shown": choice.num_shown,
    }
    if choice.why:
        shown["why"] = choice.why
    if choice.different:
        first = choice.different[0]
        shown["first_difference"] = {"probe": first.probe, "difference": first.difference, "text": first.text}
    if choice.lost_prefix is not None:
        shown["history_difference"] = msgspec.to_builtins(choice.lost_prefix)
    return shown


def _probes(choice: Choice) -> str:
    return f"{choice.num_returned} of {choice.num_shown} probes returned"

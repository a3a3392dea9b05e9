"""Constraints on calls in a model's own form, for answers that must call tools or must call them by their schemas.

Knows no grammar language: the core compiles the constraint (core/features/grammar/calls/).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.params.call_form import first_marker, markers_of
from ....ipc.params.calls_constraint import CallsConstraint
from ....ipc.params.structured_outputs import StructuredOutputsParams
from .form import AnswerForm, CallForm
from .joint_plan import JointPlan


def forced_calls(
    form: AnswerForm,
    schemas: Mapping[str, JsonObject],
    *,
    has_one_call: bool,
    may_think: bool,
    may_begin_with_space: bool = False,
) -> StructuredOutputsParams:
    """Return the constraint that an answer consists of calls of these tools. schemas: those of the arguments by name;
    all calls conform. may_think: a thought may come before the calls; may_begin_with_space: the
    prompt opens one, or ends with text of the turn."""
    constraint = CallsConstraint(
        form=form.calls[0],
        others=other_calls(form),
        value_ends=_value_ends(form),
        tools=dict(schemas),
        has_one_call=has_one_call,
        thought=form.thought if may_think else None,
        may_begin_with_space=may_begin_with_space,
    )
    return StructuredOutputsParams(calls=constraint.to_text())


def strict_calls(
    form: AnswerForm,
    schemas: Mapping[str, JsonObject],
    strict_names: Collection[str],
    *,
    has_one_call: bool,
    has_text: bool,
) -> StructuredOutputsParams:
    """Return the constraint that calls in an answer are of these tools, and that those of `strict_names` conform to
    their schemas. has_text: it constrains the whole answer; otherwise the part that begins with the first marker of a
    call."""
    tools = {name: schema if name in strict_names else None for name, schema in schemas.items()}
    calls = form.calls[0]
    calls = calls if has_text else msgspec.structs.replace(calls, start=calls.start.lstrip())
    constraint = CallsConstraint(
        form=calls,
        others=other_calls(form),
        value_ends=_value_ends(form),
        tools=tools,
        has_text=has_text,
        has_one_call=has_one_call,
    )
    return StructuredOutputsParams(calls=constraint.to_text())


def begin_of_calls(form: AnswerForm, is_token: Callable[[str], bool]) -> str:
    """Return the text from which on a constraint on calls applies: the first marker of their start or, if thoughts or
    content of the form have it, too, the start up to its last token. "" if it does not begin with a token. is_token:
    whether a text is one token wherever it stands."""
    start = form.calls[0].start.partition("{")[0].lstrip()
    marker = first_marker(start)
    if not is_token(marker):
        return ""
    if marker not in "".join((*(form.thought or ()), form.content_open, form.turn_end)):
        return marker
    place = end = 0
    for each in markers_of(start):
        place = start.index(each, place) + len(each)
        if is_token(each):
            end = place
    return start[:end]


def form_behind_thought(form: AnswerForm, begin: str) -> AnswerForm:
    """Return the form by which a constrained answer is read that begins inside a thought, which the constraint does not
    bind: calls there are part of the thought. `begin`: the token that ends it and begins calls; "" if there is
    none."""
    if not begin:
        return msgspec.structs.replace(form, calls_end_thought=False)
    others = other_calls(form)
    return msgspec.structs.replace(form, calls=tuple(call for call in form.calls if call not in others))


def other_calls(form: AnswerForm) -> tuple[CallForm, ...]:
    """Return the forms of calls that begin with another marker than the first, and not with a header before it."""
    start = form.calls[0].start
    marker = first_marker(start)
    others = (call for call in form.calls[1:] if not call.start.endswith(start))
    return tuple(call for call in others if first_marker(call.start) != marker)


def _value_ends(form: AnswerForm) -> tuple[str, ...]:
    """Return the joints that end a value wherever the form's calls are read, whichever of its forms they are in."""
    if form.calls[0].kind != "tagged":
        return ()
    plan = JointPlan(form)
    return tuple(joint.text for joint in plan.state("value", plan.related((0,))))

"""Constraints on calls in a model's own form, for answers that must call tools or must call them by their schemas.

Knows no grammar language: the core compiles the constraint (core/features/grammar/calls/).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.params.calls_constraint import CallsConstraint
from ....ipc.params.structured_outputs import StructuredOutputsParams
from .form import AnswerForm


def forced_calls(
    form: AnswerForm, schemas: Mapping[str, JsonObject], *, has_one_call: bool, may_think: bool
) -> StructuredOutputsParams:
    """Return the constraint that an answer consists of calls of these tools. schemas: those of the arguments by name;
    all calls conform. may_think: a thought may come before the calls."""
    constraint = CallsConstraint(
        form=form.calls[0],
        tools=dict(schemas),
        has_one_call=has_one_call,
        thought=form.thought if may_think else None,
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
    constraint = CallsConstraint(form=calls, tools=tools, has_text=has_text, has_one_call=has_one_call)
    return StructuredOutputsParams(calls=constraint.to_text())

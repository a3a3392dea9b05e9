"""Metadata of the fields of HTTP bodies: what /openapi.json and the page /docs say about each.

A field's sentence stands beside the field, in its annotation. Limits of values are not said there: they come from the
types and from the ranges of sampling parameters (`server/http/openapi.py`).
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Meta

GROUP = "x-group"  # key of a field's schema: OURS, UNUSED, or one that openapi.py finds
ABSENT = "x-default"  # key of a field's schema: what holds without the field, if it is no value
OURS = "beyond the API"
UNUSED = "no effect"

Value: TypeAlias = str | bool | int | float


def means(text: str, absent: Value | None = None) -> Meta:
    """Return the metadata of a field. `absent`: what holds if the field is left out or null, as a value, or in words;
    None: the schema does not say it."""
    return _meta(text, absent, {})


def ours(text: str, absent: Value | None = None) -> Meta:
    """Return the metadata of a field that the API itself does not have. `absent`: see `means`."""
    return _meta(text, absent, {GROUP: OURS})


def unused(text: str) -> Meta:
    """Return the metadata of a field that is accepted and has no effect."""
    return _meta(f"{text} No effect here.", None, {GROUP: UNUSED})


def _meta(text: str, absent: Value | None, schema: dict[str, Value]) -> Meta:
    return Meta(description=text, extra_json_schema=schema if absent is None else schema | {ABSENT: absent})

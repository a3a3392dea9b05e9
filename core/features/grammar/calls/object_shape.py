"""The shape of a call that is one JSON object: a sample of the template, with places for its values."""

from __future__ import annotations

import json
from collections.abc import Iterator

from .....ipc.errors import RequestError
from .....ipc.params.call_form import CallForm

_DECODER = json.JSONDecoder()


def shape_with_places(form: CallForm) -> str:
    """Return a form's sample of an object with {NAME}, {ARGUMENTS} and {ID} in place of its values. RequestError if the
    sample does not have them."""
    shape = form.shape
    try:
        sample = json.loads(shape)
        name, arguments = _name_and_arguments(form, sample)
        shape = _replaced(shape, arguments, "{ARGUMENTS}")
        shape = _replaced(shape, name, '"{NAME}"')
        if form.id_path:
            called = _at(sample, form.id_path)
            place = "{INDEX}" if str(called).isdecimal() else "{ID}"
            shape = _replaced(shape, called, f'"{place}"' if isinstance(called, str) else place)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RequestError(f"structured_outputs.calls: the shape {shape!r:.80} is no call: {error!r:.80}") from None
    return shape


def _name_and_arguments(form: CallForm, sample: object) -> tuple[object, object]:
    if form.name_path:
        return _at(sample, form.name_path), _at(sample, form.arguments_path)
    if not isinstance(sample, dict) or len(sample) != 1:
        raise ValueError("its only key is to be the name")
    return next(iter(sample.items()))


def _at(sample: object, path: tuple[str, ...]) -> object:
    for key in path:
        if not isinstance(sample, dict):
            raise ValueError(f"nothing has the key {key!r:.80}")
        sample = sample[key]
    return sample


def _replaced(text: str, value: object, place: str) -> str:
    """Return a JSON text with `place` for the first value in it that equals `value`."""
    for begin, end, found in _values(text):
        if found == value:
            return text[:begin] + place + text[end:]
    raise ValueError(f"{value!r:.80} is not in it")


def _values(text: str) -> Iterator[tuple[int, int, object]]:
    """Yield the objects, texts and numbers inside of an object, with their places."""
    for begin in range(1, len(text)):
        if text[begin] in '{"0123456789':
            try:
                found, end = _DECODER.raw_decode(text, begin)
            except ValueError:
                continue
            yield begin, end, found

"""Readers of the joints between the sentinels of a rendered answer, one for each way of writing arguments.

A reader gets the text of an answer and returns where its calls stand in it. It stops at the first call that the text
does not show. Knows no template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from ....ipc.codec import JsonObject
from .probe import ProbeCall

_DECODER = json.JSONDecoder()


class Place(NamedTuple):
    """Where a call stands in a text: from `begin`, the first character behind the joint before it, to `end`."""

    begin: int
    end: int
    name_end: int  # end of the name; objects have their name inside
    arguments_begin: int


class ObjectPaths(NamedTuple):
    """Keys of an object that is a call."""

    name: tuple[str, ...]
    arguments: tuple[str, ...]
    id: tuple[str, ...]


class ObjectPlaces(NamedTuple):
    places: list[Place]
    paths: ObjectPaths


def object_places(text: str, calls: tuple[ProbeCall, ...], ids: tuple[str, ...]) -> ObjectPlaces | None:
    """Return the places of calls that are JSON objects with name and arguments; None if one is not."""
    places = list[Place]()
    found: ObjectPaths | None = None
    for call, call_id in zip(_shown(text, calls), ids, strict=False):
        begin = _end_of(places)
        named = text.find(call.name, begin)
        for place, end, value in _objects(text, begin, named):
            found = _paths(value, call, call_id)
            if found is not None:
                places.append(Place(place, end, end, place))
                break
        else:
            return None
    if found is None:
        return None
    return ObjectPlaces(places, found)


def json_places(text: str, calls: tuple[ProbeCall, ...]) -> list[Place]:
    """Return the places of calls that are a name and, behind it, the arguments as a JSON object; none if one is not."""
    places = list[Place]()
    shown = _shown(text, calls)
    limits = [text.find(call.name) for call in shown[1:]]
    limits.append(len(text))
    for call, limit in zip(shown, limits, strict=False):
        begin = _end_of(places)
        for place, end, value in _objects(text, text.find(call.name, begin), limit):
            if value == call.arguments:
                name = text.rfind(call.name, begin, place)
                places.append(Place(name, end, name + len(call.name), place))
                break
        else:
            return []
    return places


def spread_places(text: str, calls: tuple[ProbeCall, ...]) -> list[Place]:
    """Return the places of calls that are a name and, behind it, keys and texts one by one; none if one is not."""
    places = list[Place]()
    for call in _shown(text, calls):
        begin = _end_of(places)
        end = text.find(call.name, begin)
        keys = list[int]()
        for key, value in call.arguments.items():
            keys.append(text.find(key, end))
            value_begin = text.find(str(value), max(end, keys[-1]))
            if min(keys[-1], value_begin) < 0:
                return []
            end = value_begin + len(str(value))
        name = text.rfind(call.name, begin, keys[0])
        places.append(Place(name, end, name + len(call.name), keys[0]))
    return places


def _end_of(places: list[Place]) -> int:
    return max((place.end for place in places), default=0)


def _shown(text: str, calls: tuple[ProbeCall, ...]) -> list[ProbeCall]:
    return [call for call in calls if call.name in text]


def _objects(text: str, begin: int, end: int) -> Iterator[tuple[int, int, JsonObject]]:
    """Yield the JSON objects that begin in a part of `text`, each with its begin and its end."""
    place = text.find("{", begin, end)
    while place >= 0:
        try:
            value, value_end = _DECODER.raw_decode(text, place)
            if isinstance(value, dict):
                yield place, value_end, value
        except (ValueError, RecursionError):
            pass
        place = text.find("{", place + 1, end)


def _paths(value: JsonObject, call: ProbeCall, call_id: str) -> ObjectPaths | None:
    """Return the keys of an object that is the whole call, and no other."""
    if value == {call.name: call.arguments}:
        return ObjectPaths((), (), ())
    name = _path(value, call.name)
    arguments = _path(value, call.arguments)
    if name is None or arguments is None:
        return None
    return ObjectPaths(name, arguments, _path(value, call_id) or ())


def _path(value: object, wanted: object) -> tuple[str, ...] | None:
    """Return the keys that lead to `wanted` in an object; () for the object itself, None if it is not there."""
    if value == wanted:
        return ()
    if isinstance(value, dict):
        for key, inner in value.items():
            path = _path(inner, wanted)
            if path is not None:
                return (key, *path)
    return None

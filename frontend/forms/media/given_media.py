"""GivenMedia: the media of one prompt, gathered from the forms of vLLM, OpenAI and Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from ....ipc.errors import RequestError
from ....ipc.messages.client import MediaPart, Medium
from ....ipc.messages.media import A_MEDIUM, MEDIUM, MediaKind
from .data_url import decode_base64
from .held_medium import Detail, to_medium

PART_KINDS: dict[str, MediaKind] = {  # by the type of a chat's part
    **dict.fromkeys(("image_url", "input_image", "image_pil", "image"), "image"),
    **dict.fromkeys(("audio_url", "input_audio", "audio"), "audio"),
}
URL_SCHEMES = ("data:", "http:", "https:", "file:")
DETAILS = ("", "auto", "low", "high")
_IN_BASE64 = ("data", "base64")
_FIELDS: dict[MediaKind, tuple[str, ...]] = {  # fields of a part that may hold the medium
    "image": ("image_url", "image", "url", *_IN_BASE64),
    "audio": ("audio_url", "audio", "input_audio", "url", "path", *_IN_BASE64),
}


class GivenMedia:
    """Media in the order of their places in the prompt."""

    def __init__(self) -> None:
        self.media: list[Medium] = []

    def add(self, given: object, kind: MediaKind, uuid: object = None, detail: object = None) -> MediaPart:
        """Add a medium and return the part that stands for it in a chat. RequestError if the medium, `uuid` or `detail`
        is invalid."""
        uuid, detail = uuid or "", detail or ""
        if not isinstance(uuid, str) or len(uuid) > 256:
            raise RequestError(
                f"the uuid of {A_MEDIUM[kind]} is {uuid!r:.80}: it must be text of at most 256 characters"
            )
        detail = "high" if detail == "original" else detail  # no family takes more pixels than for `high`
        if detail not in DETAILS:
            raise RequestError(
                f"the detail of {A_MEDIUM[kind]} is {detail!r:.80}: it must be auto, low, high or original"
            )
        self.media.append(to_medium(given, kind, uuid=uuid, detail=cast("Detail", detail)))
        return MediaPart(len(self.media) - 1)

    def add_part(self, where: str, part: Mapping[str, Any]) -> MediaPart:
        """Add the medium of a chat's part, a mapping with one of the types of PART_KINDS, and return the part that
        stands for it. RequestError, about `where`, if it is invalid.

        A text in the part is a URL or base64, never a path: a chat often comes from another party, which must not name
        files here."""
        kind, detail = PART_KINDS[part["type"]], part.get("detail")
        try:
            given, inner = _content(kind, part, (part["type"], *_FIELDS[kind]))
            return self.add(given, kind, part.get("uuid"), inner.get("detail", detail))
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from None

    def add_data(self, data: object, uuids: object) -> None:
        """Add vLLM's multi_modal_data and multi_modal_uuids of a prompt, kind by kind in their order. RequestError if
        one is invalid, or their numbers differ."""
        media, names = _by_kind("multi_modal_data", data), _by_kind("multi_modal_uuids", uuids)
        for kind in dict.fromkeys((*media, *names)):
            listed, uuids_of = media.get(kind, []), names.get(kind, [])
            listed = listed or [None] * len(uuids_of)
            uuids_of = uuids_of or [None] * len(listed)
            if len(listed) != len(uuids_of):
                name = f"{MEDIUM[kind]}s"
                raise RequestError(f"{len(listed)} {name} have {len(uuids_of)} uuids: give one each, or None")
            for given, uuid in zip(listed, uuids_of, strict=True):
                self.add(given, kind, uuid)


def _content(kind: MediaKind, part: Mapping[str, Any], fields: Sequence[str]) -> tuple[object, Mapping[str, Any]]:
    """Return the medium in the first of `fields` that is given, None if none is, and the mapping that holds it.
    RequestError for a text that is neither a URL nor base64."""
    field = next((name for name in fields if name in part), None)
    if field is None:
        return None, part
    given = part[field]
    if isinstance(given, Mapping) and "array" not in given:
        return _content(kind, given, ("url", *_IN_BASE64))
    if isinstance(given, str):
        given = given.strip()
        if given[:6].lower().startswith(URL_SCHEMES):
            return given, part
        if field not in _IN_BASE64:
            raise RequestError(f"the {MEDIUM[kind]} {given!r:.80} is no data:, http(s): or file: URL")
        given = decode_base64(given, field)
    return given, part


def _by_kind(field: str, given: object) -> dict[MediaKind, list[object]]:
    """Return the media, or their uuids, in a field of a prompt, as a list for each kind. RequestError if the field is
    not a mapping, or has media of other kinds."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise RequestError(f"{field} is of type {type(given).__name__}: it must be {{'image': …}} or {{'audio': …}}")
    kinds = get_args(MediaKind)
    if others := [name for name, value in given.items() if name not in kinds and value not in (None, [], ())]:
        raise RequestError(f"{field} has {', '.join(map(str, others))}: only {' and '.join(kinds)} are served")
    return {kind: _listed(value) for kind, value in given.items() if kind in kinds and value is not None}


def _listed(given: object) -> list[object]:
    is_clip = isinstance(given, tuple) and len(given) == 2 and is_number(given[1])
    if isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray | memoryview) and not is_clip:
        return list(given)
    return [given]


def is_number(value: object) -> bool:
    """Return whether a value is a number of Python or numpy, as the rate of a clip must be."""
    return isinstance(value, int | float) or (hasattr(value, "item") and getattr(value, "shape", None) == ())

"""GivenMedia: the images of one prompt, gathered from the forms of vLLM, OpenAI and Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from ....ipc.errors import RequestError
from ....ipc.messages.client import MediaPart, Medium
from .held_medium import Detail, to_medium

IMAGE_TYPES = ("image_url", "input_image", "image_pil", "image")
URL_SCHEMES = ("data:", "http:", "https:", "file:")
DETAILS = ("", "auto", "low", "high")


class GivenMedia:
    """Media in the order of their places in the prompt."""

    def __init__(self) -> None:
        self.media: list[Medium] = []

    def add(self, image: object, uuid: object = None, detail: object = None) -> MediaPart:
        """Add an image and return its part of a chat; RequestError for an invalid one."""
        uuid, detail = uuid or "", detail or ""
        if not isinstance(uuid, str) or len(uuid) > 256:
            raise RequestError(f"the uuid of an image is {uuid!r:.80}: it must be text of at most 256 characters")
        if detail not in DETAILS:
            raise RequestError(f"the detail of an image is {detail!r:.80}: it must be auto, low or high")
        self.media.append(to_medium(image, uuid=uuid, detail=cast("Detail", detail)))
        return MediaPart(len(self.media) - 1)

    def add_part(self, where: str, part: Mapping[str, Any]) -> MediaPart:
        """Add the image of a chat's part, a mapping with one of IMAGE_TYPES.

        A text in it is a URL, never a path: a chat often comes from somebody else, who must not name files here."""
        kind = part["type"]
        image = next((part[name] for name in (kind, "image_url", "image", "url", "data") if name in part), None)
        detail = part.get("detail")
        if isinstance(image, Mapping):
            detail = image.get("detail", detail)
            image = image.get("url")
        if isinstance(image, str) and not image.lower().startswith(URL_SCHEMES):
            raise RequestError(f"{where}: the image {image!r:.80} is no data:, http(s): or file: URL")
        try:
            return self.add(image, part.get("uuid"), detail)
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from None

    def add_data(self, data: object, uuids: object) -> None:
        """Add vLLM's multi_modal_data and multi_modal_uuids of a prompt."""
        images = _images_of("multi_modal_data", data)
        names = _images_of("multi_modal_uuids", uuids)
        images = images or [None] * len(names)
        names = names or [None] * len(images)
        if len(images) != len(names):
            raise RequestError(f"{len(images)} images have {len(names)} uuids: give one each, or None")
        for image, name in zip(images, names, strict=True):
            self.add(image, name)


def _images_of(field: str, given: object) -> list[object]:
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise RequestError(f"{field} is of type {type(given).__name__}: it must be {{'image': …}}")
    if others := [kind for kind, value in given.items() if kind != "image" and value not in (None, [], ())]:
        raise RequestError(f"{field} has {', '.join(map(str, others))}: only image is served")
    images = given.get("image")
    if images is None:
        return []
    if isinstance(images, Sequence) and not isinstance(images, str | bytes | bytearray | memoryview):
        return list(images)
    return [images]

"""Parts of messages: texts, thoughts and images, in the forms of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ....ipc.errors import RequestError

TEXTS = ("text", "input_text", "output_text", "refusal")
THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")
IMAGES = ("image_url", "input_image", "image")


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """Base of structs in a conversation. Unknown fields are ignored: clients send back messages of other servers."""


class ImageUrl(Sent, frozen=True, kw_only=True):
    """OpenAI's form of an image in a chat."""

    url: str | None = None
    detail: str | None = None


class ImageSource(Sent, frozen=True, kw_only=True):
    """Anthropic's form of an image."""

    type: str
    media_type: str = "image/png"
    data: str | None = None
    url: str | None = None


class MessagePart(Sent, frozen=True, kw_only=True):
    """Part of a message. Types other than text, thought and image decode, so that an error can name them."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: str | ImageUrl | None = None
    source: ImageSource | None = None
    detail: str | None = None
    uuid: str | None = None  # vLLM's: the caller's name of the image
    file_id: str | None = None


class ImagePart(MessagePart, frozen=True, kw_only=True):
    """Image in any form, read by `content_of`."""

    type: str = "image_url"
    url: str | None  # None: the bytes that had the uuid before
    where: str  # path in the body, for errors


def content_of(
    where: str, content: str | Sequence[MessagePart] | None, *, besides: Sequence[str] = ()
) -> tuple[str | list[MessagePart], str | None]:
    """Return the content of a message as a text or as parts, ImageParts or of type text, and its thoughts joined with
    line breaks.

    `where`: path of the content, for errors. Parts with a type in `besides` are skipped. RequestError for parts of
    another type."""
    if content is None or isinstance(content, str):
        return content or "", None
    parts, thoughts = list[MessagePart](), list[str]()
    for position, part in enumerate(content):
        text = part.text if part.refusal is None else part.refusal
        if part.type in besides:
            continue
        if part.type in THOUGHTS:
            thoughts.append(part.thinking or text or "")
        elif part.type in IMAGES:
            parts.append(part if isinstance(part, ImagePart) else _image(f"{where}[{position}]", part))
        elif part.type not in TEXTS:
            kind = f"{part.type!r:.40}"
            raise RequestError(f"{where}[{position}] is a part of type {kind}, which is not served: leave it out")
        elif text is None:
            raise RequestError(f"{where}[{position}] has no text: give one or leave the part out")
        else:
            parts.append(MessagePart(type="text", text=text))
    return parts, "\n".join(filter(None, thoughts)) or None


def _image(where: str, part: MessagePart) -> ImagePart:
    given, detail = part.image_url, part.detail
    url = given.url if isinstance(given, ImageUrl) else given
    if isinstance(given, ImageUrl):
        detail = given.detail or detail
    if part.file_id is not None:
        raise RequestError(f"{where} has a file_id: this engine stores no files, give the image itself")
    if part.source is not None:
        url = _url_of(where, part.source)
    if url is None and part.uuid is None:
        raise RequestError(f"{where} is a part of type {part.type!r} without an image: give its URL or its data")
    return ImagePart(url=url, detail=detail, uuid=part.uuid, where=where)


def _url_of(where: str, source: ImageSource) -> str:
    if source.type == "base64" and source.data is not None:
        return f"data:{source.media_type};base64,{source.data}"
    if source.type == "url" and source.url is not None:
        return source.url
    raise RequestError(f"{where}.source is of type {source.type!r:.40}: it must be base64 with data, or url with url")

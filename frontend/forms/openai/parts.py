"""Parts of messages: text, reasoning, images and audio, in the forms of OpenAI, Anthropic and Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from ....ipc.errors import RequestError
from ....ipc.messages.media import A_MEDIUM, MediaKind
from ..field import means, ours, unused
from ..media.data_url import is_data_url
from ..media.given_media import PART_KINDS

TEXTS = ("text", "input_text", "output_text", "refusal")
THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")
DOCUMENTS = ("document", "search_result")
MEDIA = {name: kind for name, kind in PART_KINDS.items() if name != "image_pil"}  # image_pil is a Python object


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """Base of structs in a conversation. Unknown fields are ignored: clients send back messages of other servers."""


def refuse_left_out(kind: str, left_out: str) -> None:
    """Raise ValueError if the type `kind` matches `left_out`, the LEFT_OUT of its struct. Without --strict-fields the
    caller then removes such parts and decodes the body again."""
    if re.fullmatch(left_out, kind):
        raise ValueError(f"type {kind:.80} is not served: leave it out")


class CacheControl(Sent, frozen=True, kw_only=True):
    """Anthropic's mark of a part of the prompt that is to stay cached."""

    type: Annotated[Literal["ephemeral"], means("Always ephemeral.")] = "ephemeral"
    ttl: Annotated[Literal["5m", "1h"] | None, means("How long, from its last use on.", "5m")] = None


class MediaUrl(Sent, frozen=True, kw_only=True):
    """OpenAI's form of an image in a chat, and vLLM's of audio."""

    url: Annotated[str | None, means("Address of the file: https:, data: or, where allowed, file:.")] = None
    detail: Annotated[str | None, means("How finely an image is read: low, high or auto.", "auto")] = None


class AudioData(Sent, frozen=True, kw_only=True):
    """OpenAI's form of audio in a chat. The audio's format is read from its content."""

    data: Annotated[str | None, means("The bytes of the file in base64.")] = None
    url: Annotated[str | None, ours("Address of the file, in place of its bytes.")] = None
    format: Annotated[str | None, unused("Format of the file, which is read from its bytes.")] = None


class ImageSource(Sent, frozen=True, kw_only=True):
    """The source of an image or a document, in Anthropic's form."""

    type: Annotated[str, means("Where the content is: base64, url, or text and content for a document.")] = ""
    media_type: Annotated[str, means("Format of the bytes.")] = "image/png"
    data: Annotated[str | None, means("The bytes in base64, or the text of a document.")] = None
    url: Annotated[str | None, means("Address of the file.")] = None
    content: Annotated[str | list[MessagePart] | None, means("Content of a document.")] = None


class MessagePart(Sent, frozen=True, kw_only=True):
    """Part of a message: text, reasoning, an image, audio, a document or a search result. Parts of other types are
    decoded too, so that an error can name the type."""

    type: Annotated[str, means("Kind of the part, such as text, image_url, input_audio or thinking.")]
    text: Annotated[str | None, means("The text of a part of type text.")] = None
    refusal: Annotated[str | None, means("What an answer of OpenAI's said in place of text.")] = None
    thinking: Annotated[str | None, means("Thoughts of an earlier answer.")] = None
    image_url: Annotated[str | MediaUrl | None, means("Address of an image; data: holds the image itself.")] = None
    audio_url: Annotated[str | MediaUrl | None, ours("Address of a clip of audio.")] = None
    input_audio: Annotated[AudioData | None, means("A clip of audio in base64.")] = None
    audio: Annotated[str | AudioData | None, ours("Address of a clip, in Hugging Face's form.")] = None
    url: Annotated[str | None, ours("Address of an image or clip, in Hugging Face's form.")] = None
    base64: Annotated[str | None, ours("Bytes of an image or clip, in Hugging Face's form.")] = None
    source: Annotated[
        ImageSource | str | None, means("Anthropic's form of an image or a document, or the origin of a search result.")
    ] = None
    detail: Annotated[str | None, means("How finely an image is read: low, high or auto.", "auto")] = None
    uuid: Annotated[str | None, ours("The caller's name of a medium, by which it need not be sent again.")] = None
    file_id: Annotated[str | None, means("A file stored at OpenAI. Refused: this engine stores no files.")] = None
    title: Annotated[str | None, means("Title of a document.")] = None
    context: Annotated[str | None, means("What a document is about.")] = None
    cache_control: Annotated[CacheControl | None, means("Anthropic's mark: keep the prompt cached.")] = None


class MediumPart(MessagePart, frozen=True, kw_only=True):
    """Image or audio in any form, read by `content_of`. If `url` is None, it stands for the medium that an earlier
    request sent under this uuid."""

    kind: MediaKind
    where: str  # path in the body, for errors


def content_of(
    where: str, content: str | Sequence[MessagePart] | None, *, besides: Sequence[str] = ()
) -> tuple[str | list[MessagePart], str | None]:
    """Return the content of a message, as text or as parts (MediumParts and parts of type text), and its reasoning,
    joined with line breaks; None if there is none.

    `where`: path of the content, for errors. Parts with a type in `besides` are skipped. RequestError if a part has an
    unknown type or is invalid."""
    if content is None or isinstance(content, str):
        return content or "", None
    parts, thoughts = list[MessagePart](), list[str]()
    for position, part in enumerate(content):
        text = part.text if part.refusal is None else part.refusal
        if part.type in besides:
            continue
        if part.type in THOUGHTS:
            thoughts.append(part.thinking or text or "")
        elif part.type in MEDIA:
            parts.append(part if isinstance(part, MediumPart) else _medium(f"{where}[{position}]", part))
        elif part.type in DOCUMENTS:
            parts += _document(f"{where}[{position}]", part)
        elif part.type not in TEXTS:
            kind = f"{part.type!r:.40}"
            raise RequestError(f"{where}[{position}] is a part of type {kind}, which is not served: leave it out")
        elif text is None:
            raise RequestError(f"{where}[{position}] has no text: give one or leave the part out")
        else:
            parts.append(MessagePart(type="text", text=text))
    return parts, "\n".join(filter(None, thoughts)) or None


def _document(where: str, part: MessagePart) -> list[MessagePart]:
    """Return a document or a search result as texts and images: its title and its context or source, then its content.
    RequestError if its content cannot be read, such as that of a PDF."""
    source, heads = ImageSource() if part.source is None else part.source, [part.title, part.context]
    if isinstance(source, str):  # a search result: `source` is its origin
        content, heads = getattr(part, "content", None), [part.title, source]
    else:
        content = source.data if source.type == "text" else source.content
    if content is None:
        kind = "" if isinstance(source, str) else source.media_type if source.type == "base64" else source.type
        raise RequestError(f"{where} is a {part.type} of type {kind!r:.40}, which cannot be read: give its text")
    head = "".join(f"{text}\n" for text in heads if text)
    inner, _ = content_of(f"{where}.content", content)
    body = [MessagePart(type="text", text=inner)] if isinstance(inner, str) else inner
    return [MessagePart(type="text", text=head), *body] if head else body


def _medium(where: str, part: MessagePart) -> MediumPart:
    kind = MEDIA[part.type]
    if part.file_id is not None:
        raise RequestError(f"{where} has a file_id: this engine stores no files, give the {kind} itself")
    url, detail = _audio(part) if kind == "audio" else _image(where, part)
    if url is None and part.uuid is None:
        name = A_MEDIUM[kind]
        raise RequestError(f"{where} is a part of type {part.type!r} without {name}: give its URL or its data")
    return MediumPart(type=part.type, kind=kind, url=url, detail=detail, uuid=part.uuid, where=where)


def _image(where: str, part: MessagePart) -> tuple[str | None, str | None]:
    """Return the URL, None if there is none, and the detail of an image."""
    if part.source is not None:
        return _url_of(where, part.source), part.detail
    if isinstance(part.image_url, MediaUrl):
        return part.image_url.url, part.image_url.detail or part.detail
    return part.image_url or part.url or _data_url("image", part.base64), part.detail


def _audio(part: MessagePart) -> tuple[str | None, str | None]:
    """Return the URL, None if there is none, and the detail of audio, which later checks refuse."""
    given = part.input_audio or part.audio or part.audio_url
    if isinstance(given, AudioData):
        return given.url or _data_url("audio", given.data), part.detail
    if isinstance(given, MediaUrl):
        return given.url, given.detail or part.detail
    return given or part.url or _data_url("audio", part.base64), part.detail


def _data_url(kind: MediaKind, data: str | None) -> str | None:
    """Return base64 as a data: URL, unless it is one already. The format is read from the content later."""
    return data if data is None or is_data_url(data) else f"data:{kind}/*;base64,{data}"


def _url_of(where: str, source: ImageSource | str) -> str:
    if isinstance(source, str):
        raise RequestError(f"{where}.source is a text: it must be an object, of type base64 with data, or url with url")
    if source.type == "base64" and source.data is not None:
        return f"data:{source.media_type};base64,{source.data}"
    if source.type == "url" and source.url is not None:
        return source.url
    raise RequestError(f"{where}.source is of type {source.type!r:.40}: it must be base64 with data, or url with url")

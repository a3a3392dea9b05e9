"""Images through the client library argv[2] against the server at argv[1]; prints its results as JSON.

argv[3] and argv[4] are PNG files of pictures; argv[5] is the question about them.
"""

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wanted import MODEL, URL, Seen

LIBRARY, FIRST, SECOND, ASKED = sys.argv[2], *(Path(path).read_bytes() for path in sys.argv[3:5]), sys.argv[5]
MAX_TOKENS = 16
seen = Seen()


def data_url(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def turn(*pictures: bytes, detail: str = "auto") -> list[Any]:
    """Return a chat in OpenAI's form."""
    parts = [{"type": "image_url", "image_url": {"url": data_url(each), "detail": detail}} for each in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": ASKED}]}]


def with_openai() -> None:
    import openai

    client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS}
    respond: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": MAX_TOKENS}
    image = {"type": "input_image", "image_url": data_url(FIRST), "detail": "auto"}
    given: list[Any] = [{"role": "user", "content": [image, {"type": "input_text", "text": ASKED}]}]

    def chat(messages: list[Any]) -> Any:
        return client.chat.completions.create(messages=messages, **asked)

    def streamed_chat() -> str:
        chunks = client.chat.completions.create(messages=turn(FIRST), stream=True, **asked)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def streamed_response() -> str:
        with client.responses.stream(input=given, **respond) as stream:
            return str([*stream] and stream.get_final_response().output_text)

    seen["one"] = chat(turn(FIRST)).choices[0].message.content
    seen["other"] = chat(turn(SECOND)).choices[0].message.content
    seen["details"] = [chat(turn(FIRST, detail=each)).choices[0].message.content for each in ("low", "high")]
    seen["streamed"] = streamed_chat()
    tokens = [chat(turn(*pictures)).usage.prompt_tokens for pictures in ((), (FIRST,), (FIRST, SECOND))]
    seen["tokens"] = [tokens[1] - tokens[0], tokens[2] - tokens[1]]
    seen["response"] = client.responses.create(input=given, **respond).output_text
    seen["response_streamed"] = streamed_response()
    try:
        chat(turn(b"no picture"))
    except openai.BadRequestError as error:
        seen["refused"] = "no image of a known format" in str(error)


def with_anthropic() -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=60)

    def asked(*pictures: bytes) -> dict[str, Any]:
        sources = [
            {"type": "base64", "media_type": "image/png", "data": base64.b64encode(each).decode()} for each in pictures
        ]
        blocks = [*({"type": "image", "source": each} for each in sources), {"type": "text", "text": ASKED}]
        return {"model": MODEL, "messages": [{"role": "user", "content": blocks}]}

    common: dict[str, Any] = {"max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}
    seen["one"] = client.messages.create(**asked(FIRST), **common).content[0].text
    seen["other"] = client.messages.create(**asked(SECOND), **common).content[0].text
    with client.messages.stream(**asked(FIRST), **common) as stream:
        seen["streamed"] = stream.get_final_text()
    tokens = [client.messages.count_tokens(**asked(*p)).input_tokens for p in ((), (FIRST,), (FIRST, SECOND))]
    seen["tokens"] = [tokens[1] - tokens[0], tokens[2] - tokens[1]]


def with_langchain() -> None:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    common: dict[str, Any] = {"model": MODEL, "base_url": URL, "api_key": "none", "max_retries": 0, "timeout": 60}
    common |= {"temperature": 0, "max_tokens": MAX_TOKENS}
    chat, responses = ChatOpenAI(**common), ChatOpenAI(use_responses_api=True, **common)

    def message(picture: bytes) -> list[Any]:
        return [HumanMessage(turn(picture)[0]["content"])]

    block = {"type": "image", "base64": base64.b64encode(FIRST).decode(), "mime_type": "image/png"}
    seen["one"] = chat.invoke(message(FIRST)).text
    seen["other"] = chat.invoke(message(SECOND)).text
    seen["streamed"] = "".join(chunk.text for chunk in chat.stream(message(FIRST)))
    seen["block"] = chat.invoke([HumanMessage([block, {"type": "text", "text": ASKED}])]).text
    seen["response"] = responses.invoke(message(FIRST)).text


LIBRARIES: dict[str, Callable[[], None]] = {
    "openai": with_openai,
    "anthropic": with_anthropic,
    "langchain": with_langchain,
}
LIBRARIES[LIBRARY]()
print(json.dumps(seen))

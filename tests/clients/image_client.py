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


def with_litellm() -> None:
    import litellm

    common: dict[str, Any] = {"model": f"hosted_vllm/{MODEL}", "api_base": URL, "api_key": "none", "max_retries": 0}
    common |= {"temperature": 0, "max_tokens": MAX_TOKENS, "timeout": 60}
    openai_like = common | {"model": f"openai/{MODEL}"}
    chunks = litellm.completion(**common, messages=turn(FIRST), stream=True)
    seen["one"] = litellm.completion(**common, messages=turn(FIRST)).choices[0].message.content
    seen["other"] = litellm.completion(**common, messages=turn(SECOND)).choices[0].message.content
    seen["streamed"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    seen["openai"] = litellm.completion(**openai_like, messages=turn(FIRST)).choices[0].message.content


LIBRARIES: dict[str, Callable[[], None]] = {
    "anthropic": with_anthropic,
    "langchain": with_langchain,
    "litellm": with_litellm,
}
LIBRARIES[LIBRARY]()
print(json.dumps(seen))

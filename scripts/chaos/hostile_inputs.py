"""The hostile inputs of callers: HTTP bodies, raw bytes of connections, and frames of the client socket.

A body is small to send and dear to read: unterminated strings, nested counts, many entries where few are usual. Knows
no engine and no result (scripts/chaos/hostile.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tokenloom import SamplingParams
from tokenloom.ipc.codec import encode
from tokenloom.ipc.messages.client import GetMetrics, Submit, Tokenize

JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ESCAPES = b'"' + b'\\"' * 65_000  # a string without an end, of escapes
MANY = 1 << 16


class Body(NamedTuple):
    """An HTTP request with a body."""

    name: str
    path: str
    content: bytes
    headers: dict[str, str] = JSON


def completion(name: str, **fields: Any) -> Body:
    return Body(name, COMPLETIONS, json.dumps({"prompt": "x", "max_tokens": 4, **fields}).encode())


def chat(name: str, **fields: Any) -> Body:
    question = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    return Body(name, CHAT, json.dumps(question | fields).encode())


def schema(name: str, found: Any) -> Body:
    return completion(f"schema: {name}", structured_outputs={"json": found}, max_tokens=8)


def nested(depth: int, wrap: Callable[[Any], Any], inner: Any) -> Any:
    """Return `inner` wrapped `depth` times."""
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def schemas() -> Iterator[Body]:
    """Yield schemas that are short, and large or slow once they are translated, compiled or matched."""
    name = "a" * 40 + "!"
    yield schema("pattern that backtracks", {"properties": {name: {}}, "patternProperties": {"^(a+)+$": {}}})
    yield schema(
        "contains in contains",
        nested(6, lambda each: {"type": "array", "minContains": 64, "contains": each}, {"type": "integer"}),
    )
    yield schema(
        "if in if",
        nested(10, lambda each: {"if": each, "then": each, "else": {"type": "null"}}, {"type": "integer"}),
    )
    yield schema("anyOf in anyOf", nested(10, lambda each: {"anyOf": [each, each]}, {"type": "integer"}))
    yield schema("allOf in allOf", nested(10, lambda each: {"allOf": [each, each]}, {"type": "object"}))
    yield schema("oneOf in oneOf", nested(16, lambda each: {"oneOf": [each, {"type": "null"}]}, {"type": "integer"}))
    doubled = {
        f"d{number}": {"properties": {"a": {"$ref": f"#/$defs/d{number + 1}"}, "b": {"$ref": f"#/$defs/d{number + 1}"}}}
        for number in range(40)
    }
    yield schema("references that double", {"$defs": doubled | {"d40": {"type": "null"}}, "$ref": "#/$defs/d0"})
    yield schema("a reference to itself", {"$ref": "#"})
    yield schema("a long enum", {"enum": [f"{number}" * 5 for number in range(10_000)]})
    yield schema("many properties", {"type": "object", "properties": {f"p{number}": {} for number in range(3_000)}})
    yield schema(
        "maxItems in maxItems",
        nested(5, lambda each: {"type": "array", "minItems": 900, "items": each}, {"type": "null"}),
    )
    yield schema("bounds of many digits", {"type": "integer", "maximum": 10**4000, "exclusiveMinimum": -(10**4000)})
    large = {"type": "integer", "maximum": 2**64 - 1}
    yield schema("many large integers", {"type": "object", "properties": {f"p{each}": large for each in range(3_000)}})
    yield schema("a long pattern", {"type": "string", "pattern": "(a|b|c|d)*" * 2_000})
    yield schema("a pattern of counts", {"type": "string", "pattern": "((a{90}){90}){90}"})
    text = "[" * 130 + '"' + '\\"' * 120_000
    yield schema("a text of brackets and escapes", text)
    yield schema("a deep text", "[" * 120_000)
    yield completion("regex of counts", structured_outputs={"regex": "((([a-z]{60}){60}){60})x"}, max_tokens=8)
    yield completion(
        "regex that is ambiguous", structured_outputs={"regex": "(a|a|aa|a*)*(b|a|.)*c" * 40}, max_tokens=8
    )
    yield completion("regex without a choice", structured_outputs={"regex": "ab" * 35_000}, max_tokens=64)
    yield completion(
        "grammar that is ambiguous",
        structured_outputs={"grammar": 'start: start start | "a" | "" | start "b"'},
        max_tokens=32,
    )
    yield completion(
        "grammar of many rules",
        structured_outputs={
            "grammar": "start: "
            + " | ".join(f"r{number}" for number in range(4_000))
            + "\n"
            + "\n".join(f'r{number}: "{number}"' for number in range(4_000))
        },
    )
    yield completion("choices", structured_outputs={"choice": [f"choice {number}" for number in range(4_096)]})


def bodies() -> Iterator[Body]:
    """Yield all hostile bodies."""
    yield Body("invocations: a string without an end", "/invocations", ESCAPES)
    yield Body("invocations: brackets", "/invocations", b'{"a":' + b"[" * 60_000 + ESCAPES[:60_000])
    yield from schemas()
    yield completion("bad words of 120 KB", bad_words=["a" * 120_000])
    yield completion("bad words of 7 MB", bad_words=["a" * (7 << 20)])
    yield completion("256 bad words of 30 KB", bad_words=["ab" * 15_000] * 256)
    yield completion("stop strings", stop=["a" * 2_000 + str(number) for number in range(64)])
    yield completion("biases", logit_bias={str(number): 1 for number in range(MANY)})
    yield completion("allowed tokens", allowed_token_ids=list(range(MANY)))
    yield completion("stop tokens", stop_token_ids=list(range(MANY)))
    yield completion("unknown fields", **{f"field{number}": number for number in range(MANY // 4)})
    yield completion("a long user", user="u" * (4 << 20))
    yield completion("many answers", n=4096)
    yield completion("many prompts", prompt=["x"] * 20_000, max_tokens=1)
    yield completion("a word of one letter", prompt="a" * 4_000, max_tokens=1)
    yield completion("a long word of one letter", prompt="a" * 120_000, max_tokens=1)
    yield completion("a longer word of one letter", prompt="a" * 2_000_000, max_tokens=1)
    yield completion("blanks", prompt=" " * 120_000, max_tokens=1)
    yield completion("marks that combine", prompt="e" + "\u0301\u0323" * 40_000, max_tokens=1)
    yield completion("ligatures that grow", prompt="\ufdfa" * 40_000, max_tokens=1)
    yield completion("half characters", prompt="\ud800" * 100)
    yield Body("nested lists", COMPLETIONS, b'{"prompt":' + b"[" * 60_000 + b"]" * 60_000 + b"}")
    yield Body("a number of many digits", COMPLETIONS, b'{"prompt":"x","seed":' + b"9" * 100_000 + b"}")
    yield Body("no end", COMPLETIONS, b'{"prompt":' + ESCAPES)
    yield Body("no JSON", COMPLETIONS, bytes(range(256)) * 400)
    yield chat("many messages", messages=[{"role": "user", "content": "x"}] * 50_000)
    yield chat("many parts", messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 50_000}])
    yield chat(
        "variables of the template", chat_template_kwargs={f"v{number}": [number] * 8 for number in range(8_000)}
    )
    yield chat("deep variables", chat_template_kwargs=nested(900, lambda each: {"a": each}, 1))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    yield chat("many tools", tools=[tool] * 5_000)
    yield chat(
        "a deep tool",
        tools=[
            {"type": "function", "function": {"name": "f", "parameters": nested(900, lambda each: {"items": each}, {})}}
        ],
    )
    yield Body(
        "responses: many items",
        "/v1/responses",
        json.dumps({"input": [{"role": "user", "content": "x"}] * 50_000, "max_output_tokens": 4}).encode(),
    )
    yield Body(
        "responses: an unknown one", "/v1/responses", b'{"input":"x","previous_response_id":"' + b"r" * 100_000 + b'"}'
    )
    yield Body(
        "messages: blocks",
        "/v1/messages",
        json.dumps(
            {"max_tokens": 4, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 50_000}]}
        ).encode(),
    )
    yield Body("embeddings: many texts", "/v1/embeddings", json.dumps({"input": ["x"] * 50_000}).encode())
    yield Body("tokenize: a long text", "/tokenize", json.dumps({"prompt": "ab" * 1_000_000}).encode())
    yield Body("detokenize: many tokens", "/detokenize", b'{"tokens":[' + b"5," * 500_000 + b"5]}")
    yield Body("a model without end", COMPLETIONS, json.dumps({"model": "m" * 100_000, "prompt": "x"}).encode())
    yield Body("an id without end", COMPLETIONS, json.dumps({"request_id": "i" * 100_000, "prompt": "x"}).encode())
    form = {"content-type": 'multipart/form-data; boundary="' + "b" * 60 + '"'}
    yield Body(
        "form: many parts",
        "/v1/audio/transcriptions",
        (b"--" + b"b" * 60 + b'\r\ncontent-disposition: form-data; name="a"\r\n\r\nx\r\n') * 2_000,
        form,
    )
    yield Body(
        "form: a header without end",
        "/v1/audio/transcriptions",
        b"--" + b"b" * 60 + b'\r\ncontent-disposition: form-data; name="' + b'\\"' * 60_000,
        form,
    )
    state = {"tracestate": ",".join(f"k{number}=v" for number in range(4_000)), "traceparent": "00-" + "0" * 8_000}
    yield Body("trace headers", COMPLETIONS, b'{"prompt":"x","max_tokens":1}', JSON | state)
    yield Body("a query without end", f"{COMPLETIONS}?{'a=b&' * 8_000}", b'{"prompt":"x","max_tokens":1}')
    yield Body("a type of spaces", COMPLETIONS, b"{}", {"content-type": "application/json;" + " " * 8_000 + "x"})


def connections() -> Iterator[tuple[str, bytes, bytes]]:
    """Yield raw connections: name, first bytes, and bytes to repeat until the server closes."""
    post = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    fields = b"".join(b"x-%d: %s\r\n" % (number, b"a" * 50) for number in range(2_000))
    yield "head: fields without end", post, fields
    yield "head: one value without end", post + b"x: ", b"a" * (1 << 16)
    yield "head: a path without end", b"GET /", b"a" * (1 << 16)
    yield "head: a method without end", b"", b"P" * (1 << 16)
    yield "trailers without end", post + b"transfer-encoding: chunked\r\n\r\n0\r\n", fields
    yield "a chunk's extension without end", post + b"transfer-encoding: chunked\r\n\r\n1;", b"a" * (1 << 16)
    yield "chunks of one byte", post + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 10_000
    yield "requests without end", b"", b"GET /v1/nothing HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500
    yield (
        "a body after its answer",
        b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900000000\r\n\r\n",
        b"a" * (1 << 16),
    )


def frames() -> Iterator[tuple[str, list[bytes]]]:
    """Yield frames for the client socket, to be sent after Hello."""

    def submit(number: int, **params: Any) -> bytes:
        fields = _decoded(Submit(request_id=f"hostile-{number}", prompt="x", params=SamplingParams(max_tokens=4)))
        fields["params"] |= params
        return encode(fields)

    escapes = "[" * 130 + '"' + '\\"' * 120_000
    yield "submit: a schema of escapes", [submit(0, structured_outputs={"json": escapes})]
    yield "submit: bad words", [submit(1, bad_words=["ab" * 60_000])]
    yield "submit: parameters of wrong kinds", [submit(2, n=1 << 62, temperature=float("nan"), logit_bias={"a": "b"})]
    yield (
        "submit: tokens outside the vocabulary",
        [
            encode(
                _decoded(Submit(request_id="h", params=SamplingParams()))
                | {"prompt_token_ids": b"\xff\xff\xff\x7f" * 9}
            )
        ],
    )
    yield "garbage of 60 MB", [b"\x93" * (60 << 20)] * 2
    yield "deep frames", [b"\x91" * 200_000] * 20
    yield "queries that nobody reads", [encode(GetMetrics(query_id=number)) for number in range(20_000)]
    yield (
        "texts that nobody reads",
        [encode(Tokenize(query_id=number, prompt="ab " * 1_300)) for number in range(3_000)],
    )


def _decoded(message: Submit) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.msgpack.decode(encode(message))
    return found

"""docs/reference/protocol.md describes exactly the messages and fields of the code, and its examples run unchanged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from tokenloom.ipc.codec import Decoder, encode_ids
from tokenloom.ipc.errors import ERROR_BY_KIND, ErrorInfo
from tokenloom.ipc.messages.adapter import AdapterInfo
from tokenloom.ipc.messages.base import (
    LEASE_S,
    PING_INTERVAL_S,
    PROTOCOL_VERSION,
    BulkArray,
    CacheMisses,
    CacheReport,
    FinishReason,
    Hello,
    PromptDifference,
)
from tokenloom.ipc.messages.client import (
    CREDIT_WINDOW,
    ChatField,
    ChatForm,
    ChatMessage,
    Child,
    ClientMessage,
    Delta,
    Deltas,
    FrontendMessage,
    Logprobs,
    MediaPart,
    Medium,
    RequestMetrics,
    SpeechModel,
    Submit,
    TextPart,
    ThoughtTexts,
)
from tokenloom.ipc.messages.metrics import Counter, Gauge, Histogram
from tokenloom.ipc.params.pooling_params import PoolingParams
from tokenloom.ipc.params.sampling_params import RepetitionDetectionParams, SamplingParams
from tokenloom.ipc.params.structured_outputs import StructuredOutputsParams
from tokenloom.ipc.sockets.zmq_sockets import MAX_CLIENT_MESSAGE_BYTES

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs/reference/protocol.md").read_text(encoding="utf-8")
STRUCTS: dict[str, Any] = {
    **{each.__struct_config__.tag: each for each in (*get_args(ClientMessage), *get_args(FrontendMessage))},
    "chat_message": ChatMessage,
    "text_part": TextPart,
    "media_part": MediaPart,
    "medium": Medium,
    "chat_form": ChatForm,
    "chat_field": ChatField,
    "thought_texts": ThoughtTexts,
    "speech_model": SpeechModel,
    "child": Child,
    "params": SamplingParams,
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": RepetitionDetectionParams,
    "pooling": PoolingParams,
    "adapter_info": AdapterInfo,
    "bulk_array": BulkArray,
    "delta": Delta,
    "cache_report": CacheReport,
    "cache_misses": CacheMisses,
    "prompt_difference": PromptDifference,
    "logprobs": Logprobs,
    "metrics": RequestMetrics,
    "error": ErrorInfo,
    "counter": Counter,
    "gauge": Gauge,
    "histogram": Histogram,
}


def sections() -> dict[str, str]:
    """Return the text below each third-level heading."""
    messages_part = DOCUMENT[DOCUMENT.index("## Messages of the client") :]
    parts = re.split(r"^### (\w+)$", messages_part, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(section: str) -> dict[str, tuple[str, str]]:
    """Return (type, default) of each field in the table of a section."""
    table = section.split("| kind |")[0]
    cells = [re.split(r"(?<!\\)\|", line) for line in table.splitlines() if line.startswith("| `")]
    return {
        name.strip().strip("`"): (kind.strip().replace("\\|", "|"), default.strip())
        for _, name, kind, default, *_ in cells
    }


def type_name(info: inspect.Type) -> str:
    if isinstance(info, inspect.UnionType):
        members = sorted(info.types, key=lambda each: isinstance(each, inspect.NoneType))
        return " | ".join(type_name(each) for each in members)
    if isinstance(info, inspect.ListType):
        return f"list of {type_name(info.item_type)}"
    if isinstance(info, inspect.TupleType):
        (item_type,) = {type_name(each) for each in info.item_types}
        return f"list of {item_type}"
    if isinstance(info, inspect.StructType):
        return next((name for name, struct in STRUCTS.items() if struct is info.cls), info.cls.__name__.lower())
    if isinstance(info, inspect.DictType):
        return f"map of {type_name(info.key_type)} to {type_name(info.value_type)}"
    if isinstance(info, inspect.LiteralType):
        return "str"
    return {
        inspect.IntType: "int",
        inspect.StrType: "str",
        inspect.BoolType: "bool",
        inspect.FloatType: "float",
        inspect.BytesType: "bin",
        inspect.MemoryViewType: "bin",
        inspect.NoneType: "nil",
        inspect.CustomType: "any",
        inspect.AnyType: "any",
    }[type(info)]


def default_text(field: inspect.Field) -> str:
    if field.required:
        return ""
    if field.default is msgspec.NODEFAULT:
        return "`[]`" if field.default_factory is list else "empty"
    value = field.default
    if value is None or value == b"":
        return "nil" if value is None else "empty"
    return f'`"{value}"`' if isinstance(value, str) else str(value).lower()


def test_each_section_describes_a_message_and_each_message_has_one() -> None:
    assert sorted(sections()) == sorted(STRUCTS)


@pytest.mark.parametrize("name", STRUCTS)
def test_every_field_is_described_with_its_type_and_default(name: str) -> None:
    info = inspect.type_info(STRUCTS[name])
    assert isinstance(info, inspect.StructType)
    expected = {
        field.encode_name: (set(type_name(field.type).split(" | ")), default_text(field)) for field in info.fields
    }
    found = {name: (set(kind.split(" | ")), default) for name, (kind, default) in rows(sections()[name]).items()}
    assert found == expected


def test_every_kind_of_error_and_every_finish_reason_is_named() -> None:
    kinds = re.findall(r"^\| `(\w+)` \| [^|]*\|$", sections()["error"].split("| kind |")[1], flags=re.MULTILINE)
    assert sorted(kinds) == sorted(ERROR_BY_KIND)
    assert all(f'`"{reason}"`' in sections()["delta"] for reason in get_args(FinishReason))


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"The client protocol, version {PROTOCOL_VERSION}" in DOCUMENT
    assert f"At most {CREDIT_WINDOW} `deltas` messages" in DOCUMENT
    assert f"After {LEASE_S} s of silence" in DOCUMENT
    assert f"at least every second ({PING_INTERVAL_S} s)" in DOCUMENT
    assert f"({MAX_CLIENT_MESSAGE_BYTES} bytes)" in DOCUMENT


def test_the_documented_frames_encode_their_messages() -> None:
    frames: dict[str, list[bytes]] = {"client": [], "frontend": []}
    for who, block in re.findall(r"```hex (\w+)\n(.*?)```", DOCUMENT, flags=re.DOTALL):
        lines = (re.match(r"(?:[0-9a-f]{2}(?:\s|$))*", line) for line in block.splitlines())
        frames[who].append(bytes.fromhex("".join(match[0] for match in lines if match)))
    hello, submit = (Decoder[object](ClientMessage).decode(frame) for frame in frames["client"])
    assert hello == Hello(protocol_version=1)
    assert submit == Submit(request_id="r1", params=SamplingParams(temperature=0.0, max_tokens=4), prompt="Hi")
    (deltas,) = (Decoder[object](FrontendMessage).decode(frame) for frame in frames["frontend"])
    assert deltas == Deltas(deltas=[Delta(request_id="r1", token_ids=encode_ids([72, 105]), text=" there")])

"""Keywords of generate, chat and embed: equal in both clients, refused with the reason."""

from __future__ import annotations

import asyncio
import inspect
import os
from typing import Any

import msgspec
import pytest

from tokenloom.frontend.client.async_client import AsyncClient
from tokenloom.frontend.client.client import Client
from tokenloom.frontend.forms.call_options import (
    AdapterOptions,
    CallOptions,
    ChatOptions,
    TranscribeOptions,
    UnservedOptions,
    check_options,
)
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.base import BulkArray
from tokenloom.ipc.messages.client import ChatForm, Delta, LoadAdapter, Submit
from tokenloom.ipc.params.lora_request import LoRARequest
from tokenloom.tests.frontend.fake_frontend import DEADLINE_S, FakeFrontend, greedy

CHAT = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("generate", {"lora_request": object()}, "lora_request is <object.*must be tokenloom.LoRARequest"),
    ("embed", {"lora_request": [LoRARequest("a"), None]}, "2 LoRA requests for 1 prompts: give one for all, or one"),
    ("chat", {"lora_request": LoRARequest("a"), "model": "a"}, "model is 'a', lora_request LoRARequest.*: give the"),
    ("generate", {"model": 5}, "model is 5, lora_request None"),
    ("generate", {"prompt_adapter_request": object()}, "prompt_adapter_request is <object.*does not serve it"),
    ("chat", {"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    ("embed", {"tokenization_kwargs": {"a": 1}}, "tokenization_kwargs"),
    ("chat", {"chat_template_content_format": "openai"}, "must be auto or string"),
    ("chat", {"chat_template": 5}, "chat_template must be the template's text"),
    ("chat", {"chat_template_kwargs": {"tools": []}}, "holds tools: use the keywords"),
    ("generate", {"priority": [1, 2]}, "2 priorities for 1 prompts"),
    ("generate", {"priority": "high"}, "4 priorities|priority must be"),
]


def call(fake: FakeFrontend, method: str, is_async: bool, **options: Any) -> Submit:
    """Return the Submit of one call."""
    prompt = CHAT if method == "chat" else "hi"
    arguments = () if method == "embed" else (greedy(2),)

    async def ask() -> None:
        async with AsyncClient(fake.address) as client:
            answer = getattr(client, method)(prompt, *arguments, **options)
            if inspect.isawaitable(answer):
                await answer
            else:
                _ = [output async for output in answer]

    if is_async:
        asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))
    else:
        with Client(fake.address) as client:
            getattr(client, method)(prompt, *arguments, use_tqdm=False, **options)
    return fake.do(lambda service: service.submits[-1])


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_keywords_of_chat_reach_the_template(fake: FakeFrontend, is_async: bool) -> None:
    submit = call(
        fake,
        "chat",
        is_async,
        priority=3,
        tools=[TOOL],
        documents=[{"text": "d"}],
        chat_template="{{ messages }}",
        chat_template_content_format="auto",
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        add_generation_prompt=False,
        continue_final_message=True,
        lora_request=None,
        mm_processor_kwargs={},
    )
    variables = {
        "enable_thinking": False,
        "tools": [TOOL],
        "documents": [{"text": "d"}],
        "reasoning_effort": "low",
        "add_generation_prompt": False,
    }
    assert submit.chat_form == ChatForm(template="{{ messages }}", variables=variables, is_continued=True)
    assert submit.params.priority == 3
    nothing = dict.fromkeys(("tools", "chat_template", "chat_template_kwargs", "priority", "add_generation_prompt"))
    assert call(fake, "chat", is_async, **nothing, continue_final_message=False).chat_form is None
    assert call(fake, "generate", is_async, priority=[-1], lora_request=None).params.priority == -1


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("method", "options", "complaint"), CASES)
def test_an_unserved_keyword_is_refused_by_name(
    fake: FakeFrontend, is_async: bool, method: str, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RequestError, match=complaint):
        call(fake, method, is_async, **options)
    assert fake.do(lambda service: service.submits) == []
    with pytest.raises(TypeError, match=rf"{method}\(\) has no keyword 'no_such_thing'"):
        call(fake, method, is_async, no_such_thing=None)


@pytest.mark.parametrize(
    ("method", "known", "name", "message"),
    [
        ("generate", CallOptions, "temperature", r"write SamplingParams\(temperature=…\)"),
        ("generate", CallOptions, "use_tqdmm", r"did you mean use_tqdm\?"),
        ("chat", ChatOptions, "tool", r"did you mean tools\?"),
        ("embed", AdapterOptions, "temperature", "; it has lora_request, model, pooling_params"),
        ("embed", AdapterOptions, "dimensions", r"write PoolingParams\(dimensions=…\)"),
        ("transcribe", TranscribeOptions, "lang", r"did you mean language\?"),
        ("transcribe", TranscribeOptions, "max_tokens", r"write SamplingParams\(max_tokens=…\)"),
    ],
)
def test_an_unknown_keyword_is_answered_with_what_to_write(
    method: str, known: type[UnservedOptions], name: str, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        check_options(method, {name: 1}, known)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("method", ["generate", "chat", "embed"])
def test_an_adapter_is_named_by_model_or_lora_request(fake: FakeFrontend, is_async: bool, method: str) -> None:
    if method == "embed":
        fake.set(spoil=lambda delta: [with_vector(delta)])
    submit = call(fake, method, is_async, model="sql")
    assert (submit.adapter, submit.adapter_path) == ("sql", "")
    submit = call(fake, method, is_async, lora_request=LoRARequest("sql", 1, "."))
    assert (submit.adapter, submit.adapter_path) == ("sql", os.getcwd()), "the engine runs in another folder"
    assert call(fake, method, is_async, lora_request=None, model=None).adapter == ""


def with_vector(delta: Delta) -> Delta:
    return msgspec.structs.replace(delta, embedding=BulkArray(dtype="float32", shape=[1], data=bytes(4)))


def test_each_prompt_may_have_its_own_priority_and_adapter(fake: FakeFrontend, client: Client) -> None:
    requests = [LoRARequest("sql"), None, LoRARequest("chat")]
    options: Any = {"lora_request": requests, "priority": [1, 2, 3]}
    outputs = client.generate(["a", "b", "c"], greedy(2), use_tqdm=False, **options)
    assert [output.lora_request for output in outputs] == requests
    client.submit("a", greedy(2), model="sql").result(DEADLINE_S)
    list(client.stream("a", greedy(2), lora_request=LoRARequest("chat")))
    sent = fake.do(lambda service: [(submit.adapter, submit.params.priority) for submit in service.submits])
    assert sent == [("sql", 1), ("", 2), ("chat", 3), ("sql", 0), ("chat", 0)]


def test_adapters_are_loaded_listed_and_unloaded_by_both_clients(fake: FakeFrontend, client: Client) -> None:
    async def ask() -> None:
        async with AsyncClient(fake.address) as other:
            assert await other.add_lora(LoRARequest("chat", 2, "/chat"))
            assert [info.name for info in await other.list_adapters()] == ["chat", "sql"]
            await other.unload_adapter("chat")

    client.load_adapter("sql", ".", load_inplace=True)
    asyncio.run(asyncio.wait_for(ask(), DEADLINE_S))
    assert [info.path for info in client.list_adapters()] == [os.getcwd()]
    with pytest.raises(RequestError, match="cannot be found"):
        client.unload_adapter("chat")
    orders = fake.do(lambda service: service.orders)
    assert [order.is_inplace for order in orders if isinstance(order, LoadAdapter)] == [True, False]
    assert len({order.order_id for order in orders}) == len(orders) == 4 and "" not in orders

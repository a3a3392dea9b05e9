"""A program as a user writes it, for type checkers: tests/test_typing.py holds that they report the lines that end in
`# wrong`, and no others. Nothing runs it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import assert_type

from tokenloom import LLM, AsyncClient, AsyncLLM, Client, LoRARequest, PoolingParams, RequestOutput, SamplingParams

MESSAGES = [{"role": "user", "content": "Name three colours."}]


def engine() -> None:
    llm = LLM("model", max_model_len=4096, dtype="bfloat16", download_dir=Path("models"), listen="ipc:///run/loom")
    LLM(max_model_len="auto", kv_disk_bytes=None, limit_mm_per_prompt={"image": 4})
    LLM(max_model_length=4096)  # wrong
    LLM(max_model_len="long")  # wrong
    LLM(dtype="float8")  # wrong
    AsyncLLM(max_num_seqs=4, speculative_config={"method": "ngram"})
    AsyncLLM(max_num_seq=4)  # wrong
    params = SamplingParams(temperature=0, max_tokens=None)
    assert_type(params, SamplingParams)
    assert_type(llm.generate("x", params, lora_request=LoRARequest("sql", 1, "adapters/sql")), list[RequestOutput])
    assert_type(llm.chat(MESSAGES, chat_template_kwargs={"enable_thinking": False}), list[RequestOutput])
    llm.generate("x", temperature=0)  # wrong
    llm.chat(MESSAGES, tool=[])  # wrong
    llm.embed("x", PoolingParams(dimensions=64))
    llm.embed("x", PoolingParams(dimension=64))  # wrong
    SamplingParams(temprature=0)  # wrong
    SamplingParams(temperature="hot")  # wrong


async def clients() -> None:
    client = AsyncClient("ipc:///run/loom")
    assert_type(client.generate("x", SamplingParams()), AsyncGenerator[RequestOutput, None])
    client.generate("x", max_tokens=1)  # wrong
    Client("ipc:///run/loom").transcribe("clip.wav", language="de", return_timestamps=True)
    Client("ipc:///run/loom").transcribe("clip.wav", lang="de")  # wrong

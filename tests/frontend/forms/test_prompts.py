"""Prompts: every form of vLLM is accepted, an invalid one is refused with the mend."""

from __future__ import annotations

import numpy as np
import pytest

from tokenloom.frontend.forms.prompts import (
    MAX_PROMPT_BYTES,
    check_params,
    list_chats,
    list_params,
    list_prompts,
    new_submit,
)
from tokenloom.ipc.codec import decode_ids
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import ChatMessage, TextPart
from tokenloom.ipc.params.sampling_params import SamplingParams

PARAMS = SamplingParams()


@pytest.mark.parametrize(
    ("prompts", "num_prompts"),
    [
        ("text", 1),
        ([1, 2, 3], 1),
        ((1, 2, 3), 1),
        (np.array([1, 2, 3]), 1),
        ({"prompt": "text"}, 1),
        ({"prompt_token_ids": [1, 2]}, 1),
        ([], 0),
        (["a", "b"], 2),
        (("a", [1], {"prompt": "c"}), 3),
        ([[1, 2], [3]], 2),
        (np.array([[1, 2], [3, 4]]), 2),
        ((text for text in "ab"), 2),
    ],
)
def test_list_prompts_tells_one_prompt_from_many(prompts: object, num_prompts: int) -> None:
    listed = list_prompts(prompts)  # type: ignore[arg-type]
    assert len(listed) == num_prompts
    for prompt in listed:
        submit = new_submit("r", prompt, PARAMS)
        assert (submit.prompt is None) != (submit.prompt_token_ids is None)


@pytest.mark.parametrize("ids", [[1, 2, 70000], (1, 2, 70000), np.array([1, 2, 70000]), np.array([1, 2, 70000], "u4")])
def test_token_ids_are_sent_unchanged(ids: object) -> None:
    for prompt in (ids, {"prompt_token_ids": ids}):
        frame = new_submit("r", prompt, PARAMS).prompt_token_ids  # type: ignore[arg-type]
        assert decode_ids(frame or b"").tolist() == [1, 2, 70000]


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ([], "no tokens"),
        ({"prompt_token_ids": []}, "no tokens"),
        ([1, -2], "token id -2, which is out of vocabulary: ids begin at 0"),
        ([1, 2**31], "2147483648"),
        ([1, 2.5], "2.5"),
        ([1, "a"], "'a'"),
        (None, "NoneType"),
        (b"bytes", "bytes"),
        (5, "int"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"promt": "a"}, "promt"),
        ({"prompt": [1]}, "prompt"),
        ({"prompt_token_ids": "abc"}, "str"),
        ("bad \ud800 surrogate", "surrogate at character 4"),
        ("x" * (MAX_PROMPT_BYTES + 1), str(MAX_PROMPT_BYTES)),
        ("ä" * (MAX_PROMPT_BYTES // 2 + 1), str(MAX_PROMPT_BYTES)),
        (np.zeros(MAX_PROMPT_BYTES // 4 + 1, np.int32), str(MAX_PROMPT_BYTES // 4)),
    ],
)
def test_an_invalid_prompt_is_refused_with_the_reason(prompt: object, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        new_submit("r", prompt, PARAMS)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, 5, b"bytes", object()])
def test_what_is_no_list_of_prompts_or_chats_is_refused(given: object) -> None:
    with pytest.raises(RequestError, match="a prompt is text, a list of token ids"):
        list_prompts(given)  # type: ignore[arg-type]
    for messages in (5, "text", {"role": "user", "content": "x"}):
        with pytest.raises(RequestError, match="a chat is a list"):
            list_chats(messages)  # type: ignore[arg-type]


def test_list_chats_tells_one_chat_from_many_and_text_parts_are_kept() -> None:
    turn = {"role": "user", "content": "hi"}
    assert list_chats([turn]) == [[turn]]
    assert list_chats([[turn], [turn, turn]]) == [[turn], [turn, turn]]
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    read = ChatMessage("user", [TextPart("a"), TextPart("b")])
    submit = new_submit("r", [ChatMessage("system", "be"), turn, parts, read], PARAMS)
    assert submit.chat == [ChatMessage("system", "be"), ChatMessage("user", "hi"), read, read]
    assert read.text == "a\nb" and submit.chat[1].parts == [TextPart("hi")]
    assert submit.prompt is None and submit.prompt_token_ids is None


@pytest.mark.parametrize(
    ("turn", "complaint"),
    [
        ({"role": "user"}, "message 1"),
        ({"role": "user", "content": 5}, "message 1"),
        ({"role": 5, "content": "a"}, "message 1"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "arguments are not JSON",
        ),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "the image 'x' is no data:"),
        ({"role": "user", "content": [{"type": "video_url", "video_url": "x"}]}, "only text and image_url, input_"),
        ({"role": "user", "content": "\udfff"}, "surrogate"),
        ({"role": "user", "content": [TextPart("\udfff")]}, "surrogate"),
        ("text", "message 1"),
    ],
)
def test_an_invalid_message_is_refused_with_its_index(turn: object, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        new_submit("r", [{"role": "user", "content": "hi"}, turn], PARAMS)


def test_a_message_keeps_the_fields_that_a_template_may_use() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    assert new_submit("r", turns, PARAMS).chat == [
        ChatMessage("assistant", None, {"tool_calls": [call]}),
        ChatMessage("tool", "2", {"tool_call_id": "1"}),
    ]


def test_a_prompt_dict_may_set_cache_salt() -> None:
    prompts = ({"prompt": "a", "cache_salt": "x"}, {"prompt_token_ids": [1], "cache_salt": "x", "prompt": None})
    for prompt in prompts:
        assert new_submit("r", prompt, PARAMS.replace(cache_salt="other")).params.cache_salt == "x"
    assert new_submit("r", {"prompt": "a", "cache_salt": None}, PARAMS.replace(cache_salt="y")).params.cache_salt == "y"
    with pytest.raises(RequestError, match="cache_salt must be a string"):
        new_submit("r", {"prompt": "a", "cache_salt": 5}, PARAMS)


@pytest.mark.parametrize("request_id", ["", "x" * 257, 5])
def test_a_bad_request_id_is_refused(request_id: object) -> None:
    with pytest.raises(RequestError, match="1 to 256"):
        new_submit(request_id, "a", PARAMS)  # type: ignore[arg-type]


def test_parameters_are_counted_and_checked() -> None:
    assert list_params(None, 2) == [PARAMS, PARAMS]
    assert list_params(PARAMS, 3) == [PARAMS] * 3
    with pytest.raises(RequestError, match="1 SamplingParams for 2 prompts"):
        list_params([PARAMS], 2)
    for bad in ({"temperature": 0}, "greedy", 5):
        with pytest.raises(RequestError, match="SamplingParams"):
            list_params(bad, 1)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="SamplingParams"):
        list_params([{"temperature": 0}], 1)  # type: ignore[list-item]
    with pytest.raises(RequestError, match="surrogate"):
        check_params(SamplingParams(stop="\ud800"))

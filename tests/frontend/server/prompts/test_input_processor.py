"""InputProcessor completes a Submit, or refuses it with the field, the numbers and the mend."""

from __future__ import annotations

import math
from typing import Any, cast

import msgspec
import pytest
from tokenizers.processors import TemplateProcessing

from tokenloom.frontend.server.prompts.input_processor import InputProcessor
from tokenloom.frontend.server.prompts.prompt import ProcessedRequest, Prompt
from tokenloom.frontend.server.text.chat_template import ChatTemplate
from tokenloom.frontend.server.text.tokenizer import Tokenizer
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.client import ChatForm, ChatMessage, Child, Submit, ThoughtTexts
from tokenloom.ipc.messages.core import EngineCoreRequest
from tokenloom.ipc.messages.intake import ReadPrompt
from tokenloom.ipc.messages.media import MediaSpan
from tokenloom.ipc.params.call_form import CallForm
from tokenloom.ipc.params.calls_constraint import CallsConstraint
from tokenloom.ipc.params.pooling_params import PoolingParams
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.params.structured_outputs import StructuredOutputsParams
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.models.model_config import CrossConfig
from tokenloom.tests.frontend.server.text.samples import new_tokenizer
from tokenloom.tests.support.engine_specs import new_spec

TEMPLATE = ChatTemplate("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", {"bos_token": "<s>"})


def new_inputs(**changes: Any) -> InputProcessor:
    return InputProcessor(new_spec(**changes), new_tokenizer("byte_fallback"), TEMPLATE)


def process(inputs: InputProcessor, params: SamplingParams | None = None, **fields: Any) -> EngineCoreRequest:
    return process_whole(inputs, params, **fields).core


def process_whole(inputs: InputProcessor, params: SamplingParams | None = None, **fields: Any) -> ProcessedRequest:
    if not fields.keys() & {"prompt", "prompt_token_ids", "chat"}:
        fields["prompt_token_ids"] = encode_ids(range(10))
    submit = Submit(request_id="r", params=params or SamplingParams(), **fields)
    question = ReadPrompt(prompt=submit.prompt, token_ids=submit.prompt_token_ids, chat=submit.chat)
    return inputs.process(submit, inputs.tokenize(question), now=1234.5)


def test_text_gets_the_special_tokens_and_a_chat_only_those_of_its_template() -> None:
    inputs = new_inputs()
    assert decode_ids(inputs.tokenize(ReadPrompt(prompt="The")).token_ids).tolist() == [1, 296]
    chat = inputs.tokenize(ReadPrompt(chat=[ChatMessage("user", "The")]))
    assert decode_ids(chat.token_ids).tolist().count(1) == 1 and chat.text == "<s>The"
    assert inputs.tokenize(ReadPrompt(token_ids=encode_ids([5, 6]))) == Prompt(encode_ids([5, 6]), None)


def test_an_empty_prompt_is_served_if_the_tokenizer_adds_a_token() -> None:
    assert decode_ids(process(new_inputs(), prompt="").prompt_token_ids).tolist() == [1]
    bare = InputProcessor(new_spec(), new_tokenizer("byte_level"), TEMPLATE)
    with pytest.raises(RequestError, match="no tokens, since it is empty and the tokenizer adds none: give at least"):
        process(bare, prompt="")


def test_a_long_text_of_words_is_refused_after_its_first_part() -> None:
    inputs = InputProcessor(new_spec(max_model_len=100), new_tokenizer("word_piece"), TEMPLATE)
    with pytest.raises(RequestError, match=r"at least 101 tokens in its first [0-9]{4,5} characters: shorten"):
        inputs.tokenize(ReadPrompt(prompt="the capital of " * 300_000))
    cut = inputs.tokenize(ReadPrompt(prompt="the capital of " * 300_000, cut_side="right"))
    assert (
        decode_ids(cut.token_ids).tolist()
        == decode_ids(inputs.tokenize(ReadPrompt(prompt="the capital of " * 300, cut_side="right")).token_ids).tolist()
    )


def test_max_tokens_is_limited_by_max_model_len() -> None:
    inputs = new_inputs(max_model_len=100)
    assert process(inputs, SamplingParams(max_tokens=None)).max_tokens == 90
    assert process(inputs, SamplingParams(max_tokens=1000)).max_tokens == 90
    assert process(inputs, SamplingParams(max_tokens=7)).max_tokens == 7
    assert process(inputs, SamplingParams(max_tokens=None), prompt_token_ids=encode_ids(range(99))).max_tokens == 1


@pytest.mark.parametrize(
    ("side", "num_kept", "kept"),
    [("left", 4, [13, 14, 15, 2]), (None, 4, [13, 14, 15, 2]), ("right", 4, [1, 10, 11, 2]), ("right", 1, [2])],
)
def test_a_truncated_prompt_keeps_the_tokens_that_end_a_text(side: Any, num_kept: int, kept: list[int]) -> None:
    tokenizer = new_tokenizer("byte_fallback")
    assert tokenizer.backend is not None
    tokenizer.backend.post_processor = TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    inputs = InputProcessor(new_spec(), tokenizer, TEMPLATE)
    params = SamplingParams(truncate_prompt_tokens=num_kept, truncation_side=side)
    ids = encode_ids([1, *range(10, 16), 2])
    assert decode_ids(process(inputs, params, prompt_token_ids=ids).prompt_token_ids).tolist() == kept
    embedded = process(inputs, params, prompt="The " * 50, pooling=PoolingParams())
    assert decode_ids(embedded.prompt_token_ids).tolist()[-1] == kept[-1]


def test_the_tokenizers_eos_token_is_used_if_the_model_names_none() -> None:
    model = msgspec.structs.replace(new_spec().model, eos_token_ids=[])
    assert InputProcessor(new_spec(model=model), new_tokenizer("byte_level"), None).eos_token_ids == {2}


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram", "word_piece"])
def test_the_special_tokens_among_markers_are_found(kind: str) -> None:
    tokenizer = new_tokenizer(kind)
    assert tokenizer.backend is not None
    tokenizer.backend.add_special_tokens(["<tool_call>"])
    tokenizer.backend.add_tokens(["</tool_call>"])
    inputs = InputProcessor(new_spec(), Tokenizer.from_backend(tokenizer.backend, tokenizer.config), None)
    token_id = tokenizer.backend.token_to_id("<tool_call>")
    assert inputs.special_ids_of(("<tool_call>", "</tool_call>", "\ue000 unknown")) == encode_ids([token_id])
    assert inputs.special_ids_of(("<tool_call>",)) == encode_ids([token_id])
    assert inputs.special_ids_of(()) == b""
    assert InputProcessor(new_spec(), None, None).special_ids_of(("<tool_call>",)) == b""


@pytest.mark.parametrize(
    ("ids", "words"), [(encode_ids(range(65)), "has 65 ids, at most 64"), (b"odd", "shown_token_ids")]
)
def test_shown_token_ids_are_few_and_whole(ids: bytes, words: str) -> None:
    process(new_inputs(), shown_token_ids=encode_ids([*range(63), 1 << 30]))
    with pytest.raises(RequestError, match=words):
        process(new_inputs(), shown_token_ids=ids)


def test_the_engines_seed_determines_the_seeds_of_unseeded_requests() -> None:
    def seeds(seed: int) -> list[int]:
        inputs = new_inputs(config=EngineConfig(seed=seed))
        return [process_whole(inputs).children[0].seed for _ in range(20)]

    assert seeds(0) == seeds(0) != seeds(1) and len(set(seeds(0))) == 20
    assert process_whole(new_inputs(), SamplingParams(seed=-7)).children == [Child(index=0, seed=-7)]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_token_ids": b""}, "prompt has no tokens"),
        ({"prompt_token_ids": b"\1\0\0"}, "3 bytes"),
        (
            {"prompt_token_ids": encode_ids([1, 2, 1000])},
            r"prompt_token_ids\[2\] is 1000, which is out of vocabulary: the model's ids are 0 to 999",
        ),
        ({"prompt_token_ids": encode_ids([-1])}, r"prompt_token_ids\[0\] is -1"),
        (
            {"prompt_token_ids": encode_ids([1] * 512)},
            r"length is 512 tokens, but the prompt has 512 tokens and the answer needs .* shorten .* --max-model-len",
        ),
        ({"prompt": "x " * 600}, r"maximum context length is 512 tokens"),
        ({"prompt": "x", "prompt_token_ids": b"\0" * 4}, "2 of prompt, prompt_token_ids and chat are given"),
        ({"chat": []}, "no messages"),
        ({"arrival_time": math.nan}, "arrival_time"),
        ({"arrival_time": -1.0}, "arrival_time"),
        ({"children": [Child(index=0), Child(index=0)]}, "children have the indices"),
        ({"children": [Child(index=-1)]}, "children have the indices"),
        ({"children": [Child(output_token_ids=encode_ids([1000]))]}, r"children\[0\].output_token_ids\[0\] is 1000"),
        (
            {"children": [Child(output_token_ids=encode_ids(range(17)))]},
            r"children\[0\] has 17 tokens, max_tokens is 16",
        ),
        ({"children": [Child(seed=2**64)]}, "must fit in 64 bits"),
    ],
)
def test_bad_input_is_refused_with_its_numbers(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        process(new_inputs(), **fields)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(stop_token_ids=[1000]), "stop_token_ids has 1000, .* 0 to 999"),
        (SamplingParams(min_tokens=503, max_tokens=None), "min_tokens is 503, .* leaves room for 502"),
        (SamplingParams(stop=["x" * 3000, "y" * 3000]), "6000 characters in all, at most 4096"),
        (SamplingParams(bad_words=["x" * 3000, "y" * 3000]), "bad_words has 6000 characters in all, at most 4096"),
    ],
)
def test_parameters_that_this_model_cannot_serve_are_refused(params: SamplingParams, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        process(new_inputs(), params)


def test_bad_words_are_counted_before_one_is_tokenized() -> None:
    class Untouched:
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise AssertionError(f"{len(text)} characters are tokenized in the loop")

    inputs = new_inputs()
    inputs._tokenizer = cast(Any, Untouched())
    prompt = Prompt(encode_ids([1]), None)
    with pytest.raises(RequestError, match="bad_words has 7000000 characters"):
        inputs.process(Submit(request_id="a", params=SamplingParams(bad_words=["a" * 7_000_000])), prompt, 0.0)


def test_a_submit_without_a_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="0 of prompt"):
        new_inputs().tokenize(ReadPrompt())


def test_ids_above_the_models_vocabulary_are_refused_in_a_text_too() -> None:
    with pytest.raises(RequestError, match="the model's ids are 0 to 99"):
        process(new_inputs(vocab_size=100), prompt="The")


def test_a_model_without_tokenizer_serves_only_token_ids() -> None:
    inputs = InputProcessor(new_spec(), None, None)
    assert process(inputs).max_tokens == 16
    for fields in ({"prompt": "x"}, {"chat": [ChatMessage("user", "x")]}):
        with pytest.raises(RequestError, match=r"no (tokenizer|chat template)"):
            process(inputs, **fields)
    with pytest.raises(RequestError, match="stop strings"):
        process(inputs, SamplingParams(stop="x"))


def test_timeout_s_is_the_requests_or_the_engines_and_limited_by_the_engines_maximum() -> None:
    def timeout_s(own: float | None, **limits: float) -> float | None:
        inputs = InputProcessor(new_spec(config=EngineConfig(**limits)), None, None)  # type: ignore[arg-type]
        return process(inputs, SamplingParams(timeout_s=own)).params.timeout_s

    assert timeout_s(None) is None and timeout_s(5.0) == 5.0
    assert timeout_s(None, default_timeout_s=3.0, max_timeout_s=8.0) == 3.0
    assert timeout_s(5.0, default_timeout_s=3.0, max_timeout_s=8.0) == 5.0
    assert timeout_s(None, max_timeout_s=8.0) == 8.0
    with pytest.raises(RequestError, match="timeout_s is 9, this engine allows at most 8"):
        timeout_s(9.0, max_timeout_s=8.0)


def test_a_thinking_token_budget_sets_the_tokens_of_the_thought_markers() -> None:
    inputs, tokenizer = new_inputs(), new_tokenizer("byte_fallback")
    markers = process(inputs, SamplingParams(thinking_token_budget=4)).thought_markers
    assert [tokenizer.decode(decode_ids(each).tolist(), skip_special_tokens=False) for each in markers] == [
        "<think>",
        "</think>",
    ]
    assert process(inputs).thought_markers == []
    with pytest.raises(RequestError, match="no tokenizer"):
        process(InputProcessor(new_spec(), None, None), SamplingParams(thinking_token_budget=4))


@pytest.mark.parametrize(
    ("prompt", "parser", "fields", "is_awaited"),
    [
        ("Why?<think>", "think", {}, True),
        ("Why?<think>\n\n", "think", {}, True),
        ("Why?[THINK]", "mistral", {}, True),
        ("Why?<think>\n", "mistral", {}, False),
        ("Why?<think>", "none", {}, False),
        ("Why?", "deepseek_r1", {}, True),
        ("Why?<think>\n", "deepseek_r1", {}, True),
        ("Why?<think>\n\n</think>\n\n", "deepseek_r1", {}, False),
        ("Why?<think>", "auto", {}, False),  # the template has no thoughts
        ("What is <think> for?", "think", {}, False),
        ("Why?<think></think>", "think", {}, False),
        ("Why?<think>", "think", {"includes_thought": True}, False),
    ],
)
def test_structured_outputs_begin_after_a_thought_that_the_prompt_opens(
    prompt: str, parser: str, fields: dict[str, object], is_awaited: bool
) -> None:
    inputs = new_inputs(config=EngineConfig(reasoning_parser=parser))  # type: ignore[arg-type]
    params = SamplingParams(structured_outputs={"regex": "a", **fields}, thinking_token_budget=3)  # type: ignore[arg-type]
    core = process(inputs, params, prompt=prompt)
    assert bool(core.constraint_begins) == is_awaited
    assert [begin.token_ids for begin in core.constraint_begins] == core.thought_markers[-1:]
    assert process(inputs, prompt=prompt).constraint_begins == []


def test_a_thought_that_the_model_opens_before_constrained_text_has_its_budget() -> None:
    inputs = new_inputs(config=EngineConfig(reasoning_parser="think"))
    structured = StructuredOutputsParams(regex="a", thought=("<think>", "</think>"))
    core = process(inputs, SamplingParams(structured_outputs=structured, thinking_token_budget=3), prompt="Why?")
    assert core.constraint_begins == [] and len(core.thought_markers) == 2


@pytest.mark.parametrize(
    ("prompt", "repeats", "expected"),
    [
        ("Why?", True, ["<|user|>"]),
        ("Why?<think>", True, ["<|user|>"]),
        ("Why?", False, []),
        ("Why?<think>", False, ["</think>", "<|user|>"]),
        ("Why?", True, ["<|user|>tools<|user|>"]),
    ],
)
def test_a_begin_starts_the_constrained_text_and_ends_a_thought(
    prompt: str, repeats: bool, expected: list[str]
) -> None:
    inputs = new_inputs(config=EngineConfig(reasoning_parser="think"))
    outputs = {"regex": "a", "begin": (expected or ["<|user|>"])[-1], "repeats": repeats}
    params = SamplingParams(structured_outputs=outputs, thinking_token_budget=3)  # type: ignore[arg-type]
    core = process(inputs, params, prompt=prompt)
    texts = [inputs.detokenize(begin.token_ids).replace(" ", "") for begin in core.constraint_begins]
    assert texts == expected and core.constraint_repeats == repeats
    assert [begin.is_included for begin in core.constraint_begins] == [text != "</think>" for text in expected]
    assert bool(core.thought_markers) == bool(expected), "before a constrained part a thought has its budget"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"begin": "hello"}, "begin is 'hello', which is no added token of this model, nor begins"),
        ({"begin": "<|user|> hello"}, "nor begins and ends with one"),
        ({"begin": "<|user|>" * 100}, "nor begins and ends with one"),
        ({"repeats": True}, "repeats needs begin"),
        ({"begin": "<|user|>", "repeats": True, "includes_thought": True}, "no includes_thought"),
    ],
)
def test_a_begin_that_cannot_be_found_in_an_answer_is_refused(fields: dict[str, object], message: str) -> None:
    inputs = new_inputs(config=EngineConfig(reasoning_parser="think"))
    with pytest.raises(RequestError, match=message):
        params = SamplingParams(structured_outputs={"regex": "a", **fields})  # type: ignore[arg-type]
        process(inputs, params, prompt="Why?<think>")


@pytest.mark.parametrize(
    ("fields", "markers", "is_awaited"),
    [
        ({"thoughts": ThoughtTexts(opening="[T]", closing="[/T]")}, ["[T]", "[/T]"], True),
        ({"thoughts": ThoughtTexts(closing="[/T]", begins_inside=True)}, ["", "[/T]"], True),
        ({"thoughts": ThoughtTexts()}, ["<think>", "</think>"], False),
        ({"chat_form": ChatForm(template="{{ x }}[THINK]{{ y }}[/THINK]")}, ["[THINK]", "[/THINK]"], False),
        ({}, ["<think>", "</think>"], False),
    ],
)
def test_thoughts_of_a_requests_own_template_go_before_those_of_the_model(
    fields: dict[str, Any], markers: list[str], is_awaited: bool
) -> None:
    inputs = new_inputs(config=EngineConfig(reasoning_parser="think"))
    core = process(inputs, SamplingParams(thinking_token_budget=3), prompt="Why?[T]", **fields)
    assert [inputs.detokenize(each) for each in core.thought_markers] == markers
    params = SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    begins = process(inputs, params, prompt="Why?[T]", **fields).constraint_begins
    assert [inputs.detokenize(begin.token_ids) for begin in begins] == markers[1:] * is_awaited


CALL = CallForm(kind="object", start="<call>", next="", end="", name_path=("name",), arguments_path=("arguments",))


@pytest.mark.parametrize(("prompt", "num_ends"), [("Why?", 0), ("Why?<think>", 1)])
@pytest.mark.parametrize(("start", "has_text"), [("<call>", True), ("<call>", False), ("my call:", True)])
def test_strict_calls_in_prose_apply_from_the_tokens_that_may_begin_them(
    prompt: str, num_ends: int, start: str, *, has_text: bool
) -> None:
    inputs = new_inputs(config=EngineConfig(reasoning_parser="think"))
    form = msgspec.structs.replace(CALL, start=start)
    text = CallsConstraint(form=form, tools={"f": None}, has_text=has_text).to_text()
    core = process(inputs, SamplingParams(structured_outputs=StructuredOutputsParams(calls=text)), prompt=prompt)
    assert [begin.is_included for begin in core.constraint_begins] == [False] * num_ends
    is_free = has_text and start == "<call>"
    found = [inputs.token_bytes(token_id) for token_id in decode_ids(core.constraint_triggers)]
    assert bool(found) == core.constraint_repeats == is_free
    assert all(piece.endswith(b"<") for piece in found)


def test_texts_around_thoughts_are_short() -> None:
    with pytest.raises(RequestError, match="512 characters"):
        process(new_inputs(), prompt="x", thoughts=ThoughtTexts(closing="x" * 513))


# ── prompts behind a clip ────────────────────────────────────────────────────────────────────────────────────────────

CLIP = MediaSpan(kind="audio", digest=bytes(32), start=0, length=32, num_embeds=30, grid=(1, 1, 9600))


def clip_inputs() -> InputProcessor:
    spec = new_spec(max_model_len=100)
    model = msgspec.structs.replace(spec.model, cross=CrossConfig(num_rows=30, num_tokens=32))
    return InputProcessor(msgspec.structs.replace(spec, model=model), new_tokenizer("byte_fallback"), None)


def process_clip(
    params: SamplingParams, num_behind: int = 3, *, has_clip: bool = True, **fields: Any
) -> EngineCoreRequest:
    spans = [CLIP] if has_clip else []
    prompt = Prompt(encode_ids([7] * (32 * has_clip + num_behind)), None, spans)
    return clip_inputs().process(Submit(request_id="r", params=params, **fields), prompt, now=1.0).core


def test_a_text_behind_a_clip_is_tokenized_as_it_is() -> None:
    prompt = clip_inputs().tokenize(ReadPrompt(prompt="The", add_special_tokens=True))
    assert decode_ids(prompt.token_ids).tolist() == [296]


def test_max_tokens_is_the_room_behind_clip_and_prompt() -> None:
    core = process_clip(SamplingParams(max_tokens=None))
    assert core.max_tokens == 100 - 32 - 3
    assert core.media == [CLIP]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"has_clip": False}, "this model answers to audio: give a clip"),
        ({"num_behind": 0}, "no tokens behind its clip"),
        ({"params": SamplingParams(prompt_logprobs=1)}, "prompt_logprobs are not there"),
        ({"pooling": PoolingParams()}, "gives no embeddings"),
    ],
)
def test_a_prompt_that_a_clip_does_not_allow_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        process_clip(**{"params": SamplingParams(), **fields})

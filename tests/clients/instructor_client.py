"""instructor in the modes that name a schema, unpatched, against the server at argv[1]; prints its results as JSON."""

import json
from typing import Any

import instructor
import openai
from instructor import Mode
from wanted import CUT_AT, MODEL, QUESTION, TOO_LONG, URL, Address, Seen, error_of, is_wanted

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)
ASKED: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_retries": 0, "response_model": Address}
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
MODES = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA)
seen = Seen()


def completions(mode: Mode) -> Any:
    return instructor.from_openai(client, mode=mode).chat.completions


@seen
def modes() -> object:
    return [is_wanted(completions(mode).create(messages=MESSAGES, **ASKED)) for mode in MODES]


@seen
def partial() -> object:
    return [is_wanted(list(completions(mode).create_partial(messages=MESSAGES, **ASKED))[-1]) for mode in MODES]


@seen
def responses() -> object:
    return is_wanted(instructor.from_openai(client, mode=Mode.RESPONSES_TOOLS).create(messages=MESSAGES, **ASKED))


@seen
def second_turn() -> object:
    made, completion = completions(Mode.TOOLS).create_with_completion(messages=MESSAGES, **ASKED)
    message = completion.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "found"} for call in message.tool_calls]
    again = [*MESSAGES, message.model_dump(), *results, *MESSAGES]
    return [is_wanted(made), is_wanted(completions(Mode.TOOLS).create(messages=again, **ASKED))]


@seen
def cut() -> object:
    return [
        error_of(lambda mode=mode: completions(mode).create(messages=MESSAGES, max_tokens=CUT_AT, **ASKED))
        for mode in MODES
    ]


@seen
def too_long() -> object:
    long = [{"role": "user", "content": TOO_LONG}]
    return error_of(lambda: completions(Mode.TOOLS).create(messages=long, **ASKED))


print(json.dumps(seen))

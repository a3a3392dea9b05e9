"""No regular expression takes time without a bound: each is in this table, and linear in any text of a caller.

An expression reads the texts of callers or of models, or only those of the operator. A new one makes the first test red
until it has its line here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tokenloom.frontend.forms.anthropic import request_body
from tokenloom.frontend.forms.openai import response_body, schema
from tokenloom.frontend.forms.openai.batches.batch import WINDOW_PATTERN
from tokenloom.frontend.forms.openai.params import _SCHEMA
from tokenloom.frontend.forms.parsers.joint_automaton import compile_joints
from tokenloom.frontend.forms.parsers.json_calls import CallShape, compile_head
from tokenloom.frontend.forms.parsers.literal_values import EXACT, LOOSE, ending_before
from tokenloom.frontend.forms.parsers.literals import BEHIND_ARGUMENT
from tokenloom.frontend.forms.parsers.markers import compile_markers
from tokenloom.tests.bounds.expressions import ANYWHERE, Expression, expressions
from tokenloom.tests.bounds.growth import fast_growth
from tokenloom.tests.bounds.hostile_texts import Hostile, hostile_texts


class Read(NamedTuple):
    """An expression that reads texts of others: their kind, texts to try beside the derived ones, and the method of an
    expression that is not used by its name. `patterns`: examples, if it is put together at run time."""

    kind: str
    texts: tuple[Hostile, ...] = ()
    method: str = ""
    patterns: tuple[re.Pattern[Any], ...] = ()


class Ours(NamedTuple):
    """An expression that reads nothing of callers."""

    why: str


ESCAPED = Hostile('"', '\\"')  # a JSON string without end
OPERATOR = Ours("the operator's options")
HEADER, BODY, FORM = Read("a header"), Read("a body", (ESCAPED,)), Read("the head of a form's part")
MODEL = Read("an answer", (ESCAPED, Hostile(" a [CALL_ID]", " "), Hostile('{"name": "', "\\\\")))
FORM_OF_ANSWERS = Read("the joints of a form")
ADAPTER = Read("an adapter's files")
TEMPLATE = Read(
    "a checkpoint's response template", (Hostile("(?P<a>", "\\."), Hostile("", "(?P<a"), Hostile("", "\\s\\"))
)
FIELDS = (  # all that are put before an error's message
    rf"^{re.escape(_SCHEMA)}",
    r"^structured_outputs\.\w+",
    r"^(?=(?:the|a) (?:prompts?|image|audio clip)\b)",
    r"^prompt_token_ids\b",
    r"^messages\b",
    r"^stop\b",
    "^file: ",
)
LEFT_OUT = tuple(  # types of items that are left out
    re.compile(each.LEFT_OUT)
    for module in (request_body, response_body, schema)
    for each in vars(module).values()
    if hasattr(each, "LEFT_OUT")
)
TABLE: dict[str, Read | Ours] = {
    "frontend/checkpoint/downloads/hub_name.py _HOST": OPERATOR,
    "frontend/checkpoint/downloads/hub_name.py _ID": OPERATOR,
    "frontend/checkpoint/downloads/hub_name.py _PAGE": OPERATOR,
    "frontend/checkpoint/downloads/hub_name.py _TAGGED": OPERATOR,
    "frontend/forms/anthropic/blocks.py _TOKENS": MODEL,
    "frontend/checkpoint/gguf/choice.py PART": OPERATOR,
    "frontend/checkpoint/gguf/choice.py _FORMAT": OPERATOR,
    "frontend/checkpoint/gguf/choice.py _with_word#1": OPERATOR,
    "frontend/checkpoint/gguf/choice.py format_of#1": OPERATOR,
    "frontend/server/http/invocations.py _TOKEN": BODY,
    "frontend/server/http/middleware.py _REQUEST_ID": HEADER,
    "frontend/server/http/middleware.py _STORED": Read("a path"),
    "frontend/server/http/streams/stream.py _POSITION": HEADER,
    "frontend/server/http/ollama.py _QUANTIZATION": Ours("names of files of the model"),
    "frontend/server/http/openapi.py _operation#1": Ours("our own paths"),
    "frontend/forms/openai/batches/batch.py window_s#1": Read("a body", patterns=(re.compile(WINDOW_PATTERN),)),
    "frontend/forms/openai/batches/line.py _MISSING": BODY,
    "frontend/forms/openai/batches/line.py _PLACE": BODY,
    "frontend/server/bodies/batch_file.py _INK": BODY,
    "frontend/server/bodies/body_error.py _BACKTICKED": BODY,
    "frontend/server/bodies/body_error.py _FIELD": BODY,
    "frontend/server/bodies/body_error.py _KIND": BODY,
    "frontend/server/bodies/body_error.py _TOKENS": BODY,
    "frontend/server/bodies/body_error.py invalid_body#1": BODY,
    "frontend/server/bodies/body_error.py invalid_body#2": BODY,
    "frontend/server/bodies/form_data.py _BOUNDARY": HEADER,
    "frontend/server/bodies/form_data.py _OF_TYPE": Read(
        "a header", (Hostile(";boundary=", '"'), Hostile("", ";boundary "))
    ),
    "frontend/server/bodies/form_data.py _PARAMETER": FORM,
    "frontend/server/bodies/form_data.py _parameters#1": FORM,
    "frontend/listening/web_pages.py _AUTHORITY": HEADER,
    "frontend/listening/web_pages.py _UNOWNED": HEADER,
    "frontend/server/metrics/tracing.py _TRACEPARENT": HEADER,
    "frontend/server/bodies/unknown_fields.py _is_left_out#1": Read("a body", patterns=LEFT_OUT),
    "frontend/server/metrics/tracing.py _MEMBER": HEADER,
    "frontend/server/api/openai/body_reader.py _JSON": HEADER,
    "frontend/forms/anthropic/tool_use_ids.py _REFUSED": MODEL,
    "frontend/forms/anthropic/tool_use_ids.py _WRITTEN": Read("a body"),
    "frontend/forms/openai/errors.py _LEADING_NAME": Read("a message with a caller's text"),
    "frontend/forms/openai/params.py errors_about#1": Read(
        "a message with a caller's text", patterns=tuple(map(re.compile, FIELDS))
    ),
    "frontend/forms/openai/parts.py refuse_left_out#1": Read("a body", patterns=LEFT_OUT),
    "frontend/forms/openai/unparsed.py _DIGIT": MODEL,
    "frontend/forms/openai/unparsed.py _LETTER": MODEL,
    "frontend/forms/openai/unparsed.py _MARKER": Read("a form"),
    "frontend/forms/openai/prompts.py _SECRET": Read("an id"),
    "frontend/forms/answer_forms/joint_plan.py _MARKER": FORM_OF_ANSWERS,
    "frontend/forms/answer_forms/joint_plan.py _VALUE": FORM_OF_ANSWERS,
    "frontend/forms/parsers/call_machine.py _NAME": MODEL,
    "frontend/forms/parsers/call_machine.py _PLACE": FORM_OF_ANSWERS,
    "frontend/forms/parsers/joint_automaton.py _ATOM": FORM_OF_ANSWERS,
    "frontend/forms/parsers/joint_automaton.py _LEADING": FORM_OF_ANSWERS,
    "frontend/forms/parsers/joint_automaton.py __init__#1": Read(
        "an answer", method="search", patterns=(compile_joints(("<a b>", "[c]", "{ID}")).first,)
    ),
    "frontend/forms/parsers/joint_automaton.py _pattern#1": Ours("a joint's text, which is short"),
    "frontend/forms/parsers/json_calls.py compile_head#1": Read(
        "an answer", (ESCAPED,), "match", (compile_head(CallShape((), ())),)
    ),
    "frontend/forms/parsers/json_calls.py compile_head#2": Read(
        "an answer",
        (ESCAPED, Hostile('{"a": 1,', '"a": 1,'), Hostile('{"a": "', "\\\\")),
        "match",
        (compile_head(CallShape()), compile_head(CallShape(("f", "name"), ("f", "arguments"), ("id",)))),
    ),
    "frontend/forms/parsers/literal_values.py _BARE": MODEL,
    "frontend/forms/parsers/literal_values.py _BASED": MODEL,
    "frontend/forms/parsers/literal_values.py _ESCAPE": MODEL,
    "frontend/forms/parsers/literal_values.py _FLOAT": MODEL,
    "frontend/forms/parsers/literal_values.py _INTEGER": MODEL,
    "frontend/forms/parsers/literal_values.py _SPACE": MODEL,
    "frontend/forms/parsers/literal_values.py strings#1": Read(
        "an answer",
        (Hostile("'", "' "), Hostile("'", "\\"), Hostile("'", "'a"), Hostile("'", "', a")),
        "match",
        (EXACT, LOOSE, ending_before(BEHIND_ARGUMENT.format(re.escape("=")))),
    ),
    "frontend/forms/parsers/custom.py _BEGIN": MODEL,
    "frontend/forms/parsers/custom.py _WHOLE": MODEL,
    "frontend/forms/parsers/custom.py _ESCAPE": MODEL,
    "frontend/forms/parsers/families/harmony.py _CHANNEL": MODEL,
    "frontend/forms/parsers/families/harmony.py _FUNCTION": MODEL,
    "frontend/forms/parsers/families/harmony.py _HEADER": MODEL,
    "frontend/forms/parsers/families/harmony.py _LEAD": MODEL,
    "frontend/forms/parsers/json_calls.py _OUTSIDE": MODEL,
    "frontend/forms/parsers/json_calls.py _IN_TEXT": MODEL,
    "frontend/forms/parsers/response_templates/reader.py _LITERAL": TEMPLATE,
    "frontend/forms/parsers/response_templates/reader.py _SPECIAL": TEMPLATE,
    "frontend/forms/parsers/response_templates/reader.py _markers#1": TEMPLATE,
    "frontend/server/answer_forms/response_template.py _CHARACTER": TEMPLATE,
    "frontend/server/answer_forms/response_template.py _GROUP": TEMPLATE,
    "frontend/server/answer_forms/response_template.py _SPACE": TEMPLATE,
    "frontend/server/answer_forms/response_template.py _WHOLE": TEMPLATE,
    "frontend/server/sources/media_url.py _NAME": Read("a URL"),
    "frontend/forms/parsers/markers.py compile_markers#1": Read(
        "an answer", method="search", patterns=(compile_markers(("a" * 4096, "ab", '"]^\\-'))[1],)
    ),
    "frontend/server/text/text_cut.py _IN_TOKEN": Read("the vocabulary"),
    "frontend/server/text/text_cut.py _PLACE": Read("a prompt"),
    "frontend/server/text/token_bytes.py _BYTE": Read("the vocabulary"),
    "frontend/forms/speech/prompts.py SPECIAL": MODEL,
    "frontend/forms/speech/transcript.py _WITHOUT_BLANKS": MODEL,
    "frontend/forms/speech/whisper.py TIME": MODEL,
    "frontend/state/contents.py _NAME": Read("names of files", method="fullmatch"),
    "ipc/sockets/http_options.py check_http#1": OPERATOR,
    "ipc/sockets/http_options.py check_http#2": OPERATOR,
    "ipc/spec/adapters/name_pattern.py SAME_IN_BOTH": Read(
        "an adapter's files", (Hostile("[", "a"), Hostile("(?:", "\\.["), Hostile("[]", "\\d"))
    ),
    "ipc/spec/adapters/pattern_table.py PLAIN": ADAPTER,
    "ipc/spec/adapters/targets.py MLP_BLOCK": ADAPTER,
    "ipc/spec/adapters/tensor_header.py NAME": ADAPTER,
    "ipc/sockets/addresses.py _NAME": OPERATOR,
    "ipc/blobs/folder.py _NAME": Read("names of files", method="fullmatch"),
    "ipc/spec/config/tier_places.py _peer_host#1": OPERATOR,
    "ipc/errors.py _CREDENTIALS": Read("a message with a caller's text"),
    "ipc/errors.py _UNPRINTED": Read("a value of an option or a file, in an error"),
    "ipc/spec/models/model_file.py CAUSAL": Read("a checkpoint's config"),
    "ipc/process/machine_memory.py _read_count#1": Ours("a file of the kernel"),
    "ipc/params/call_form.py PLACE": FORM_OF_ANSWERS,
    "ipc/params/call_form.py _EDGE": FORM_OF_ANSWERS,
    "ipc/params/structured_outputs.py _BRACKETS": BODY,
    "core/tiers/disk_folder.py _NOT_COUNTED": Read("names of files"),
    "core/tiers/disk_scan.py NAMESPACE_NAME": Read("names of files"),
    "core/tiers/disk_scan.py OBJECT_NAME": Read("names of files"),
    "core/tiers/disk_scan.py _FOLDER": Read("names of files", method="fullmatch"),
    "core/tiers/namespace.py _BLOB_NAME": Read("names of files"),
    "frontend/server/adapters/store.py ENTRY_NAME": Read("names of files"),
}
FOLDERS = {  # their expressions read nothing of callers in a loop
    "core/features/grammar/": "a process that may be killed, and compiles each grammar within a limit of time",
    **{
        f"frontend/server/answer_forms/{name}.py": "renderings of probes, at most 1 MB each, in a process of their own"
        for name in ("learn", "renderings", "thoughts", "whole_markers")
    },
    "frontend/launcher/options/": "the operator's options and environment",
    "frontend/launcher/ray/": "the operator's options, and errors of Ray's",
    "frontend/launcher/supervisor/": "the operator's options",
}


@pytest.fixture(scope="module")
def found() -> dict[str, Expression]:
    return {each.place: each for each in expressions() if not each.place.startswith(tuple(FOLDERS))}


def reading(pattern: re.Pattern[Any], methods: frozenset[str], hostile: Hostile, size: int) -> Callable[[], object]:
    """Return the use of an expression by `methods` on a text of `size` characters."""
    text: str | bytes = hostile.text(size)
    if isinstance(pattern.pattern, bytes):
        text = hostile.text(size).encode()
    if methods == {"search"}:
        return partial(pattern.search, text)
    if methods & ANYWHERE:
        return lambda: sum(1 for _ in pattern.finditer(text))
    return lambda: [getattr(pattern, method)(text) for method in methods]


def test_every_expression_is_in_the_table(found: dict[str, Expression]) -> None:
    assert sorted(found) == sorted(TABLE)


def test_each_expression_takes_time_in_proportion_to_its_text(found: dict[str, Expression]) -> None:
    faults = []
    for place in sorted(found.keys() & TABLE.keys()):
        entry, expression = TABLE[place], found[place]
        if not isinstance(entry, Read):
            continue
        methods = frozenset((entry.method,)) if entry.method else expression.methods
        patterns = entry.patterns or expression.patterns()
        assert methods and patterns, f"{place}: name its methods and examples in the table"
        faults += [
            f"{place}: {pattern.pattern!r} on {hostile}: {slow}"
            for pattern in patterns
            for hostile in (*entry.texts, *hostile_texts(pattern))
            if (slow := fast_growth(partial(reading, pattern, methods, hostile)))
        ]
    assert not faults


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        ('"[^"\\\\]*(?:\\\\.[^"\\\\]*)*"', "finditer"),
        (r'("(?:[^"\\]|\\.)*")', "search"),
        (r"\s*\w*\s*x", "match"),
        ("(a+)+$", "fullmatch"),
        (r"\s+b", "search"),
        ("(?:a|aa)+b", "match"),
        (b"[a-z]+=", "findall"),
        (r"<[^>]*>", "sub"),
    ],
)
def test_derived_texts_find_expressions_that_take_the_square(pattern: str | bytes, method: str) -> None:
    compiled = re.compile(pattern)
    found = (
        fast_growth(partial(reading, compiled, frozenset((method,)), hostile)) for hostile in hostile_texts(compiled)
    )
    assert any(found)


def test_an_expression_is_found_wherever_it_is(tmp_path: Path) -> None:
    (tmp_path / "frontend").mkdir()
    source = tmp_path / "frontend" / "new.py"
    source.write_text(
        "import re\nA, B = re.compile('a'), re.compile(f'{A}')\ndef f(x):\n    re.search('c', x)\n", encoding="utf-8"
    )
    assert [each.place.partition(" ")[2] for each in expressions(tmp_path)] == ["A", "B", "f#1"]
    source.write_text("from re import compile\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="name alone"):
        list(expressions(tmp_path))

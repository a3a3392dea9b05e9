"""Answers as a model with each template of template_shapes.py would write them, by hand: an oracle for reading them.

Every answer calls weather(city="Paris", days=3), and `two` calls clock() after it. Nothing here was rendered.
"""

from __future__ import annotations

from typing import NamedTuple

CITY = '{"city": "Paris", "days": 3}'
DENSE = '{"city":"Paris","days":3}'
OBJECT = f'{{"name": "weather", "arguments": {CITY}}}'
DENSE_OBJECT = f'{{"name":"weather","arguments":{DENSE}}}'
CLOCK = '{"name": "clock", "arguments": {}}'
HERMES = f"<tool_call>\n{OBJECT}\n</tool_call>"
COHERE = f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {CITY}}}'
HERMES_CLOCK = f"<tool_call>\n{CLOCK}\n</tool_call>"
KIMI = f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{CITY}<|tool_call_end|>"
KIMI_CLOCK = "<|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
LINES = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
LINES_END = "</function>\n</tool_call>"
LOOSE_LINES = "<tool_call><function=weather><parameter=city>Paris</parameter><parameter=days>3</parameter></function>"
KEYS = "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
JOINED = "".join(KEYS.split())
UNEVEN = KEYS.replace("</arg_value>\n<", "</arg_value><")
INVOKE = '<invoke name="weather">\n<parameter name="city">Paris</parameter>\n<parameter name="days">3</parameter>\n'
DSML = "｜DSML｜"
TYPED = (
    f'<{DSML}invoke name="weather">\n<{DSML}parameter name="city" string="true">Paris</{DSML}parameter>\n'
    f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n</{DSML}invoke>\n'
)
COUNTED = (
    "<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
)
OPEN = ":open>"
SUFFIXED = (
    f"<tool_calls{OPEN}\n<tool_call{OPEN}weather<tool_sep{OPEN}\n"
    f"<arg_key{OPEN}city</arg_key{OPEN}\n<arg_value{OPEN}Paris</arg_value{OPEN}\n"
    f"<arg_key{OPEN}days</arg_key{OPEN}\n<arg_value{OPEN}3</arg_value{OPEN}\n</tool_call{OPEN}\n"
)
CDATA = '<function name="weather"><param name="city"><![CDATA[Paris]]></param><param name="days">3</param></function>'
QUOTE = '<|"|>'
GEMMA = f"<|tool_call>call:weather{{city:{QUOTE}Paris{QUOTE},days:3}}"
SOLAR = f"<|tool_calls|><|tool_call:begin|>abcDEF123<|tool_call:name|>weather<|tool_call:args|>{CITY}<|tool_call:end|>"
SOLAR_CLOCK = "<|tool_call:begin|>abcDEF124<|tool_call:name|>clock<|tool_call:args|>{}<|tool_call:end|>"
ACTION = '{\n    "tool_name": "weather",\n    "parameters": {\n        "city": "Paris",\n        "days": 3\n    }\n}'
NS = "]<]ns[>["
ELEMENTS = (
    f'{NS}<tool_call>\n{NS}<invoke name="weather">{NS}<city>Paris{NS}</city>{NS}<days>3{NS}</days>{NS}</invoke>\n'
)
RECIPIENT = f" to=weather<|message|><calls>\n{INVOKE}</invoke>\n</calls>"


class Answer(NamedTuple):
    """One call written in a form, and variations of it."""

    one: str
    two: str  # "": the form shows one call
    cut: str  # `one` that ends before its last closing marker; "": it has none, or another argument could follow
    loose: str  # `one` with other white space
    thought: str = ""  # the thought "Hm.", without the text that opens it where the prompt does
    said: str = "I look.\n"  # the content "I look." before a call


PYTHON = Answer(
    "<|tool_call_start|>[weather(city='Paris', days=3)]<|tool_call_end|>",
    "<|tool_call_start|>[weather(city='Paris', days=3), clock()]<|tool_call_end|>",
    "<|tool_call_start|>[weather(city='Paris', days=3)]",
    "<|tool_call_start|>[weather(city='Paris',days=3)]<|tool_call_end|>",
    "<think>Hm.</think>",
    "I look.",
)
ANSWERS = {
    "object/hermes": Answer(
        HERMES, f"{HERMES}\n{HERMES_CLOCK}", f"<tool_call>\n{OBJECT}", f"<tool_call>{DENSE_OBJECT}</tool_call>"
    ),
    "object/hermes_thoughts": Answer(
        HERMES,
        f"{HERMES}\n{HERMES_CLOCK}",
        f"<tool_call>\n{OBJECT}\n",
        f"<tool_call> {DENSE_OBJECT}\n\n</tool_call>",
        "<think>\nHm.\n</think>\n\n",
    ),
    "object/json_list": Answer(
        f"<TOOLCALL>[{OBJECT}]</TOOLCALL>",
        f"<TOOLCALL>[{OBJECT}, {CLOCK}]</TOOLCALL>",
        f"<TOOLCALL>[{OBJECT}]",
        f"<TOOLCALL>[ {DENSE_OBJECT} ]</TOOLCALL>",
        "Hm.\n</think>\n",
    ),
    "object/call_ids": Answer(
        f'[TOOL_CALLS][{OBJECT[:-1]}, "id": "abcDEF123"}}]',
        f'[TOOL_CALLS][{OBJECT[:-1]}, "id": "abcDEF123"}}, {CLOCK[:-1]}, "id": "abcDEF124"}}]',
        f'[TOOL_CALLS][{OBJECT[:-1]}, "id": "abcDEF123"}}',
        f'[TOOL_CALLS] [{DENSE_OBJECT[:-1]},"id":"abcDEF123"}}]',
    ),
    "object/name_as_key": Answer(
        f'<|tools_prefix|>[{{"weather": {CITY}}}]<|tools_suffix|>',
        f'<|tools_prefix|>[{{"weather": {CITY}}}, {{"clock": {{}}}}]<|tools_suffix|>',
        f'<|tools_prefix|>[{{"weather": {CITY}}}]',
        f'<|tools_prefix|>[{{"weather":{DENSE}}}]<|tools_suffix|>',
        said="I look.",
    ),
    "object/indented_ids": Answer(
        f"{COHERE}\n]<|END_ACTION|>",
        f'{COHERE},\n    {{"tool_call_id": "1", "tool_name": "clock", "parameters": {{}}}}\n]<|END_ACTION|>',
        f"{COHERE}\n]",
        f'<|START_ACTION|>[{{"tool_call_id":"0","tool_name":"weather","parameters":{DENSE}}}]<|END_ACTION|>',
        "<|START_THINKING|>Hm.<|END_THINKING|>",
    ),
    "object/line_breaks_between": Answer(
        f"<tool_calls>\n{OBJECT}\n</tool_calls>",
        f"<tool_calls>\n{OBJECT}\n{CLOCK}\n</tool_calls>",
        f"<tool_calls>\n{OBJECT}\n",
        f"<tool_calls>{DENSE_OBJECT}</tool_calls>",
    ),
    "object/calls_as_turn": Answer(
        f"<|message_sep|>\n\nfunction call<|role_sep|>\n{OBJECT}",
        "",
        "",
        f"<|message_sep|>\nfunction call<|role_sep|>{DENSE_OBJECT}",
        said="I look.",
    ),
    "object/single_call": Answer(
        f"<|function_call|>{OBJECT}", "", "", f"<|function_call|> {DENSE_OBJECT}", said="I look."
    ),
    "object/list_with_ids": Answer(
        f'<tool_calls>[{OBJECT[:-1]}, "id": "abcDEF123"}}]</tool_calls>',
        f'<tool_calls>[{OBJECT[:-1]}, "id": "abcDEF123"}}, {CLOCK[:-1]}, "id": "abcDEF124"}}]</tool_calls>',
        f'<tool_calls>[{OBJECT[:-1]}, "id": "abcDEF123"}}]',
        f'<tool_calls>[\n{DENSE_OBJECT[:-1]},"id":"abcDEF123"}}\n]\n</tool_calls>',
        "Hm.\n[BEGIN FINAL RESPONSE]\n",
    ),
    "object/no_break_between": Answer(
        HERMES,
        f"{HERMES}{HERMES_CLOCK}",
        f"<tool_call>\n{OBJECT}\n",
        f"<tool_call>{DENSE_OBJECT}</tool_call>",
        "Hm.\n</think>\n\n",
    ),
    "object/signatures": Answer(
        HERMES, f"{HERMES}\n{HERMES_CLOCK}", f"<tool_call>\n{OBJECT}", f"<tool_call>{DENSE_OBJECT}</tool_call>"
    ),
    "json/place_in_name": Answer(
        SECTION + KIMI + SECTION_END,
        SECTION + KIMI + KIMI_CLOCK + SECTION_END,
        SECTION + KIMI,
        f"{SECTION}\n{KIMI.replace(CITY, DENSE)}\n{SECTION_END}",
        said="I look.",
    ),
    "json/place_and_thoughts": Answer(
        SECTION + KIMI + SECTION_END,
        SECTION + KIMI + KIMI_CLOCK + SECTION_END,
        SECTION + KIMI,
        SECTION + KIMI.replace(CITY, f" {DENSE} ") + SECTION_END,
        "<think>Hm.</think>",
        "I look.",
    ),
    "json/marker_each": Answer(
        f"[TOOL_CALLS]weather[ARGS]{CITY}",
        f"[TOOL_CALLS]weather[ARGS]{CITY}[TOOL_CALLS]clock[ARGS]{{}}",
        "",
        f"[TOOL_CALLS]weather[ARGS] {DENSE}",
        "[THINK]Hm.[/THINK]",
        "I look.",
    ),
    "json/marker_and_id": Answer(
        f"[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS]{CITY}",
        f"[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS]{CITY}[TOOL_CALLS]clock[CALL_ID]abcDEF124[ARGS]{{}}",
        "",
        f"[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS] {DENSE}",
        said="I look.",
    ),
    "json/function_tag": Answer(
        f"<function=weather>{CITY}</function>",
        f"<function=weather>{CITY}</function><function=clock>{{}}</function>",
        f"<function=weather>{CITY}",
        f"<function=weather>\n{DENSE}\n</function>",
        said="I look.",
    ),
    "json/code_fence": Answer(
        f"{CALLS}{CALL}function{SEPARATOR}weather\n```json\n{CITY}\n```{CALL_END}{CALLS_END}",
        f"{CALLS}{CALL}function{SEPARATOR}weather\n```json\n{CITY}\n```{CALL_END}\n"
        f"{CALL}function{SEPARATOR}clock\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
        f"{CALLS}{CALL}function{SEPARATOR}weather\n```json\n{CITY}\n```{CALL_END}",
        f"{CALLS}{CALL}function{SEPARATOR}weather\n```json\n\n{DENSE}```{CALL_END}{CALLS_END}",
        "Hm.\n</think>\n\n",
    ),
    "json/separator": Answer(
        f"{CALLS}{CALL}weather{SEPARATOR}{CITY}{CALL_END}{CALLS_END}",
        f"{CALLS}{CALL}weather{SEPARATOR}{CITY}{CALL_END}{CALL}clock{SEPARATOR}{{}}{CALL_END}{CALLS_END}",
        f"{CALLS}{CALL}weather{SEPARATOR}{CITY}{CALL_END}",
        f"{CALLS}{CALL}weather{SEPARATOR}\n{DENSE}\n{CALL_END}{CALLS_END}",
        "Hm.</think>",
        "I look.",
    ),
    "json/headers_between": Answer(
        f"{SOLAR}<|calls|>",
        f"{SOLAR}{SOLAR_CLOCK}<|calls|>",
        SOLAR,
        f"{SOLAR.replace(CITY, DENSE)}\n<|calls|>",
        "<|think|>Hm.<|end|><|begin|>assistant",
        "<|content|>I look.<|end|><|begin|>assistant",
    ),
    "tagged/lines": Answer(
        LINES + LINES_END,
        f"{LINES}{LINES_END}\n<tool_call>\n<function=clock>\n{LINES_END}",
        f"{LINES}</function>",
        f"{LOOSE_LINES}</tool_call>",
        said="I look.\n\n",
    ),
    "tagged/lines_and_thoughts": Answer(
        LINES + LINES_END,
        f"{LINES}{LINES_END}\n<tool_call>\n<function=clock>\n{LINES_END}",
        f"{LINES}</function>",
        f"{LOOSE_LINES}</tool_call>",
        "Hm.\n</think>\n",
    ),
    "tagged/one_line": Answer(
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</seed:tool_call>",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=clock>\n</function>\n</seed:tool_call>",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n",
        "<seed:tool_call><function=weather><parameter=city>Paris</parameter><parameter=days>3</parameter></function>"
        "</seed:tool_call>",
        "<seed:think>Hm.</seed:think>\n",
        "I look.\n\n",
    ),
    "tagged/key_value": Answer(
        f"<tool_call>weather\n{KEYS}</tool_call>",
        f"<tool_call>weather\n{KEYS}</tool_call>\n<tool_call>clock\n</tool_call>",
        "",
        f"<tool_call>weather{JOINED}</tool_call>",
        "<think>Hm.</think>\n",
    ),
    "tagged/key_value_joined": Answer(
        f"<tool_call>weather{JOINED}</tool_call>",
        f"<tool_call>weather{JOINED}</tool_call><tool_call>clock</tool_call>",
        "",
        f"<tool_call>weather{JOINED}</tool_call>\n",
        "Hm.</think>",
        "I look.",
    ),
    "tagged/closed_turn": Answer(
        f"<tool_call>weather\n{KEYS}</tool_call>\n",
        f"<tool_call>weather\n{KEYS}</tool_call>\n<tool_call>clock\n</tool_call>\n",
        "",
        f"<tool_call>weather{JOINED}</tool_call>",
        "\nHm.\n</think>\n",
    ),
    "tagged/invokes": Answer(
        f"<minimax:tool_call>\n{INVOKE}</invoke>\n</minimax:tool_call>",
        f'<minimax:tool_call>\n{INVOKE}</invoke>\n<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
        f"<minimax:tool_call>\n{INVOKE}</invoke>\n",
        f"<minimax:tool_call>{INVOKE}\n</invoke>\n\n</minimax:tool_call>",
        "Hm.\n</think>\n\n",
    ),
    "tagged/typed": Answer(
        f"<{DSML}calls>\n{TYPED}</{DSML}calls>",
        f'<{DSML}calls>\n{TYPED}<{DSML}invoke name="clock">\n\n</{DSML}invoke>\n</{DSML}calls>',
        f"<{DSML}calls>\n{TYPED}",
        f"<{DSML}calls>{TYPED}\n</{DSML}calls>",
        "Hm.</think>",
        "I look.\n\n",
    ),
    "tagged/typed_and_counted": Answer(
        f"{COUNTED}<|close|>tools<|sep|>",
        f'{COUNTED}<|open|>call tool="clock" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        COUNTED,
        f"{COUNTED}\n<|close|>tools<|sep|>",
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>",
        "I look.",
    ),
    "tagged/cdata": Answer(
        CDATA.replace("<![CDATA[", "").replace("]]>", ""),
        CDATA.replace("<![CDATA[", "").replace("]]>", "") + '\n<function name="clock"></function>',
        "",
        CDATA,
        "Hm.\n</think>\n\n",
    ),
    "tagged/suffixed": Answer(
        f"{SUFFIXED}</tool_calls{OPEN}",
        f"{SUFFIXED}<tool_call{OPEN}clock<tool_sep{OPEN}\n</tool_call{OPEN}\n</tool_calls{OPEN}",
        SUFFIXED,
        "".join(SUFFIXED.split()) + f"</tool_calls{OPEN}",
        f"<think{OPEN}Hm.</think{OPEN}",
        "I look.",
    ),
    "tagged/recipients": Answer(
        RECIPIENT,
        f'{RECIPIENT}<|eom|><|start|>assistant to=clock<|message|><calls>\n<invoke name="clock">\n</invoke>\n</calls>',
        RECIPIENT.removesuffix("</calls>"),
        f" to=weather<|message|><calls>{INVOKE}</invoke></calls>",
        " to=self<|message|>Hm.<|eom|><|start|>assistant",
        " to=user<|message|>I look.<|eom|><|start|>assistant",
    ),
    "tagged/uneven": Answer(
        f"<tool_call>weather\n{UNEVEN}</tool_call>",
        f"<tool_call>weather\n{UNEVEN}</tool_call>\n<tool_call>clock\n\n</tool_call>",
        "",
        f"<tool_call>weather\n{KEYS}</tool_call>",
        "Hm.</think>",
    ),
    "literal/python_calls": PYTHON,
    "literal/python_lists": PYTHON,
    "literal/lines": Answer(
        '<function_calls>weather(city="Paris", days=3)</function_calls>',
        '<function_calls>weather(city="Paris", days=3)\nclock()</function_calls>',
        '<function_calls>weather(city="Paris", days=3)',
        "<function_calls>\n\n weather(city='Paris',days=3)\n\n</function_calls>",
        said="I look. ",
    ),
    "odd/repeated_instruction": Answer(
        f"Action:\n```json\n[\n{ACTION}\n]```",
        f'Action:\n```json\n[\n{ACTION},\n{{\n    "tool_name": "clock",\n    "parameters": {{}}\n}}\n]```',
        f"Action:\n```json\n[\n{ACTION}\n]",
        f'Action: ```json\n[{{"tool_name":"weather","parameters":{DENSE}}}]\n```',
    ),
    "odd/elements_by_name": Answer(
        f"{ELEMENTS}{NS}</tool_call>",
        f'{ELEMENTS}{NS}<invoke name="clock">{NS}</invoke>\n{NS}</tool_call>',
        ELEMENTS,
        f"{ELEMENTS}\n{NS}</tool_call>",
        "<mm:think>Hm.</mm:think>",
        "I look.",
    ),
    "literal/quoted_by_marker": Answer(
        f"{GEMMA}<tool_call|>",
        f"{GEMMA}<tool_call|><|tool_call>call:clock{{}}<tool_call|>",
        GEMMA,
        f"<|tool_call>call:weather{{city:{QUOTE}Paris{QUOTE}, days:3}}<tool_call|>",
        "<|channel>thought\nHm.\n<channel|>",
        "I look.",
    ),
}

"""ChatTemplate renders as transformers does; a failure of the template is a RequestError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from tokenloom.frontend.server.text.chat_template import DEFAULTS, ChatTemplate, check_template
from tokenloom.frontend.server.text.media_marker import MediaMarker
from tokenloom.ipc.errors import ConfigError, RequestError
from tokenloom.ipc.messages.client import ChatForm, ChatMessage, MediaPart, TextPart
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.tests.frontend.server.text.samples import backend_json, new_tokenizer
from tokenloom.tests.support.engine_specs import new_spec

CHAT = [
    ChatMessage("system", "Be <brief> & kind."),
    ChatMessage("user", "  Hi, 漢字! "),
    ChatMessage("assistant", "Hello."),
    ChatMessage("user", "{{ 7 * 7 }}"),
]
TEMPLATES = {
    "loop": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "blocks": """
{%- set ns = namespace(n=0) %}
{% for m in messages %}
    {% if m.role == 'system' %}
        {% continue %}
    {% endif %}
    {% set ns.n = ns.n + 1 %}
{{ ns.n }}: {{ m.content }}
{% endfor %}
{{ ns.n }} turns
""",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "defaults": "{{ tools is not none }}{{ documents is defined }}|{{ messages[-1]['role'] == 'user' }}",
    "break": "{% for m in messages %}{{ m.role }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name: str) -> None:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(backend_json("byte_level")), bos_token="<s>", eos_token="</s>"
    )
    turns = [{"role": message.role, "content": message.content} for message in CHAT]
    expected = wrapped.apply_chat_template(
        turns, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )
    template = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(CHAT) == expected


CONTINUED = {
    "keeps": "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>\n{% endfor %}",
    "strips": "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>\n{% endfor %}",
    "prompts": "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
}


@pytest.mark.parametrize("name", CONTINUED)
@pytest.mark.parametrize("text", ["Hello.", " It begins with ", "tail\n", "{{ 7 }}", "Hi"])
def test_a_last_turn_is_continued_as_transformers_does(name: str, text: str) -> None:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(backend_json("byte_level")))
    chat = [ChatMessage("user", "Hi"), ChatMessage("assistant", text)]
    expected = wrapped.apply_chat_template(
        [{"role": each.role, "content": each.content} for each in chat],
        chat_template=CONTINUED[name],
        tokenize=False,
        continue_final_message=True,
    )
    assert ChatTemplate(CONTINUED[name], {}).render(chat, ChatForm(is_continued=True)) == expected
    assert ChatTemplate("", {}).render(chat, ChatForm(is_continued=True, template=CONTINUED[name])) == expected


def test_the_begin_of_the_answer_is_the_end_of_the_prompt() -> None:
    template, chat = (
        ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {}),
        [ChatMessage("user", "a")],
    )
    assert template.render(chat, ChatForm(answer="language English")) == "[a]language English"


PARTS = "{% for part in m.content %}[{{ part.type }}: {{ part.text }}]{% endfor %}"
SHOWN = {  # template of a message, and two rendered messages: a text, and two parts
    "text": ("{{ m.content }}", "hi|a\nb|"),
    "parts": (PARTS, "[text: hi]|[text: a][text: b]|"),
    "either": ("{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}", "hi|a\nb|"),
    "upper case": ("{{ m.content | upper }}", "HI|A\nB|"),
    "error for text": (
        "{% if m.content is string %}{{ raise_exception('') }}{% endif %}" + PARTS,
        "[text: hi]|[text: a][text: b]|",
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_template_that_shows_no_plain_texts_gets_lists_of_parts(name: str) -> None:
    shown, expected = SHOWN[name]
    source = "{% for m in messages %}" + shown + "|{% endfor %}"
    chat = [ChatMessage("user", "hi"), ChatMessage("user", [TextPart("a"), TextPart("b")])]
    assert ChatTemplate(source, {}).render(chat) == expected
    assert ChatTemplate("", {}).render(chat, ChatForm(template=source)) == expected


def test_the_last_part_of_a_turn_is_continued() -> None:
    chat = [ChatMessage("assistant", [TextPart("a"), TextPart("b")])]
    for content, expected in (("{{ m.content }}", "a\nb"), (PARTS, "[text: a][text: b")):
        template = ChatTemplate("{% for m in messages %}" + content + "</s>{% endfor %}", {})
        assert template.render(chat, ChatForm(is_continued=True)) == expected


def test_a_turn_that_the_template_changes_cannot_be_continued() -> None:
    chat, asks = [ChatMessage("user", "x")], ChatForm(is_continued=True, variables={"add_generation_prompt": True})
    with pytest.raises(RequestError, match="contradict each other"):
        ChatTemplate("{{ messages[0].content }}", {}).render(chat, asks)
    with pytest.raises(RequestError, match="does not show the last message as it is"):
        ChatTemplate("{{ messages[0].content | upper }}", {}).render(chat, ChatForm(is_continued=True))


def test_a_template_gets_all_fields_of_a_turn_and_the_forms_variables() -> None:
    source = "{{ messages[0].tool_calls[0].name }} {{ tools[0] }} {{ bos_token }} {{ add_generation_prompt }}"
    chat = [ChatMessage("assistant", "", {"tool_calls": [{"name": "f"}]})]
    form = ChatForm(variables={"tools": ["t"], "add_generation_prompt": False})
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(chat, form) == "f t <s> False"
    with pytest.raises(RequestError, match="chat_template is not a Jinja template"):
        ChatTemplate(source, {}).render(chat, ChatForm(template="{% for %}"))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[99].content.strip() }}", "no element 99"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_an_exception_in_a_template_is_a_request_error(source: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        ChatTemplate(source, {}).render(CHAT)


def test_an_empty_chat_is_refused() -> None:
    with pytest.raises(RequestError, match="no messages"):
        ChatTemplate("x", {}).render([])


def test_the_flag_wins_over_the_template_file_and_the_file_over_the_config(tmp_path: Path) -> None:
    def rendered(template: object, file: str | None = None) -> str | None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        loaded = ChatTemplate.load(tmp_path, new_tokenizer("byte_level"), EngineConfig(chat_template=file))
        return None if loaded is None else loaded.render(CHAT)

    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "config"}]
    assert ChatTemplate.load(tmp_path, None) is None and rendered(None) is None
    assert rendered("plain") == "plain" and rendered(named) == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered(named) == "file"
    (tmp_path / "mine.jinja").write_text("flag {{ bos_token }}", encoding="utf-8-sig")  # with a byte order mark
    assert rendered(named, str(tmp_path / "mine.jinja")) == "flag <s>"
    assert rendered(named, "{{ bos_token }} {{ 'inline' }}") == "<s> inline"


def test_a_chat_overrides_the_default_variables(tmp_path: Path) -> None:
    config = EngineConfig(chat_template="{{ think }}", default_chat_template_kwargs={"think": False})
    template = ChatTemplate.load(tmp_path, None, config)
    assert template is not None
    assert template.render(CHAT) == "False" and template.render(CHAT, ChatForm(variables={"think": 1})) == "1"


def test_the_error_of_a_broken_or_missing_template_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for m in %}")
    message = r"/chat_template\.jinja is not a Jinja template: line 1: .*: mend it, or start with --chat-template FILE$"
    with pytest.raises(ConfigError, match=message) as caught:
        ChatTemplate.load(tmp_path, None)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"missing\.jinja cannot be read"):
        ChatTemplate.load(tmp_path, None, EngineConfig(chat_template=str(tmp_path / "missing.jinja")))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n\n{% for m in %}", "line 3: Expected an expression"),
        ("{{ x | none_such }}", "line 1: No filter named 'none_such'"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "maximum recursion depth"),
    ],
)
def test_a_broken_template_is_an_error_of_its_giver(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^the file is not a Jinja template: {words}.*: mend it, or start with"):
        ChatTemplate(source, {}, "the file")
    with pytest.raises(RequestError, match=f"^chat_template is not a Jinja template: {words}"):
        ChatTemplate("", {}).render(CHAT, ChatForm(template=source))


IMAGE_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
TEXT_ALONE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PARTS_ALONE = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}"
    "{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
IMAGES_OF_USERS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' and m.content is not string %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% else %}{{ '' + m.content }}{% endif %}{% endfor %}"
)
SYSTEM = ChatMessage("system", [TextPart("s"), MediaPart(0)])
TURNS = [ChatMessage("user", [TextPart("a"), MediaPart(1), TextPart("b"), MediaPart(2)]), ChatMessage("user", "c")]


# Of Qwen2-Audio's and Qwen3-ASR's published files, as far as they show clips.
CLIPS_BY_URL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if 'audio' in c or 'audio_url' in c %}<clip>{% elif 'text' in c %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
CLIPS_BY_TYPE = CLIPS_BY_URL.replace("'audio' in c or 'audio_url' in c", "c.type == 'audio'")
IMAGE, AUDIO = MediaMarker("image", "<image>", "<image>"), MediaMarker("audio", "<clip>", "(<clip>)")


@pytest.mark.parametrize(
    ("marker", "source", "expected"),
    [
        (IMAGE, IMAGE_PARTS, "<system>s<image><user>a<image>b<image><user>c"),
        (IMAGE, PARTS_ALONE, "<system>s<image><user>a<image>b<image><user>c"),
        (IMAGE, TEXT_ALONE, "<system><image>\ns<user><image>\n<image>\na\nb<user>c"),
        (IMAGE, IMAGES_OF_USERS, "<system><image>\ns<user>a<image>b<image><user>c"),
        (AUDIO, CLIPS_BY_URL, "<system>s<clip><user>a<clip>b<clip><user>c"),
        (AUDIO, CLIPS_BY_TYPE, "<system>s<clip><user>a<clip>b<clip><user>c"),
        (AUDIO, TEXT_ALONE, "<system>(<clip>)\ns<user>(<clip>)\n(<clip>)\na\nb<user>c"),
        (AUDIO, IMAGE_PARTS, "<system>(<clip>)\ns<user>(<clip>)\n(<clip>)\na\nb<user>c"),
    ],
)
def test_media_stand_where_the_template_shows_them_else_framed_before_the_text(
    marker: MediaMarker, source: str, expected: str
) -> None:
    assert ChatTemplate(source, {}, marker=marker).render([SYSTEM, *TURNS]) == expected


def test_a_chat_that_ends_with_an_image_can_be_continued() -> None:
    template = ChatTemplate(IMAGE_PARTS, {}, marker=IMAGE)
    form = ChatForm(is_continued=True)
    assert template.render([ChatMessage("user", [TextPart("a"), MediaPart(0)])], form) == "<user>a<image>"


def test_the_template_of_a_processor_is_found(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": IMAGE_PARTS}))
    template = ChatTemplate.load(tmp_path, None, marker=IMAGE)
    assert template is not None and template.render(TURNS) == "<user>a<image>b<image><user>c"


CLIP = "[BEGIN_AUDIO][AUDIO]"


@pytest.mark.parametrize(
    ("turns", "expected"),  # as mistral-common 1.13 writes them, with one [AUDIO] a clip
    [
        (
            [("user", [MediaPart(0), MediaPart(1), TextPart("What is said?")])],
            f"<s>[INST]{CLIP}{CLIP}What is said?[/INST]",
        ),
        (
            [("user", [TextPart("Listen:"), MediaPart(0)]), ("assistant", "Hi."), ("user", "And?")],
            f"<s>[INST]Listen:{CLIP}[/INST]Hi.</s>[INST]And?[/INST]",
        ),
        ([("system", "Be brief"), ("user", "And?")], "<s>[SYSTEM_PROMPT]Be brief[/SYSTEM_PROMPT][INST]And?[/INST]"),
        ([("user", "a"), ("assistant", "b "), ("user", " c")], "<s>[INST]a[/INST]b</s>[INST] c[/INST]"),
        ([("user", "a"), ("user", "b")], "<s>[INST]a\n\nb[/INST]"),
    ],
)
def test_voxtral_has_the_template_of_its_publisher(tmp_path: Path, turns: Any, expected: str) -> None:
    template = ChatTemplate.of(voxtral_spec(tmp_path), None, MediaMarker("audio", "[AUDIO]", "[AUDIO]"))
    assert template is not None
    assert template.render([ChatMessage(role, content) for role, content in turns]) == expected
    with pytest.raises(RequestError, match="turns are those of system, user and assistant, not of critic"):
        template.render([ChatMessage("critic", "a")])


def test_a_template_of_the_files_or_an_option_goes_before_that_of_the_architecture(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("of the files")
    for config, expected in ((EngineConfig(), "of the files"), (EngineConfig(chat_template="{# #}given"), "given")):
        template = ChatTemplate.of(voxtral_spec(tmp_path, config), None)
        assert template is not None and template.render(TURNS) == expected
    assert ChatTemplate.of(new_spec(tokenizer_folder=str(tmp_path / "none")), None) is None


def voxtral_spec(folder: Path, config: EngineConfig = DEFAULTS) -> EngineSpec:
    spec = new_spec(config=config, tokenizer_folder=str(folder))
    model = msgspec.structs.replace(spec.model, architecture="VoxtralForConditionalGeneration")
    return msgspec.structs.replace(spec, model=model)


def test_a_damaged_or_endless_file_with_a_template_is_an_error_of_one_line(tmp_path: Path) -> None:
    for given, words in (
        ("/dev/zero", "/dev/zero has more than 4194304 characters"),
        ("a\0b", "cannot be read"),
        ("/no/file", "cannot be read"),
        ("{% for m in %}", "--chat-template is not a Jinja"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_template(EngineConfig(chat_template=given))
    (tmp_path / "chat_template.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"chat_template\.json cannot be read"):
        ChatTemplate.load(tmp_path, None)

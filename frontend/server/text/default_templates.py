"""Chat templates of models that are published without one, by architecture.

Mistral defines the form of its chats in code instead of a template. This one is Voxtral's, version 7: user turns in
[INST], answers that end with </s>, and a marker for each clip. Tools are not supported.
"""

from __future__ import annotations

_VOXTRAL = """\
{%- macro show(content) -%}
{%- if content is string %}{{ content }}{% else -%}
{%- for part in content %}{{ part['text'] if part['type'] == 'text' else '[BEGIN_AUDIO][AUDIO]' }}{% endfor -%}
{%- endif -%}
{%- endmacro -%}
<s>
{%- for message in messages %}
{%- set role = message['role'] %}
{%- if role == 'system' %}{{ '[SYSTEM_PROMPT]' + show(message['content']) + '[/SYSTEM_PROMPT]' }}
{%- elif role == 'user' %}
{{- '\n\n' if not loop.first and loop.previtem['role'] == 'user' else '[INST]' }}
{{- show(message['content']) }}
{{- '' if not loop.last and loop.nextitem['role'] == 'user' else '[/INST]' }}
{%- elif role == 'assistant' %}{{ show(message['content']).rstrip() + '</s>' }}
{%- else %}{{ raise_exception('turns are those of system, user and assistant, not of ' + role) }}
{%- endif %}
{%- endfor %}"""

DEFAULT_TEMPLATES = {"VoxtralForConditionalGeneration": _VOXTRAL}

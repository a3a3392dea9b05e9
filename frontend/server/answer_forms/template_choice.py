"""The choice of a form for a model's chat template, or for one of a request, and the digest of all that decides it."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ....ipc.codec import JsonObject
from ....ipc.messages.client import ChatForm, ChatMessage
from ....ipc.spec.config.engine_config import EngineConfig
from ...forms.answer_forms.form import AnswerForm
from ..text.chat_template import ChatTemplate
from .choose import Choice, choose
from .probe import VERSION
from .renderings import MAX_RENDER_S
from .response_template import form_of_checkpoint

MAX_CONFIG_BYTES = 64 << 20  # of tokenizer_config.json


class TemplateChoice:
    """Maker of the choices for one model. `template` is its chat template, by which it also renders others."""

    def __init__(self, template: ChatTemplate, config: EngineConfig, tokenizer_folder: Path | None) -> None:
        """`tokenizer_folder`: where tokenizer_config.json may give a response template; None: nowhere."""
        self._template = template
        self._tool_parser: str = config.tool_call_parser
        self._reasoning_parser: str = config.reasoning_parser
        self._config_file: Path | None = None
        if tokenizer_folder is not None:
            self._config_file = tokenizer_folder / "tokenizer_config.json"

    @property
    def of_model(self) -> str:
        """The text of the model's template, for chats with tools."""
        return self._template.tool_source

    def digest(self, source: str, *, is_of_model: bool) -> str:
        """Return the digest, in hex, of all that decides the choice. `source`: a request's template or the model's."""
        parts = (
            VERSION,
            source,
            self._template.names,
            self._tool_parser,
            self._reasoning_parser,
            self._given(is_of_model=is_of_model),
        )
        return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()

    def choose(self, source: str, *, is_of_model: bool, has_timer: bool = False) -> Choice:
        """Return the choice for a template. `has_timer`: SIGVTALRM ends this process if a rendering takes more CPU time
        than twice MAX_RENDER_S, after which the learning would end."""

        def render(messages: Sequence[ChatMessage], variables: JsonObject) -> str:
            return self._template.render(messages, ChatForm(template=source, variables=variables))

        def render_timed(messages: Sequence[ChatMessage], variables: JsonObject) -> str:
            signal.setitimer(signal.ITIMER_VIRTUAL, 2 * MAX_RENDER_S)
            try:
                return render(messages, variables)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)

        return choose(
            (render, render_timed)[has_timer],
            source,
            tool_parser=self._tool_parser,
            reasoning_parser=self._reasoning_parser,
            given=self._given(is_of_model=is_of_model),
            keeps_text=lambda: self._template.keeps_text(source),
        )

    def _given(self, *, is_of_model: bool) -> AnswerForm | None:
        """Return the form that comes with the checkpoint; None for a template of a request."""
        if not is_of_model or self._config_file is None:
            return None
        try:
            with self._config_file.open("rb") as file:
                config = msgspec.json.decode(file.read(MAX_CONFIG_BYTES), type=dict)
        except (OSError, msgspec.DecodeError):
            return None
        return form_of_checkpoint(config)

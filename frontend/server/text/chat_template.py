"""ChatTemplate: renders a list of chat turns to the prompt text that the checkpoint was trained on.

The template is Jinja in Hugging Face's dialect and comes with the checkpoint or a request. It is untrusted and runs in
a sandbox; any exception in it becomes a RequestError. Knows nothing of tokens.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from weakref import WeakKeyDictionary

from ....ipc.codec import JsonObject
from ....ipc.errors import ConfigError, RequestError
from ....ipc.messages.client import ChatForm, ChatMessage, ContentPart, MediaPart, TextPart
from ....ipc.messages.media import MediaKind
from ....ipc.spec.config.engine_config import EngineConfig
from ....ipc.spec.config.engine_spec import EngineSpec
from .calls import has_calls, with_ids
from .default_templates import DEFAULT_TEMPLATES
from .generic_tools import calls_as_text, with_tools
from .media_marker import MediaMarker
from .sandbox import CompiledTemplate, clock_at, compiled
from .stored_templates import DEFAULT, TOOL_USE, chosen, read_file, stored_templates
from .system_turns import other_forms
from .tokenizer import Tokenizer
from .turn_shape import AS_GIVEN, TurnShape, find_turn_shape

logger = logging.getLogger("tokenloom.frontend")

MODEL_FORM = ChatForm()
NO_MEDIA = MediaMarker("image", "", "")  # for a model that takes only text
_PROBE = "\ue000one text\ue000"  # occurs in no real text
DEFAULTS = EngineConfig()
_PARTS: dict[MediaKind, JsonObject] = {  # parts for media; Qwen2-Audio's templates look for the URL
    "image": {"type": "image"},
    "audio": {"type": "audio", "audio_url": ""},
}
_END_MARK = (
    "\ue000end of the last turn\ue000 "  # occurs in no real text; the space shows whether the template strips texts
)


class ChatTemplate:
    """Compiled template with the special tokens by name (bos_token, …) and the default variables."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        origin: str = "the chat template",
        defaults: JsonObject | None = None,
        marker: MediaMarker = NO_MEDIA,
        for_tools: str | None = None,
    ) -> None:
        """Compile `source`; if it is not a template, raise ConfigError, which names `origin`. `defaults`: variables
        that a chat may override; `marker`: the text that stands for a medium; `for_tools`: the template of chats with
        tools, if it is another."""
        self.source, self.marker = source, marker
        self.tool_source = source if for_tools is None else for_tools
        self.names = special_tokens | (defaults or {})
        self._takes_parts = WeakKeyDictionary[CompiledTemplate, bool]()
        self._takes_media = WeakKeyDictionary[CompiledTemplate, bool]()
        self._takes_system = WeakKeyDictionary[CompiledTemplate, bool]()
        self._turn_shapes = WeakKeyDictionary[CompiledTemplate, TurnShape]()
        try:
            self._template, self._tool_template = compiled(source), compiled(self.tool_source)
        except ValueError as error:
            mend = "mend it, or start with --chat-template FILE"
            raise ConfigError(f"{origin} is not a Jinja template: {error}: {mend}") from None

    @classmethod
    def of(cls, spec: EngineSpec, tokenizer: Tokenizer | None, marker: MediaMarker = NO_MEDIA) -> ChatTemplate | None:
        """Load the template of an engine's model; None if neither its files nor DEFAULT_TEMPLATES have one."""
        found = cls.load(Path(spec.tokenizer_folder), tokenizer, spec.config, marker)
        default = DEFAULT_TEMPLATES.get(spec.model.architecture)
        if found is not None or default is None:
            return found
        logger.info("%s has no chat template, the one of %s is taken", spec.served_model_name, spec.model.architecture)
        return cls(default, {}, defaults=spec.config.default_chat_template_kwargs, marker=marker)

    @classmethod
    def load(
        cls, folder: Path, tokenizer: Tokenizer | None, config: EngineConfig = DEFAULTS, marker: MediaMarker = NO_MEDIA
    ) -> ChatTemplate | None:
        """Load the template of `config`, else the one that is named there among those in `folder`, else the default;
        None if there is none."""
        given, defaults = config.chat_template, config.default_chat_template_kwargs
        special_tokens = {} if tokenizer is None else tokenizer.special_tokens
        if given is not None:
            if config.chat_template_name is not None:
                raise ConfigError("--chat-template and --chat-template-name exclude each other: give one")
            source, origin = read_template(given)
            return cls(source, special_tokens, origin, defaults, marker)
        found = chosen(stored_templates(folder), config.chat_template_name, folder)
        if DEFAULT not in found:
            return None
        file = folder / "chat_template.jinja"
        origin = f"chat_template in {folder}" if config.chat_template_name or not file.is_file() else str(file)
        return cls(found[DEFAULT], special_tokens, origin, defaults, marker, found.get(TOOL_USE))

    def render(self, messages: Sequence[ChatMessage], form: ChatForm = MODEL_FORM, now: float = 0.0) -> str:
        """Return the prompt up to the start of the answer, followed by `form.answer`. If `form.is_continued`, it ends
        with the text of the last message instead. If the template refuses the turns, or leaves out a system message
        amid them, it gets them in another form (system_turns.py). `now`: unix seconds for `strftime_now`; 0: the
        present.

        RequestError if there are no messages, the form contradicts itself, or the template fails."""
        if not messages:
            raise RequestError("the chat has no messages: give at least one")
        names = self._names(form)
        if now:
            names = {"strftime_now": clock_at(now)} | names
        if form.template is not None:
            template, source = _compile(form.template), form.template
        elif names["tools"]:
            template, source = self._tool_template, self.tool_source
        else:
            template, source = self._template, self.source
        messages = calls_as_text(with_ids(messages), source)
        messages = with_tools(messages, names["tools"], source, lambda: self._shows_system(template))
        if form.is_continued:
            if names["add_generation_prompt"]:
                raise RequestError("continue_final_message and add_generation_prompt contradict each other: give one")
            messages = [*messages[:-1], _with_end_mark(messages[-1])]
        text = self._first_whole(template, names, messages)
        return (_until_mark(text) if form.is_continued else text) + form.answer

    def keeps_text(self, source: str) -> bool:
        """Return whether a template shows text beside calls; if not, it gets the text as a turn of its own. `source`:
        as `ChatForm.template`."""
        template = _compile(source)
        return self._turn_shape(template, self._shows_parts_alone(template)).keeps_text

    def _first_whole(self, template: CompiledTemplate, names: JsonObject, messages: Sequence[ChatMessage]) -> str:
        """Return the first form of the chat that the template renders with each system message after the first message;
        if there is none, the first form that it renders at all. RequestError if it refuses all."""
        shown: list[str] = []
        refusals: list[RequestError] = []
        for turns in chain([messages], other_forms(messages)):
            try:
                text = self._shown(template, names, turns)
            except RequestError as error:
                refusals.append(error)
                continue
            if all(each.text.strip() in text for each in turns[1:] if each.role == "system"):
                return text
            shown.append(text)
        if not shown:
            raise refusals[0]
        return shown[0]

    def _shown(self, template: CompiledTemplate, names: JsonObject, messages: Sequence[ChatMessage]) -> str:
        """Return the rendered messages. RequestError if the template fails."""
        as_parts, num_media = self._shows_parts_alone(template), sum(map(_num_media, messages))
        shape = self._turn_shape(template, as_parts) if any(map(has_calls, messages)) else AS_GIVEN
        text, failure = "", None
        for turns in self._forms(template, messages) if num_media else [messages]:
            try:
                text = self._rendered(template, names, turns, as_parts=as_parts, shape=shape)
                failure = None
            except RecursionError:
                raise RequestError("the chat template recurses without end") from None
            except Exception as error:  # a template may fail in any way that Python can
                failure = error
            if failure is None and text.count(self.marker.text) >= num_media:
                break
        if failure is not None:
            raise RequestError(f"the chat template refuses these messages: {failure}")
        return text

    def _forms(self, template: CompiledTemplate, messages: Sequence[ChatMessage]) -> Iterator[Sequence[ChatMessage]]:
        """Yield the messages in the forms to try. The first have media as parts where the template may show them (some
        templates show only users' media); the last has them as markers in the text."""
        if self._shows_media(template):
            yield messages
            yield [each if each.role == "user" else self._with_markers(each) for each in messages]
        yield [self._with_markers(each) for each in messages]

    def _with_markers(self, message: ChatMessage) -> ChatMessage:
        """Return the message with a marker for each medium before its text, as vLLM does."""
        lines = [self.marker.framed] * _num_media(message)
        return ChatMessage(message.role, "\n".join([*lines, message.text]), message.more) if lines else message

    def _names(self, form: ChatForm) -> JsonObject:
        names: JsonObject = {"tools": None, "documents": None, "add_generation_prompt": not form.is_continued}
        return names | self.names | form.variables

    def _shows_parts_alone(self, template: CompiledTemplate) -> bool:
        """Return whether a template shows lists of parts, {"type": "text", "text": …}, but not plain text."""
        if template not in self._takes_parts:
            shows_text = self._shows_probe(template, as_parts=False)
            self._takes_parts[template] = not shows_text and self._shows_probe(template, as_parts=True)
        return self._takes_parts[template]

    def _shows_media(self, template: CompiledTemplate) -> bool:
        """Return whether a template shows media parts in users' messages."""
        if template not in self._takes_media:
            names, shown = self._names(MODEL_FORM), list[str]()
            forms: list[list[ContentPart]] = [[TextPart(_PROBE)], [MediaPart(0), TextPart(_PROBE)]]
            for parts in forms:
                with contextlib.suppress(Exception):
                    shown.append(self._rendered(template, names, [ChatMessage("user", parts)], as_parts=True))
            is_shown = len(shown) == 2 and all(_PROBE in each for each in shown) and len(shown[0]) < len(shown[1])
            self._takes_media[template] = is_shown
        return self._takes_media[template]

    def _shows_system(self, template: CompiledTemplate) -> bool:
        """Return whether a template shows system messages; some refuse them."""
        if template not in self._takes_system:
            chat = [ChatMessage("system", _PROBE), ChatMessage("user", "x")]
            as_parts, text = self._shows_parts_alone(template), ""
            with contextlib.suppress(Exception):
                text = self._rendered(template, self._names(MODEL_FORM), chat, as_parts=as_parts)
            self._takes_system[template] = _PROBE in text
        return self._takes_system[template]

    def _turn_shape(self, template: CompiledTemplate, as_parts: bool) -> TurnShape:
        """Return the form in which a template expects earlier answers with tool calls."""
        if template not in self._turn_shapes:
            names = self._names(MODEL_FORM)

            def render(messages: list[ChatMessage], variables: JsonObject, shape: TurnShape) -> str:
                return self._rendered(template, names | variables, messages, as_parts=as_parts, shape=shape)

            self._turn_shapes[template] = find_turn_shape(render)
        return self._turn_shapes[template]

    def _shows_probe(self, template: CompiledTemplate, *, as_parts: bool) -> bool:
        probe = [ChatMessage("user", _PROBE)]
        with contextlib.suppress(Exception):
            return _PROBE in self._rendered(template, self._names(MODEL_FORM), probe, as_parts=as_parts)
        return False

    def _rendered(
        self,
        template: CompiledTemplate,
        names: JsonObject,
        messages: Sequence[ChatMessage],
        *,
        as_parts: bool,
        shape: TurnShape = AS_GIVEN,
    ) -> str:
        """Return the rendered messages. The content of each is one text, or a list of parts if `as_parts` or if it has
        media."""
        turns: list[JsonObject] = []
        for message in messages:
            parts: list[JsonObject] = [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else _PARTS[self.marker.kind]
                for part in message.parts
            ]
            turns += shape.turns(message, parts if as_parts or _num_media(message) else message.text)
        return template.render(names | {"messages": turns})


def check_template(config: EngineConfig) -> None:
    """Raise ConfigError if --chat-template is neither a template nor a file with one."""
    if config.chat_template is not None:
        source, origin = read_template(config.chat_template)
        ChatTemplate(source, {}, origin)


def read_template(given: str) -> tuple[str, str]:
    """Return a template and its origin: the text of file `given`, or `given` itself if it is not a file and has braces
    or newlines. ConfigError if the file cannot be read or is too long."""
    if not os.path.isfile(given) and any(mark in given for mark in "{}\n"):
        return given, "--chat-template"
    return read_file(given), given


def _compile(source: str) -> CompiledTemplate:
    try:
        return compiled(source)
    except ValueError as error:
        raise RequestError(f"chat_template is not a Jinja template: {error}") from None


def _num_media(message: ChatMessage) -> int:
    return sum(isinstance(part, MediaPart) for part in message.parts)


def _with_end_mark(message: ChatMessage) -> ChatMessage:
    *parts, last = message.parts or [TextPart("")]
    ended = [TextPart(last.text + _END_MARK)] if isinstance(last, TextPart) else [last, TextPart(_END_MARK)]
    return ChatMessage(message.role, [*parts, *ended], message.more)


def _until_mark(text: str) -> str:
    """Return `text` up to the end of the last turn's content, without its trailing white space if the template strips
    contents. RequestError if the template does not show the last turn's content."""
    before, mark, after = text.rpartition(_END_MARK.rstrip())
    if not mark:
        raise RequestError(
            "the chat template does not show the last message as it is, so that it cannot be continued: leave "
            "continue_final_message out"
        )
    return before if after.startswith(" ") else before.rstrip()

"""CompiledTemplate: a Jinja template in Hugging Face's dialect, which runs in a sandbox.

The sandbox is transformers' immutable one: a template changes nothing. Some templates (Kimi K2's) collect texts in a
list of theirs, which that sandbox refuses. They run in a second sandbox, where a template may change the lists that it
has made, up to MAX_LIST items each, and still nothing that it was given. Jinja's loops end then as before: a loop over
a list visits MAX_LIST items at most, as one over `range` does. Knows nothing of chats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment

from ....ipc.codec import JsonObject

MAX_LIST = MAX_RANGE  # most items of a list that a template changes
_CHANGES = frozenset(("append", "clear", "extend", "insert", "pop", "remove", "reverse"))  # methods of lists


class CompiledTemplate:
    """A template and the sandbox that it needs: the immutable one until that refuses a change of a list, from then on
    the second."""

    def __init__(self, source: str) -> None:
        """Compile `source`. ValueError if it is not a valid template; the error names the line if it is known."""
        self._source = source
        self._changes_lists = False
        try:
            self._immutable = _IMMUTABLE.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from None
        except Exception as error:  # by Jinja, or by Python, which compiles Jinja's output
            raise ValueError(str(error) or type(error).__name__) from None

    @cached_property
    def _changing(self) -> jinja2.Template:
        return _CHANGING.from_string(self._source)

    def render(self, names: JsonObject) -> str:
        """Return the rendered text. Exceptions of the template pass through. `names` stay as they are."""
        if not self._changes_lists:
            try:
                return self._immutable.render(names)
            except _ListChangeError:
                self._changes_lists = True
        return self._changing.render(_as_given(names))


@lru_cache(maxsize=8)
def compiled(source: str) -> CompiledTemplate:
    """Return a compiled template. ValueError if it is not a valid one."""
    return CompiledTemplate(source)


class _ListChangeError(SecurityError):
    """The immutable sandbox refuses a change of a list."""


class _GivenList(list[object]):
    """A list that a template was given. Slices and sums of such lists are the template's own."""


def _as_given(value: object) -> Any:
    """Return a copy of `value` that holds a _GivenList for each list in it."""
    if isinstance(value, dict):
        return {name: _as_given(each) for name, each in value.items()}
    if isinstance(value, list):
        return _GivenList(map(_as_given, value))
    return value


class _ImmutableSandbox(ImmutableSandboxedEnvironment):
    """Sandbox that tells the change of a list from other refusals."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        if isinstance(obj, list) and attribute in _CHANGES:
            message = f"access to attribute {attribute!r} of a list is unsafe"
            return self.undefined(message, obj=obj, name=attribute, exc=_ListChangeError)
        return super().unsafe_undefined(obj, attribute)


class _ChangingSandbox(ImmutableSandboxedEnvironment):
    """Sandbox that allows a template to change its own lists."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is list and attribute in _CHANGES:
            return _change(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is list and isinstance(argument, str) and argument in _CHANGES:
            return _change(obj, argument)
        return super().getitem(obj, argument)


def _change(items: list[object], method: str) -> Callable[..., object]:
    """Return the method of `items` of this name; it raises SecurityError if the list has more than MAX_LIST items
    then."""
    made: Callable[..., object] = getattr(items, method)

    def change(*arguments: Any) -> object:
        result = made(*arguments)
        if len(items) > MAX_LIST:
            raise SecurityError(f"a list of the template has more than {MAX_LIST} items")
        return result

    def extend(more: Iterable[object]) -> object:
        return change(list(islice(more, MAX_LIST + 1 - len(items))))

    if method == "extend":
        return extend
    return change


class _Generation(jinja2.ext.Extension):
    """Jinja extension for `{% generation %}…{% endgeneration %}`, which marks the text to train on; only the body is
    rendered."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def clock_at(unix_s: float) -> Callable[[str], str]:
    """Return `strftime_now` for templates that are to see one time, however late they are rendered."""
    now = datetime.fromtimestamp(unix_s)
    return lambda form: now.strftime(form)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _listed(value: object) -> list[object]:
    """Return what a filter yields as a list; TypeError for other values, which JSON does not have."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _with_dialect(environment: ImmutableSandboxedEnvironment) -> ImmutableSandboxedEnvironment:
    """Return the environment with the names of Hugging Face's dialect."""
    names = {"raise_exception": _raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    environment.globals.update(names)
    # Jinja's own escapes HTML; what map() and its like give is a list
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False, default=_listed)
    return environment


_OPTIONS: dict[str, Any] = {
    "trim_blocks": True,
    "lstrip_blocks": True,
    "extensions": [_Generation, jinja2.ext.loopcontrols],
}
_IMMUTABLE = _with_dialect(_ImmutableSandbox(**_OPTIONS))
_CHANGING = _with_dialect(_ChangingSandbox(**_OPTIONS))

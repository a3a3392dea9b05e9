"""PublicStruct: metaclass of the parameter structs that users construct, with errors that say what to write.

msgspec's own errors name neither the class nor similar fields. Decoding and `msgspec.structs.replace` do not use it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

CLOSE = 0.7  # least difflib ratio of a suggested name
MAX_SUGGESTIONS = 3
LEAST_START = 3  # characters of a name that others may begin with
MAX_LISTED = 12  # fields that are listed where no name is similar


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return ": did you mean A or B?" with the names that are similar to `name` or begin with it; "" if there are
    none."""
    known = list(names)
    close = difflib.get_close_matches(name, known, MAX_SUGGESTIONS, CLOSE)
    if not close and len(name) >= LEAST_START:
        close = [each for each in known if each.startswith(name)][:MAX_SUGGESTIONS]
    return f": did you mean {' or '.join(close)}?" if close else ""


def _listed(fields: Iterable[str]) -> str:
    names = [each for each in fields if not each.startswith("_")]
    return f"; it has {', '.join(names)}" if len(names) <= MAX_LISTED else ""


class PublicStruct(msgspec.StructMeta):
    """Metaclass of structs that users construct. TypeErrors of the call name the class and similar fields."""

    if not TYPE_CHECKING:  # a type checker that sees it would take each call for Any

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except TypeError as error:
                fields = self.__struct_fields__
                for name in kwargs:
                    if name not in fields:
                        hint = suggestion(name, fields) or _listed(fields)
                        raise TypeError(f"{self.__name__}() has no field {name!r}{hint}") from None
                if args and "positional" in str(error):
                    value = f"{args[0]!r:.40}"
                    raise TypeError(f"{self.__name__}({value}) does not name a field: write NAME={value}") from None
                missing = str(error).removeprefix("Missing required argument ")
                if missing != str(error):
                    raise TypeError(f"{self.__name__}() misses {missing.strip(chr(39))}: give it") from None
                raise

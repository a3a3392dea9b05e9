"""PublicStruct: metaclass of the parameter structs that users construct, with errors that say what to write.

msgspec's own errors name neither the class nor similar fields. Decoding and `msgspec.structs.replace` do not use it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import msgspec

CLOSE = 0.7  # least difflib ratio of a suggested name
MAX_SUGGESTIONS = 3


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return ": did you mean A or B?" with the names that are similar to `name`; "" if none is similar."""
    close = difflib.get_close_matches(name, list(names), MAX_SUGGESTIONS, CLOSE)
    return f": did you mean {' or '.join(close)}?" if close else ""


class PublicStruct(msgspec.StructMeta):
    """Metaclass of structs that users construct. TypeErrors of the call name the class and similar fields."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except TypeError as error:
            fields = self.__struct_fields__
            for name in kwargs:
                if name not in fields:
                    hint = suggestion(name, fields)
                    raise TypeError(f"{self.__name__}() has no field {name!r}{hint}") from None
            if args and "positional" in str(error):
                value = f"{args[0]!r:.40}"
                raise TypeError(f"{self.__name__}({value}) does not name a field: write NAME={value}") from None
            raise

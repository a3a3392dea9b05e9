"""Imported before any Triton kernel: makes Triton's interpreter run them on the CPU."""

from __future__ import annotations

import os
import sys
from typing import Any

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
assert os.environ.get("TRITON_INTERPRET") == "1", "triton was imported before the tests chose its interpreter"

from triton.runtime import interpreter  # noqa: E402 - it reads the variable

_patch_lang_tensor = interpreter._patch_lang_tensor


def _with_numbers_of_one_element(tensor: type, scope: Any) -> None:
    """Triton 3.6 makes a number of an array of one element in a way that numpy 2.4 refuses; 3.7 does not."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _with_numbers_of_one_element

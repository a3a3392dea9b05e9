"""Imported before any Triton kernel: makes Triton's interpreter run them on the CPU."""

from __future__ import annotations

import os
import sys

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
assert os.environ.get("TRITON_INTERPRET") == "1", "triton was imported before the tests chose its interpreter"

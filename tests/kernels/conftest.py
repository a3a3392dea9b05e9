"""Triton's interpreter runs the GPU kernels on the CPU; it must be chosen before triton is imported."""

from __future__ import annotations

import os
import sys

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

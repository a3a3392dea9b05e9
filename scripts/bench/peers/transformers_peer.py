"""transformers' generate as a peer: python transformers_peer.py MODEL --dtype bfloat16 --device cpu --threads 2

Greedy, exactly max_tokens tokens each: one static batch for prompts of equal length; if max_tokens is a list of one
number per prompt, prompts of any length by continuous batching, for at most limit_s seconds. See peer_protocol.py.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import peer_protocol


def load(options: argparse.Namespace) -> tuple[dict[str, Any], peer_protocol.Answer]:
    begun = time.perf_counter()
    import torch
    import transformers

    if options.threads:
        torch.set_num_threads(options.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    model = model.to(options.device).eval()
    model.generation_config.eos_token_id = None
    facts = {"version": transformers.__version__, "load_s": time.perf_counter() - begun}

    def generate_continuously(prompts: list[list[int]], max_tokens: list[int], limit_s: float) -> dict[str, Any]:
        """Also return whether `limit_s` ended the run; only finished answers count then."""
        config = transformers.GenerationConfig(
            max_new_tokens=max(max_tokens), do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        num_tokens, finished = 0, 0
        with torch.no_grad(), model.continuous_batching_context_manager(config, timeout=5) as manager:
            begun = time.perf_counter()
            for prompt, count in zip(prompts, max_tokens, strict=True):
                manager.add_request(prompt, max_new_tokens=count)
            while finished < len(prompts) and time.perf_counter() - begun < limit_s:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    num_tokens, finished = num_tokens + len(result.generated_tokens), finished + 1
                elif result is None and not manager.is_running():
                    raise RuntimeError(f"its thread ended after {finished} of {len(prompts)} requests")
            seconds = time.perf_counter() - begun
            return {"seconds": seconds, "num_tokens": num_tokens, "is_cut": finished < len(prompts)}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if isinstance(request["max_tokens"], list):
            limit_s = float(request.get("limit_s", "inf"))
            return generate_continuously(request["prompts"], request["max_tokens"], limit_s)
        prompts = torch.tensor(request["prompts"], device=options.device)
        num_out = request["max_tokens"]
        config = transformers.GenerationConfig(
            max_new_tokens=num_out, min_new_tokens=num_out, do_sample=False, pad_token_id=0
        )
        begun = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)
        num_tokens = output[:, prompts.shape[1] :].cpu().numel()  # waits for the device
        return {"seconds": time.perf_counter() - begun, "num_tokens": num_tokens}

    return facts, answer


if __name__ == "__main__":
    raise SystemExit(peer_protocol.serve(__doc__, load, dtype="bfloat16", device="cpu", threads=0))

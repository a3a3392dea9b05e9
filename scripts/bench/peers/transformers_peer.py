"""transformers' generate as a peer: python transformers_peer.py MODEL --dtype bfloat16 --device cpu --threads 2

Greedy, exactly max_tokens tokens each: one static batch for prompts of equal length. See peer_protocol.py.
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

    def answer(request: dict[str, Any]) -> dict[str, Any]:
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

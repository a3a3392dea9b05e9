"""peft's generate as a peer: python peft_peer.py MODEL --dtype bfloat16 --threads 2 --adapters FOLDER,FOLDER

Prompt i uses adapter i modulo their number; greedy, exactly max_tokens tokens each. A request with "is_mixed" runs all
prompts in one batch of mixed adapters, others one batch for each adapter, one after the other. See peer_protocol.py.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import peer_protocol


def load(options: argparse.Namespace) -> tuple[dict[str, Any], peer_protocol.Answer]:
    begun = time.perf_counter()
    import peft
    import torch
    import transformers

    if options.threads:
        torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    base = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device)
    folders = options.adapters.split(",")
    names = [f"a{number}" for number in range(len(folders))]
    model = peft.PeftModel.from_pretrained(base, folders[0], adapter_name=names[0])
    for name, folder in zip(names[1:], folders[1:], strict=True):
        model.load_adapter(folder, adapter_name=name)
    model = model.to(dtype).eval()  # adapters in the model's type, as ours
    model.generation_config.eos_token_id = None
    facts = {"version": peft.__version__, "load_s": time.perf_counter() - begun}

    def generate(prompts: list[list[int]], num_out: int, **more: Any) -> int:
        ids = torch.tensor(prompts, device=options.device)
        config = transformers.GenerationConfig(
            max_new_tokens=num_out, min_new_tokens=num_out, do_sample=False, pad_token_id=0
        )
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **more)
        return int(output[:, ids.shape[1] :].cpu().numel())  # waits for the device

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        prompts, num_out, num_tokens = request["prompts"], request["max_tokens"], 0
        begun = time.perf_counter()
        if request["is_mixed"]:
            num_tokens = generate(prompts, num_out, adapter_names=[names[i % len(names)] for i in range(len(prompts))])
        else:
            for number, name in enumerate(names[: len(prompts)]):
                model.set_adapter(name)
                num_tokens += generate(prompts[number :: len(names)], num_out)
        return {"seconds": time.perf_counter() - begun, "num_tokens": num_tokens}

    return facts, answer


if __name__ == "__main__":
    raise SystemExit(peer_protocol.serve(__doc__, load, dtype="bfloat16", device="cpu", threads=0, adapters=""))

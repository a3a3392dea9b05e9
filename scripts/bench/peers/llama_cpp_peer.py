"""llama.cpp as a peer: python llama_cpp_peer.py MODEL.gguf --threads 2, where llama-cpp-python is installed.

Requests run one after the other, as its Python API runs them. --drafts N: its prompt lookup, at most N tokens at a
time. write_gguf.py makes the file. See peer_protocol.py.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import peer_protocol


def load(options: argparse.Namespace) -> tuple[dict[str, Any], peer_protocol.Answer]:
    begun = time.perf_counter()
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    llm = llama_cpp.Llama(
        options.model,
        n_ctx=options.max_model_len,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=options.drafts) if options.drafts else None,
        verbose=False,
    )
    facts = {"version": llama_cpp.__version__, "load_s": time.perf_counter() - begun}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        num_tokens = 0
        begun = time.perf_counter()
        for ids in request["prompts"]:
            answer_ids = llm.generate(ids, temp=0.0, reset=True)  # goes on after an end token
            num_tokens += sum(1 for _ in itertools.islice(answer_ids, request["max_tokens"]))
        return {"seconds": time.perf_counter() - begun, "num_tokens": num_tokens}

    return facts, answer


if __name__ == "__main__":
    raise SystemExit(peer_protocol.serve(__doc__, load, threads=2, max_model_len=2048, drafts=0))

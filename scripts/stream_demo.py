"""Run the demo of `scripts/demo`: start the engine, stream answers, print speeds, stop."""

from __future__ import annotations

import argparse
import sys
import time

from tokenloom import LLM, SamplingParams

PROMPTS = ["The capital of France is", "The capital of Japan is", "3 + 4 =", "The day after Monday is"]
QUESTION = "What is the capital of Norway?"


def stream(llm: LLM, prompt: str, max_tokens: int) -> None:
    """Print an answer as it arrives, and its times."""
    print(f"\n> {prompt}", end="", flush=True)
    begun = time.perf_counter()
    first = 0.0
    for text in llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens)):
        first = first or time.perf_counter() - begun
        print(text, end="", flush=True)
    elapsed = time.perf_counter() - begun
    print(f"\n  first token after {first * 1000:.1f} ms, {elapsed * 1000:.0f} ms in all")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    begun = time.perf_counter()
    with LLM() as llm:
        print(f"engine ready after {time.perf_counter() - begun:.2f} s: {llm.info().model}")
        for prompt in PROMPTS:
            stream(llm, prompt, arguments.max_tokens)
        answer = llm.chat([{"role": "user", "content": QUESTION}], use_tqdm=False)[0]
        print(f"\n> chat: {QUESTION}\n  {answer.outputs[0].text.strip()}")
        many = [
            f"The capital of {country} is" for country in ("Italy", "Spain", "Kenya", "Peru", "India", "Canada")
        ] * 16
        begun = time.perf_counter()
        outputs = llm.generate(many, SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens), use_tqdm=False)
        elapsed = time.perf_counter() - begun
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        firsts = sorted(output.metrics.first_token_time - output.metrics.arrival_time for output in outputs)
        print(
            f"\n{len(many)} prompts at once: {num_tokens} tokens in {elapsed:.2f} s = {num_tokens / elapsed:.0f} "
            f"tokens/s, time to first token {firsts[len(firsts) // 2] * 1000:.0f} ms (median)"
        )
    print("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())

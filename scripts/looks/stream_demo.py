"""Run the demo of `scripts/demo`: start the engine, stream answers, print speeds, stop; then show images to the demo
vision model, and play a clip to the demo audio model."""

from __future__ import annotations

import argparse
import sys
import time
from random import Random

from tokenloom import LLM, LoRARequest, SamplingParams
from tokenloom.frontend.checkpoint.hub import DEMO_FOLDER
from tokenloom.scripts.train.demo_pictures import draw_picture

PROMPTS = ["The capital of France is", "The capital of Japan is", "3 + 4 =", "The day after Monday is"]
QUESTION = "What is the capital of Norway?"
ADAPTERS = ("pirate", "json")
NUM_PICTURES = 3
CLIP = DEMO_FOLDER / "audio" / "clip.wav"


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


def ask_all(llm: LLM) -> None:
    """Print the answers of the model alone and with each adapter to one question, in one batch."""
    requests = [None, *map(LoRARequest, ADAPTERS)]
    chats = [[{"role": "user", "content": QUESTION}] for _ in requests]
    params = SamplingParams(temperature=0.0, max_tokens=64)
    outputs = llm.chat(chats, params, use_tqdm=False, lora_request=requests)
    print(f"\n> chat: {QUESTION} The model, and its LoRA adapters {' and '.join(ADAPTERS)}, in one batch:")
    for name, output in zip(("", *ADAPTERS), outputs, strict=True):
        print(f"  {name or 'model':7} {output.outputs[0].text.strip()}")


def show_pictures() -> None:
    """Draw pictures, let the vision model describe each, and ask it a question about each."""
    rng = Random()
    pictures = [draw_picture(rng) for _ in range(NUM_PICTURES)]
    begun = time.perf_counter()
    with LLM(DEMO_FOLDER / "vision") as llm:
        print(f"\nvision model ready after {time.perf_counter() - begun:.2f} s")
        asked = [(picture, *rng.choice(picture.questions)) for picture in pictures]
        chats = [
            [{"role": "user", "content": [{"type": "image_pil", "image_pil": picture.image}, text(question)]}]
            for picture, other, _ in asked
            for question in ("Describe the image.", other)
        ]
        outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
        answers = [output.outputs[0].text.strip() for output in outputs]
        for index, (picture, question, right) in enumerate(asked):
            print(f"  drawn: {picture.caption:38} described: {answers[2 * index]}")
            print(f"  {question:25} {right:19} answered:  {answers[2 * index + 1]}")


def play_clip() -> None:
    """Let the audio model transcribe the clip that ships with it."""
    begun = time.perf_counter()
    with LLM(DEMO_FOLDER / "audio") as llm:
        print(f"\naudio model ready after {time.perf_counter() - begun:.2f} s")
        (output,) = llm.transcribe(CLIP, language="en")
        print(f"  {CLIP.name}, {output.duration_s:.1f} s, transcribed: {output.text}")


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    begun = time.perf_counter()
    modules = [f"{name}={DEMO_FOLDER / 'adapters' / name}" for name in ADAPTERS]
    with LLM(enable_lora=True, lora_modules=modules, max_lora_rank=8) as llm:
        print(f"engine ready after {time.perf_counter() - begun:.2f} s: {llm.info().model}")
        for prompt in PROMPTS:
            stream(llm, prompt, arguments.max_tokens)
        ask_all(llm)
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
    show_pictures()
    play_clip()
    print("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Generate texts with an engine of this program's own: python docs/learn/examples/generate.py [MODEL]

MODEL is a folder, a GGUF file or a hub id such as Qwen/Qwen3-0.6B; without one it is the demo model that
ships with tokenloom.
"""

import sys

from tokenloom import LLM, SamplingParams


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    with LLM(model) as llm:
        prompts = ["The capital of France is", "The capital of Japan is"]
        for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False):
            print(output.prompt, "→", output.outputs[0].text)
        question = [{"role": "user", "content": "What is the capital of Norway?"}]
        print(llm.chat(question, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text)
        print(len(llm.embed("Oslo")[0].outputs.embedding), "numbers stand for Oslo")


if __name__ == "__main__":
    main()

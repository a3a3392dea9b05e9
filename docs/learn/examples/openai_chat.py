"""Talk to an engine with OpenAI's client: python docs/learn/examples/openai_chat.py http://localhost:8000/v1 [KEY]"""

import sys

from openai import OpenAI


def main() -> None:
    url, key = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "none"
    with OpenAI(base_url=url, api_key=key) as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is the capital of Peru?"}],
            temperature=0,
            max_tokens=20,
            stream=True,
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()
        vectors = client.embeddings.create(model=model, input=["Lima", "Oslo"]).data
        print(len(vectors), "vectors of", len(vectors[0].embedding), "numbers")


if __name__ == "__main__":
    main()

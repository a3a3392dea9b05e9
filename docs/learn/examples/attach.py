"""Stream from an engine that other programs use too: python docs/learn/examples/attach.py ADDRESS

ADDRESS is the ipc:// or tcp:// address in the line that engine-launch prints when it is ready.
"""

import asyncio
import sys

from tokenloom import AsyncClient, Client, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16)


async def several_at_once(address: str) -> None:
    async def answer(client: AsyncClient, country: str) -> None:
        async for output in client.generate(f"The capital of {country} is", GREEDY):
            text = output.outputs[0].text  # all of it so far; leaving the loop aborts the request
        print(country, "→", text)

    async with AsyncClient(address) as client:
        await asyncio.gather(*(answer(client, country) for country in ("Peru", "Egypt")))


def main() -> None:
    address = sys.argv[1]
    with Client(address) as client:
        for text in client.stream("The capital of France is", GREEDY):
            print(text, end="", flush=True)
        print()
    asyncio.run(several_at_once(address))


if __name__ == "__main__":
    main()

"""Let a model call a function, and answer with its result: python docs/learn/examples/tools.py ADDRESS

ADDRESS is the one that engine-launch prints.
"""

import json
import sys

from tokenloom import Client, SamplingParams

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Cusco", "Lima"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def weather(city: str) -> str:
    return f"17 degrees in {city}"


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=100)
    turns: list[dict[str, object]] = [{"role": "user", "content": "How warm is it in Lima?"}]
    with Client(sys.argv[1]) as client:
        options = {"tools": [WEATHER], "parallel_tool_calls": False, "use_tqdm": False}
        (output,) = client.chat(turns, params, tool_choice="required", **options)
        answer = output.outputs[0]
        turns.append(answer.message)  # as it came
        for call in answer.tool_calls:
            print(call["function"]["name"], call["function"]["arguments"])
            result = weather(**json.loads(call["function"]["arguments"]))
            turns.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        (output,) = client.chat(turns, params, **options)
        print(output.prompt)


if __name__ == "__main__":
    main()

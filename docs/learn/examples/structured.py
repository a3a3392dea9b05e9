"""Get JSON of a pydantic model, a choice and a tool call: python docs/learn/examples/structured.py URL/v1 [KEY]

The engine lets the model write only what the schema allows, so each answer that is not cut can be parsed.
"""

import json
import sys

from openai import OpenAI
from pydantic import BaseModel


class City(BaseModel):
    """The schema of the first answer."""

    name: str
    is_capital: bool


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Lima"]}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
        },
    },
}


def main() -> None:
    url, key = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "none"
    with OpenAI(base_url=url, api_key=key) as client:
        model = client.models.list().data[0].id
        schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": City.model_json_schema()}}
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is the capital of Norway?"}],
            response_format=schema,
            max_tokens=200,
        )
        if answer.choices[0].finish_reason == "stop":
            print(City.model_validate_json(answer.choices[0].message.content))
        choice = client.completions.create(
            model=model,
            prompt="The capital of Norway is",
            temperature=0,
            extra_body={"structured_outputs": {"choice": [" Oslo", " Lima"]}},
        )
        print(choice.choices[0].text)
        called = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Is it cold in Oslo?"}],
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "weather"}},
        )
        print(json.loads(called.choices[0].message.tool_calls[0].function.arguments))


if __name__ == "__main__":
    main()

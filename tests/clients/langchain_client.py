"""LangChain's chat model, unpatched, against the server at argv[1]; prints what it saw as one JSON object."""

import asyncio
import json
import sys

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    """The answer."""

    name: str = Field(pattern="^Lima$")


def weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: rain"


MODEL = {"model": "tokenloom-demo", "base_url": sys.argv[1] + "/v1", "api_key": "none", "max_retries": 0, "timeout": 20}
QUESTION = "What is the capital of Peru?"

chat = ChatOpenAI(temperature=0, **MODEL)
answer = chat.invoke([SystemMessage("Be brief."), HumanMessage("Hello!"), AIMessage("Hello!"), HumanMessage(QUESTION)])
seen = {"answer": answer.content, "finish": answer.response_metadata["finish_reason"]}
seen["usage"] = answer.usage_metadata["output_tokens"]
chunks = list(chat.stream(QUESTION, stream_usage=True))
seen["streamed"] = "".join(chunk.content for chunk in chunks)
seen["streamed_usage"] = sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata)
seen["batch"] = [each.content for each in chat.batch([QUESTION, "What is the capital of Chile?"])]
seen["chain"] = (ChatPromptTemplate.from_template("What is the capital of {land}?") | chat).invoke("Norway").content
seen["awaited"] = asyncio.run(chat.ainvoke(QUESTION)).content
seen["structured"] = chat.with_structured_output(City, method="json_schema").invoke(QUESTION).name
(call,) = chat.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke(QUESTION).tool_calls
seen["call"] = [call["name"], sorted(call["args"])]
seen["responses"] = ChatOpenAI(temperature=0, use_responses_api=True, **MODEL).invoke(QUESTION).text
print(json.dumps(seen))

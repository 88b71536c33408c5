"""langchain-openai: chat, whole, streamed and in batches, tools, and answers that follow a schema."""

# needs: langchain-openai==1.7.3
from __future__ import annotations

import asyncio
import sys
from typing import Literal

import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

URL = sys.argv[1]
MODEL = openai.OpenAI(base_url=f"{URL}/v1", api_key="none").models.list().data[0].id
settings = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0, "seed": 5}
chat = ChatOpenAI(**settings, max_tokens=24, temperature=0.7)
hello = [SystemMessage("Be brief."), HumanMessage("Name three colours.")]

whole = chat.invoke(hello)
assert whole.content
assert whole.usage_metadata["output_tokens"] > 0
assert "".join(str(chunk.content) for chunk in chat.stream(hello)) == whole.content
chunks = None
for chunk in chat.stream(hello, stream_usage=True):
    chunks = chunk if chunks is None else chunks + chunk
assert chunks.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
assert {found.content for found in chat.batch([hello] * 6)} == {whole.content}
assert asyncio.run(chat.ainvoke(hello)).content == whole.content
logged = chat.bind(logprobs=True, top_logprobs=2).invoke(hello)
assert len(logged.response_metadata["logprobs"]["content"]) == whole.usage_metadata["output_tokens"]


class Person(BaseModel, extra="forbid"):
    """A person."""

    name: Literal["Ada", "Grace"]
    born: Literal[1815, 1906]


@tool
def clock(city: Literal["Rome", "Oslo"]) -> str:
    """The time in a city."""
    return city


roomy = ChatOpenAI(**settings, max_tokens=100, temperature=0)
for way in ("json_schema", "function_calling"):
    found = roomy.with_structured_output(Person, method=way).invoke("Describe a person.")
    assert isinstance(found, Person)
called = roomy.bind_tools([clock], tool_choice="clock", strict=True, parallel_tool_calls=False).invoke(
    "What time is it in Rome?"
)
assert [call["name"] for call in called.tool_calls] == ["clock"]
assert called.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")
answered = ChatOpenAI(**settings | {"seed": None}, max_tokens=24, use_responses_api=True).invoke(hello)
assert answered.text
assert OpenAI(**settings, max_tokens=8, temperature=0).invoke("One two")

"""llama-index: chat and completions, whole and streamed, and objects of a schema by tool calls."""

# needs: llama-index-llms-openai-like==0.8.1
from __future__ import annotations

import asyncio
import sys
from typing import Literal

import openai
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL = sys.argv[1]
MODEL = openai.OpenAI(base_url=f"{URL}/v1", api_key="none").models.list().data[0].id
settings = {"model": MODEL, "api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0, "temperature": 0}
chat = OpenAILike(**settings, max_tokens=24, is_chat_model=True, is_function_calling_model=True)
hello = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Name three colours.")]

whole = chat.chat(hello)
assert whole.message.content
assert "".join(part.delta or "" for part in chat.stream_chat(hello)) == whole.message.content
assert asyncio.run(chat.achat(hello)).message.content == whole.message.content

plain = OpenAILike(**settings, max_tokens=12, is_chat_model=False)
text = plain.complete("One two three").text
assert text
assert "".join(part.delta or "" for part in plain.stream_complete("One two three")) == text


class Person(BaseModel, extra="forbid"):
    """A person."""

    name: Literal["Ada", "Grace"]
    born: Literal[1815, 1906]


roomy = OpenAILike(**settings, max_tokens=100, is_chat_model=True, is_function_calling_model=True)
found = roomy.as_structured_llm(Person).complete("Describe a person.")
assert isinstance(found.raw, Person)

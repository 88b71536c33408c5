"""litellm: chat, whole and streamed, completions, tools, Anthropic's messages, and its classes of errors."""

# needs: litellm==1.106.2 mcp==2.3.0
from __future__ import annotations

import json
import sys
import urllib.request

import litellm

URL = sys.argv[1]
with urllib.request.urlopen(f"{URL}/v1/models") as reply:
    MODEL = json.load(reply)["data"][0]["id"]
HELLO = [{"role": "user", "content": "Name three colours."}]
WHERE = {"api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0, "num_retries": 0}
asked = {"model": f"openai/{MODEL}", "messages": HELLO, "max_tokens": 24, "seed": 5, **WHERE}
whole = litellm.completion(**asked)
text = whole.choices[0].message.content
assert text
assert whole.usage.completion_tokens == 24 or whole.choices[0].finish_reason == "stop"
chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
rebuilt = litellm.stream_chunk_builder(chunks, messages=HELLO)
assert rebuilt.choices[0].message.content == text
assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens

clock = {"type": "string", "enum": ["Rome", "Oslo"]}
parameters = {"type": "object", "properties": {"city": clock}, "required": ["city"], "additionalProperties": False}
tool = {"type": "function", "function": {"name": "clock", "parameters": parameters}}
for streams in (False, True):
    found = litellm.completion(**asked | {"max_tokens": 60}, tools=[tool], tool_choice="required", stream=streams)
    if streams:
        found = litellm.stream_chunk_builder(list(found), messages=HELLO)
    (call,) = found.choices[0].message.tool_calls[:1]
    assert call.function.name == "clock"
    assert json.loads(call.function.arguments)["city"] in clock["enum"]

old = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}", prompt="One two", max_tokens=8, temperature=0, **WHERE
)
assert old.choices[0].text

message = litellm.completion(**asked | {"model": f"anthropic/{MODEL}", "api_base": URL, "temperature": 0, "seed": None})
assert message.choices[0].message.content

errors = {"temperature": litellm.BadRequestError, "model": litellm.NotFoundError}
for field, kind in errors.items():
    wrong = {"temperature": -1} if field == "temperature" else {"model": "openai/other"}
    seen = None
    try:
        litellm.completion(**asked | wrong)
    except kind as error:
        seen = error
    assert seen is not None, f"a wrong {field} was answered"
long = None
try:
    litellm.completion(**asked | {"messages": [{"role": "user", "content": "x " * 20_000}]})
except litellm.ContextWindowExceededError as error:
    long = error
assert long is not None, "a prompt that is too long was not understood as one"

"""The openai package: chat, completions, responses, whole and streamed, errors, concurrent requests."""

# needs: openai==3.54.0
from __future__ import annotations

import asyncio
import sys

import openai

URL = sys.argv[1]
HELLO = [{"role": "user", "content": "Name three colours."}]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MODEL = client.models.list().data[0].id


def chat() -> None:
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 24, "seed": 5}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    predicted = client.chat.completions.create(**asked, prediction={"type": "content", "content": text})
    assert predicted.choices[0].message.content == text
    assert predicted.usage.completion_tokens_details.accepted_prediction_tokens > 0
    plain = client.chat.completions.create(**asked, extra_body={"outpace": {"speculation": False}})
    assert plain.choices[0].message.content == text
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        assert stream.current_completion_snapshot.choices[0].message.content == text  # an answer may be cut


def completions() -> None:
    asked = {"model": MODEL, "prompt": ["One two", "Three four"], "max_tokens": 8, "temperature": 0, "n": 2}
    found = client.completions.create(**asked, logprobs=3, echo=True)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.choices[0].text.startswith("One two")
    assert found.choices[0].logprobs.token_logprobs[0] is None
    streamed: dict[int, str] = {}
    for chunk in client.completions.create(**asked, echo=True, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert streamed == {choice.index: choice.text for choice in found.choices}


def responses() -> None:
    asked = {"model": MODEL, "input": "Name three colours.", "max_output_tokens": 24, "temperature": 0}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.output_text == whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    stop = whole.output_text[5:8]  # the helper takes no answer that was cut by its length
    with client.responses.stream(**asked, extra_body={"stop": stop}) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == whole.output_text[: whole.output_text.find(stop)]


def errors() -> None:
    for fields, kind in (
        ({"temperature": -1}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
        ({"messages": [{"role": "user", "content": "x " * 20_000}]}, openai.BadRequestError),
    ):
        found = None
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **fields})
        except kind as error:
            found = error
        assert found is not None, f"{fields} was answered"
        assert found.body["message"]


async def many() -> None:
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 24, "seed": 5}
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as several:
        found = await asyncio.gather(*(several.chat.completions.create(**asked) for _ in range(16)))
    assert len({answer.choices[0].message.content for answer in found}) == 1


chat()
completions()
responses()
errors()
asyncio.run(many())

"""The anthropic package: messages, whole and streamed, counted tokens, errors."""

# needs: anthropic==2.12.0
from __future__ import annotations

import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
MODEL = client.models.list().data[0].id if hasattr(client, "models") else ""
asked = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Name three colours."}],
    "system": "Be brief.",
    "max_tokens": 24,
    "extra_body": {"temperature": 0},
}
whole = client.messages.create(**asked)
assert whole.content[0].text
assert whole.stop_reason in ("end_turn", "max_tokens")
with client.messages.stream(**asked) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == whole.content[0].text == final.content[0].text
assert final.usage.output_tokens == whole.usage.output_tokens
prompts = [usage.input_tokens + (usage.cache_read_input_tokens or 0) for usage in (final.usage, whole.usage)]
assert prompts[0] == prompts[1]
counted = client.messages.count_tokens(**{name: asked[name] for name in ("model", "messages", "system")})
assert counted.input_tokens == whole.usage.input_tokens
stopped = client.messages.create(**asked, stop_sequences=[text[3:6]])
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[3:6])
refused = None
try:
    client.messages.create(**asked | {"extra_body": {"top_k": -5}})
except anthropic.BadRequestError as error:
    refused = error
assert refused is not None, "top_k -5 was answered"
assert refused.body["error"]["type"] == "invalid_request_error"

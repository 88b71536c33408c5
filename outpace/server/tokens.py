"""`/tokenize`, `/detokenize` and `/tokenizer_info`: the model's tokenizer over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from outpace.server.chat_completions import ChatMessage, template_messages
from outpace.server.errors import ApiError
from outpace.server.request_body import Body
from outpace.server.service import Service


class TokenizeBody(Body):
    """A text, or a conversation that is rendered by the chat template."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None  # llama.cpp's name
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


def tokenize(body: TokenizeBody, service: Service) -> dict[str, Any]:
    """Return token ids, their number, and the context length."""
    tokenizer = service.llm.tokenizer
    text = body.prompt if body.prompt is not None else body.content
    if (text is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.messages is not None:
        tokens = tokenizer.chat(
            template_messages(body.messages),
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
        )
    else:
        assert text is not None
        tokens = tokenizer.continuation(text) if body.add_special_tokens is False else tokenizer.encode(text)
    found: dict[str, Any] = {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": list(tokens)}
    if body.return_token_strs:
        found["token_strs"] = [tokenizer.spelled(token).decode("utf-8", "replace") for token in tokens]
    return found


def detokenize(body: DetokenizeBody, service: Service) -> dict[str, Any]:
    """Return the text of token ids, with special tokens."""
    last = service.llm.target.model.vocab_size - 1
    bad = next((token for token in body.tokens if token > last), None)
    if bad is not None:
        raise ApiError(400, f"a token is {bad}, allowed are 0 to {last}", param="tokens")
    text = service.llm.tokenizer.decode(body.tokens, skip_special=False)
    return {"prompt": text, "content": text}


def tokenizer_info(service: Service) -> dict[str, Any]:
    """Describe the tokenizer."""
    tokenizer = service.llm.tokenizer
    special = tokenizer.special_texts
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": service.llm.target.model.vocab_size,
        "max_model_len": service.max_model_len,
        "eos_token": special.get("eos_token"),
        "bos_token": special.get("bos_token"),
        "pad_token": special.get("pad_token"),
        "eos_token_ids": sorted(tokenizer.stop_ids),
        "chat_template": tokenizer.chat_template,
    }

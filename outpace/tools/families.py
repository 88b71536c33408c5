"""How families of models write a tool call, and how a model's family is told."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.models.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Family:
    """A call is a JSON object with the tool's name and its arguments, between marks. Without a `start` it is the whole
    answer."""

    name: str
    start: str = ""
    end: str = ""
    arguments: str = "arguments"  # the field
    between: str = "\n"  # several calls
    is_list: bool = False  # all calls stand in one list

    @property
    def keeps_special(self) -> bool:
        """Whether its marks may be special tokens, whose text an answer leaves out unless it is asked for."""
        return self.name in ("llama", "mistral")


HERMES = Family("hermes", "<tool_call>\n", "\n</tool_call>")
LLAMA = Family("llama", arguments="parameters", between="; ")
MISTRAL = Family("mistral", "[TOOL_CALLS]", between=", ", is_list=True)
JSON = Family("json")
PYTHON_TAG = "<|python_tag|>"  # Llama 3.1 may write it before a call


def family_of(tokenizer: Tokenizer) -> Family:
    """By the chat template's text and the vocabulary: Hermes and Qwen, Llama 3.1, Mistral, else plain JSON."""
    template = tokenizer.template_text
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if tokenizer.id_of(MISTRAL.start) is not None:
        return MISTRAL
    if tokenizer.id_of(PYTHON_TAG) is not None:
        return LLAMA
    return JSON

"""A tiny model that writes a given chain of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from files import SPECIAL, tokens, weights, write_gguf
from gguf import TokenType

GO, END = "<|go|>", SPECIAL[2]


def scripted(
    file: Path,
    chain: Sequence[str],
    special: Collection[str],
    template: str,
    start: str = GO,
    words: Sequence[str] = (),
) -> str:
    """Write a model whose greedy answer to a prompt that ends with `start` is `chain`, and return its path.

    Each link is one added token, and is followed by the next one wherever it is. `special`: those links and other
    `words` of the vocabulary that are special tokens.
    """
    links = [start, *chain, END]
    added = [word for word in dict.fromkeys([GO, *links, *words]) if word not in SPECIAL]
    vocabulary = [*tokens(), *added]
    kinds = [
        TokenType.CONTROL
        if word in (*SPECIAL, *special)
        else TokenType.USER_DEFINED
        if word in added
        else TokenType.NORMAL
        for word in vocabulary
    ]
    tensors = weights(vocab_size=len(vocabulary), tie_word_embeddings=False)
    for name, values in tensors.items():
        if "o_proj" in name or "down_proj" in name:  # a layer adds nothing
            values[:] = 0
    rows = np.random.default_rng(0).integers(0, 2, (len(vocabulary), 64)).astype(np.float32) * 2 - 1
    head = np.zeros_like(rows)
    for link, following in itertools.pairwise(links):
        head[vocabulary.index(following)] += rows[vocabulary.index(link)]
    tensors |= {"model.embed_tokens.weight": rows, "lm_head.weight": head, "model.norm.weight": np.ones(64, np.float32)}
    fields = {
        "llama.context_length": 512,
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.chat_template": template,
    }
    return str(write_gguf(file, fields, tensors=tensors))

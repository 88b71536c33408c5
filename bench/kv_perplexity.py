"""Perplexity of a text by how keys and values are held: float32, float16, int8, by the native runtime.

Run: python bench/kv_perplexity.py DATA.jsonl ... [--model M] [--dtype int8|file] [--tokens 8192] [--window 512]
Texts are the strings of each line, some tokens of each; they are cut into windows that are read from nothing. The same
tokens by every way, so differences are of the rounding alone. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from outpace.models.base import chain
from outpace.models.llama.config.footprint import ENTRY_BYTES
from outpace.models.load import load_model
from outpace.models.runtimes import Loaded

MOST = 400  # tokens of one text


def tokens_of(files: list[Path], loaded: Loaded, count: int) -> list[int]:
    """So many tokens of what the lines hold in strings (reference answers, tests), the files in turn, line by line."""
    found: list[int] = []
    for lines in zip(*(file.read_text(encoding="utf-8").splitlines() for file in files), strict=False):
        for line in lines:
            text = " ".join(value for value in json.loads(line).values() if isinstance(value, str))
            found += loaded.tokenizer.encode(text)[:MOST]
        if len(found) >= count:
            break
    return found[:count]


def losses(loaded: Loaded, tokens: list[int], window: int) -> Iterator[float]:
    """Of every token but each window's first, nats."""
    model = loaded.model
    for start in range(0, len(tokens) - window + 1, window):
        part = tokens[start : start + window]
        session = model.open(window, window)
        scores = np.asarray(model.score([chain(session, part, wanted=range(window - 1))]), np.float64)
        scores -= scores.max(-1, keepdims=True)
        chosen = scores[np.arange(window - 1), part[1:]]
        yield from (np.log(np.exp(scores).sum(-1)) - chosen).tolist()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="int8", choices=("int8", "file"))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=512)
    asked = parser.parse_args()
    found = {}
    for kv_dtype in ENTRY_BYTES:
        loaded = load_model(asked.model, dtype=asked.dtype, kv_dtype=kv_dtype)
        each = list(losses(loaded, tokens_of(asked.data, loaded, asked.tokens), asked.window))
        found[kv_dtype] = math.exp(sum(each) / len(each))
        more = 100 * (found[kv_dtype] / found["float32"] - 1)
        print(
            f"{kv_dtype}: {found[kv_dtype]:.4f} ({more:+.3f} %), {loaded.model.token_bytes} bytes a token", flush=True
        )
    print(json.dumps({"dtype": asked.dtype, "tokens": len(each), "window": asked.window, "perplexity": found}))


if __name__ == "__main__":
    main()

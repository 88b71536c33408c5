"""Measure perplexity by the format of the weights and of the KV cache, against float32 arithmetic.

Run: python bench/weights_perplexity.py MODEL DATA.jsonl ... [--kv] [--dtype file] [--tokens 8192] [--window 512]
Weights: torch in float32 on the dequantised values, the kernels on the file's own weights, and the kernels in int8.
With --kv: the kernels with --dtype and each format of keys and values. Texts are the strings in each line, cut into
windows. All variants read the same tokens. The last line is JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import finish, parse, run

from outpace.models.base import chain
from outpace.models.llama.config.llama_config import ENTRY_BYTES
from outpace.models.load import load_model
from outpace.models.runtimes import Loaded

LONGEST = 400  # tokens of one text
WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "runtime": "llama", "exact": False},
    "file": {"dtype": "file"},
    "int8": {"dtype": "int8"},
}


def tokens_of(files: list[Path], loaded: Loaded, count: int) -> list[int]:
    """Return `count` tokens of the strings in the lines of the files, which are interleaved."""
    found: list[int] = []
    for lines in zip(*(file.read_text(encoding="utf-8").splitlines() for file in files), strict=False):
        for line in lines:
            text = " ".join(value for value in json.loads(line).values() if isinstance(value, str))
            found += loaded.tokenizer.encode(text)[:LONGEST]
        if len(found) >= count:
            break
    return found[:count]


def losses(loaded: Loaded, tokens: list[int], window: int) -> Iterator[float]:
    """Yield the negative log-probability of every token except the first of each window."""
    model = loaded.model
    for start in range(0, len(tokens) - window + 1, window):
        part = tokens[start : start + window]
        session = model.open(window, window)
        logits = np.asarray(model.score([chain(session, part, logit_rows=range(window - 1))]), np.float64)
        logits -= logits.max(-1, keepdims=True)
        chosen = logits[np.arange(window - 1), part[1:]]
        yield from (np.log(np.exp(logits).sum(-1)) - chosen).tolist()


def main() -> int:
    """Run the command."""
    given: dict[str, Any] = {"positional": {"model": str, "data": [Path]}, "choices": {"dtype": ("int8", "file")}}
    args = parse(__doc__, **given, kv=False, dtype="file", tokens=8192, window=512)
    variants = {name: {"dtype": args.dtype, "kv_dtype": name} for name in ENTRY_BYTES} if args.kv else WEIGHTS
    found: dict[str, float] = {}
    for name, options in variants.items():
        loaded = load_model(args.model, **options)
        each = list(losses(loaded, tokens_of(args.data, loaded, args.tokens), args.window))
        found[name] = math.exp(sum(each) / len(each))
        print(f"{name}: {found[name]:.4f} ({100 * (found[name] / found['float32'] - 1):+.3f} %)", flush=True)
    return finish({"model": args.model, "tokens": len(each), "window": args.window, "perplexity": found}, False)


if __name__ == "__main__":
    run(main)

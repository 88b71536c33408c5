"""Perplexity of a text by how a model's weights are held: as its file has them or in int8, beside float32 arithmetic.

Run: python bench/weights_perplexity.py MODEL DATA.jsonl ... [--tokens 8192] [--window 512]
float32 is torch's on the values that the file means, so what differs is the rounding of activations and, in int8, of
the weights. Texts and windows are those of kv_perplexity.py. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from kv_perplexity import losses, tokens_of

from outpace.models.load import load_model

WAYS = ({"dtype": "float32", "runtime": "llama", "exact": False}, {"dtype": "file"}, {"dtype": "int8"})


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=512)
    asked = parser.parse_args()
    found: dict[str, float] = {}
    for way in WAYS:
        loaded = load_model(asked.model, **way)
        each = list(losses(loaded, tokens_of(asked.data, loaded, asked.tokens), asked.window))
        found[way["dtype"]] = math.exp(sum(each) / len(each))
        more = 100 * (found[way["dtype"]] / found["float32"] - 1)
        print(f"{way['dtype']}: {found[way['dtype']]:.4f} ({more:+.3f} %)", flush=True)
    print(json.dumps({"model": asked.model, "tokens": len(each), "window": asked.window, "perplexity": found}))


if __name__ == "__main__":
    main()

"""The frozen table of drafter cacheback that comes with outpace: made of a target's own answers, for its tokenizer.

Run: python bench/ship_table.py TEXT [--target T] [--leaders 8192] [--followers 8] [--to FOLDER]
TEXT is the folder of a run of `outpace distill` that holds its text; its answers alone are read, and none that the run
holds out. The file is named as the drafter looks for it; the default folder is the package's own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from outpace.distill.shards import read_shards
from outpace.drafters import cacheback
from outpace.models.files import token_tables
from outpace.models.load import load_model


def answers(folder: Path) -> list[np.ndarray]:
    """The tokens of each answer, its prompt left out."""
    found = list[np.ndarray]()
    for shard in track(read_shards(folder), "answers", console=Console(stderr=True)):
        for number in np.flatnonzero(~shard.held_out):
            found.append(shard.tokens[shard.starts[number] + shard.prompts[number] : shard.starts[number + 1]])
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--to", type=Path, default=token_tables.SHIPPED)
    parser.add_argument("--target")
    parser.add_argument("--leaders", type=int, default=8192)
    parser.add_argument("--followers", type=int, default=8)
    asked = parser.parse_args()
    target = load_model(asked.target)
    texts = answers(asked.text)
    options = cacheback.Options(leaders=asked.leaders, followers=asked.followers)
    path = asked.to / token_tables.file_name("cacheback", target.tokenizer.fingerprint)
    made = cacheback.make(texts, target.model.vocab_size, options)
    token_tables.write(path, "cacheback", target.tokenizer.fingerprint, made)
    path.chmod(0o644)
    phrases = int((made["phrases"][..., 0] >= 0).sum())
    print(f"{path}: {phrases:,} phrases of {sum(map(len, texts)):,} tokens, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

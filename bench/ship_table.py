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
from safetensors.numpy import load_file

from outpace.core.errors import UserError
from outpace.distill.shards import PATTERN
from outpace.drafters import _store, cacheback
from outpace.models.load import load_model


def answers(folder: Path) -> list[np.ndarray]:
    """The tokens of each answer, its prompt left out."""
    files = sorted(folder.glob(PATTERN))
    if not files:
        raise UserError(f"{folder} holds no {PATTERN}: name the folder `text` of a run of outpace distill")
    found = list[np.ndarray]()
    for file in track(files, "answers", console=Console(stderr=True)):
        held = load_file(file)
        tokens, starts, prompts = held["tokens"], held["starts"], held["prompts"]
        for number in np.flatnonzero(~held["held_out"]):
            found.append(tokens[starts[number] + prompts[number] : starts[number + 1]])
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--to", type=Path, default=_store.SHIPPED)
    parser.add_argument("--target")
    parser.add_argument("--leaders", type=int, default=8192)
    parser.add_argument("--followers", type=int, default=8)
    asked = parser.parse_args()
    target = load_model(asked.target)
    texts = answers(asked.text)
    options = cacheback.Options(leaders=asked.leaders, followers=asked.followers)
    path = asked.to / _store.file_name("cacheback", target.tokenizer.fingerprint)
    made = cacheback.make(texts, target.model.vocab_size, options)
    _store.write(path, "cacheback", target.tokenizer.fingerprint, made)
    path.chmod(0o644)
    phrases = int((made["phrases"][..., 0] >= 0).sum())
    print(f"{path}: {phrases:,} phrases of {sum(map(len, texts)):,} tokens, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

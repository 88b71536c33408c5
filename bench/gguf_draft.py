"""Check that llama.cpp drafts with a file of `outpace distill --gguf`: its texts against its own plain decoding.

Run: python bench/gguf_draft.py [--target FILE.gguf] [--draft RUN] [--kind F32] [--prompts 20] [--tokens 64]
By default the pair is the shipped one, with the target's own weights; --kind F32 decodes them to floats first. Needs
llama-cpp-python. Passes of several rows round differently, which quantised activations amplify. Where a text differs, a
line names the position and the gap between the logits of both tokens there. The exit status is 1 if a gap is above 0.5
(quantised) or 0.01 (F32). The last line is JSON.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import finish, parse, run

from outpace.bench.peer import PeerSettings
from outpace.bench.peers.llama_cpp import open_llama
from outpace.bench.peers.llama_cpp_draft import build
from outpace.core.arrays import num_cores
from outpace.distill.draft_shape import SHIPPED, resolve_draft
from outpace.distill.prompts import BUILT_IN, collect
from outpace.distill.run import write_gguf
from outpace.models.files.find import locate, open_source
from outpace.models.files.gguf.writer import gguf_file
from outpace.models.text.tokenizer import tokenizer_of

NEAR = {"F32": 0.01, "": 0.5}
CONTEXT = 1024


def main() -> int:
    """Run the command."""
    options: dict[str, Any] = {"target": str, "draft": SHIPPED, "kind": "", "prompts": 20, "tokens": 64}
    args = parse(__doc__, choices={"kind": ("F32", "")}, **options)
    target = locate(args.target)
    with open_source(target) as source:
        tokenizer = tokenizer_of(source)
    texts = collect([BUILT_IN])
    prompts = [tokenizer.encode_prompt(text) for text in texts[:: len(texts) // args.prompts][: args.prompts]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "draft.gguf")
        write_gguf(Path(resolve_draft("draft", args.draft, args.target)), target, file)
        model = gguf_file(args.target, args.kind)
        settings = PeerSettings(model, file, frozenset(tokenizer.stop_ids), num_cores(), CONTEXT)
        plain = open_llama("llama_cpp", model, settings)
        drafting = build(settings)
        same, drafted, accepted, gaps = 0, 0, 0, []
        for number, prompt in enumerate(prompts):
            answer = drafting.answer(prompt, args.tokens)
            drafted, accepted = drafted + (answer.drafted or 0), accepted + (answer.accepted or 0)
            expected = decode(plain, prompt, len(answer.tokens))
            place = next(
                (at for at, pair in enumerate(zip(answer.tokens, expected, strict=True)) if len({*pair}) > 1), -1
            )
            same += place < 0
            if place >= 0:
                gaps.append(gap(plain, [*prompt, *expected[:place]], expected[place], answer.tokens[place]))
                print(f"prompt {number}: token {place} differs, a gap of {gaps[-1]:.3f}", file=sys.stderr)
        drafting.close()
    found = {"prompts": len(prompts), "equal": same, "gaps": gaps, "drafted": drafted, "accepted": accepted}
    return finish(found, any(one > NEAR[args.kind] for one in gaps))


def decode(llama: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Return `count` tokens of greedy plain decoding."""
    llama.reset()
    stream = llama.generate(list(prompt), temp=0.0)
    return [next(stream) for _ in range(count)]


def gap(llama: Any, text: Sequence[int], first: int, second: int) -> float:
    """Return how much larger the logit of `first` is than that of `second` after a text, in plain decoding."""
    llama.reset()
    llama.eval(list(text))
    pointer = llama._ctx.get_logits_ith(-1)
    logits = np.ctypeslib.as_array(pointer, shape=(llama.n_vocab(),))
    return abs(float(logits[first] - logits[second]))


if __name__ == "__main__":
    run(main)

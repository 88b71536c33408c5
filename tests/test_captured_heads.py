"""Heads in captured passes: random weights change no text; drafts are right after pauses and for reused prefixes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from block_heads import BLOCK, VARIANTS, bigram_pair, write_block
from heads import P_EAGLE, exact_pair, write_head
from joined_heads import exact_joined, write_eagle1
from medusa_heads import HEADS, exact_medusa
from slot_heads import SLOTS, exact_slots, write_slots

from outpace.api.llm import LLM
from outpace.engine.sequence import TokenSequence
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded

LENGTH = 3  # drafted tokens of EAGLE's chains
LENGTHS = {
    "eagle3": (exact_pair, LENGTH),
    "eagle1": (exact_joined, LENGTH),
    "mtp": (exact_joined, LENGTH),
    "dspark": (bigram_pair, BLOCK),
    "medusa": (exact_medusa, HEADS),
    "specformer": (exact_slots, SLOTS),
}
RANDOM = {  # heads of random weights
    "eagle3": write_head,
    "peagle": partial(write_head, **P_EAGLE),
    "eagle1": write_eagle1,
    "dflash": write_block,
    "dspark": partial(write_block, **VARIANTS["dspark"]),
    "specformer": write_slots,
}
WORDS = ("one two ", "three four ", "five six ")
pytestmark = pytest.mark.filterwarnings("error:the drafter.*failed")


@pytest.fixture(params=LENGTHS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Loaded, Loaded, int]:
    """A target with captured passes, a head whose drafts are always right, and their number in a round."""
    write, length = LENGTHS[request.param]
    path, head, *others = write(tmp_path)
    target = load_model(others[0] if request.param == "mtp" else path, dtype="float32", graphs="eager")
    return target, load_draft("mtp" if request.param == "mtp" else head, target), length


def open_llm(target: Loaded, head: Loaded, **options: Any) -> LLM:
    shape = {} if head.drafter == "block" else {"draft_length": LENGTH}
    shape = {"draft_length": SLOTS} if head.drafter == "specformer" else shape
    return LLM(target, head, method="speculative", profile=False, width=1, **shape, **options)


def watch(llm: LLM) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """Collect the sequences of later requests, and those whose memory is freed before their end."""
    runs, pauses = list[TokenSequence](), list[TokenSequence]()
    create, release = llm.engine.create, llm.engine.memory.release

    def created(*asked: Any, **options: Any) -> TokenSequence:
        runs.append(create(*asked, **options))
        return runs[-1]

    def released(sequence: TokenSequence) -> None:
        pauses.extend([sequence] if sequence.finish_reason is None else [])
        release(sequence)

    llm.engine.create, llm.engine.memory.release = created, released  # type: ignore[method-assign]
    return runs, pauses


def test_paused_requests_keep_their_drafts(pair: tuple[Loaded, Loaded, int]) -> None:
    """Memory for two rows of 128 slots, or one of 256: one request is paused and read again."""
    target, head, length = pair
    prompts = [target.tokenizer.encode(words) for words in WORDS]
    asked = {"max_tokens": 200, "ignore_eos": True}
    with open_llm(target, head, reuse=False) as llm:
        plain = [one.tokens for one in llm.generate(prompts, plain=True, **asked)]
        memory = llm.engine.drafting.drafters[head.drafter].capabilities.memory
        needed = max(target.model.stored_bytes(slots) + memory(slots) for slots in ([128, 128], [256]))
    with open_llm(target, head, reuse=False, kv_memory=needed / 2**30) as llm:
        _, pauses = watch(llm)
        found = llm.generate(prompts, **asked)
    assert pauses, "no request was paused"
    assert [one.tokens for one in found] == plain
    assert min(one.figures.mean_accepted_length for one in found) > 0.85 * (length + 1)
    assert min(target.model.captures.count, head.model.num_captures) > 0


def test_a_reused_prefix_gets_the_same_drafts(pair: tuple[Loaded, Loaded, int]) -> None:
    target, head, _ = pair
    prompt = target.tokenizer.encode("".join(WORDS) * 3)
    longer = [*prompt, *prompt[:5]]
    asked = {"max_tokens": 40, "ignore_eos": True}
    with open_llm(target, head) as llm:
        [alone] = llm.generate([longer], **asked)
    with open_llm(target, head) as llm:
        llm.generate([prompt], **asked)
        runs, _ = watch(llm)
        [second] = llm.generate([longer], **asked)
        [plain] = llm.generate([longer], plain=True, **asked)
    assert runs[0].history.reused >= len(prompt) - 1
    assert second.tokens == alone.tokens == plain.tokens
    assert second.figures.positions == alone.figures.positions

"""A draft that reads the end of a text only: the same drafts where it sees no further, bounded work and storage."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from doubles import QuickToy

from outpace.core import registry
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters._model_drafter import OfferState
from outpace.drafters.model import ModelDrafter, Options
from outpace.models.base import Part
from outpace.models.llama.config.llama_config import from_dict
from outpace.rules.greedy import Greedy

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
}
ORDER, WINDOW = 3, 4  # tokens that the toy's scores depend on; tokens that are read
SHORT = Options(width=2, tree_nodes=24, draft_window=WINDOW)


class Counted(QuickToy):
    """Notes how many tokens each pass read."""

    def __init__(self) -> None:
        super().__init__(16, ORDER, 0)
        self.read: list[int] = []

    def score(self, forest: Sequence[Part]):  # type: ignore[no-untyped-def]
        self.read.append(sum(len(part.tokens) for part in forest))
        return super().score(forest)


def opened(options: Options, prompt: Sequence[int]) -> tuple[ModelDrafter, OfferState, Counted]:
    model = Counted()
    drafter = ModelDrafter(model, options)
    return drafter, drafter.open(Request(tuple(prompt), Greedy(), 400)), model


def test_a_window_that_is_wide_enough_drafts_as_the_whole_text_does() -> None:
    chance = random.Random(5)
    prompt = [chance.randrange(16) for _ in range(300)]
    ways = [opened(options, prompt) for options in (SHORT, replace(SHORT, draft_window=0))]
    trees = [TokenTree(prompt[-1]) for _ in ways]
    held = []
    for _ in range(60):
        for _ in range(chance.randrange(4)):
            for (drafter, state, _), tree in zip(ways, trees, strict=True):
                drafter.grow([state], [tree])
        assert trees[0].tokens == trees[1].tokens
        assert trees[0].parents == trees[1].parents
        assert trees[0].scores == pytest.approx(trees[1].scores)
        path, node = [trees[0].ids[0]], 0
        while (children := trees[0].children(node)) and chance.random() < 0.7:
            node = chance.choice(list(children))
            path.append(trees[0].ids[node])
        follows = chance.randrange(16)
        tokens = [*(trees[0].tokens[trees[0].ids.index(one)] for one in path[1:]), follows]
        root = trees[0].next_id
        trees = [TokenTree(follows, root_id=root, next_id=root + 1) for _ in ways]
        for (drafter, state, _), tree in zip(ways, trees, strict=True):
            drafter.observe(state, Observation(path, tokens, tree))
        held.append(ways[0][1].session.length)
    assert 0 in held, "the session never began anew"
    assert max(held) <= 3 * WINDOW + SHORT.tree_nodes
    assert ways[1][1].session.length > 300


def test_only_the_end_of_a_prompt_is_read() -> None:
    drafter, state, model = opened(SHORT, range(300))
    drafter.grow([state], [TokenTree(299)])
    assert model.read == [WINDOW + 1]
    assert drafter.capabilities.sources[0].reads == WINDOW
    drafter, state, model = opened(Options(), [n % 16 for n in range(300)])
    drafter.grow([state], [TokenTree(11)])
    assert sum(model.read) == 300
    assert drafter.capabilities.sources[0].reads is None


def test_a_text_beyond_the_drafts_context_is_not_read_and_the_others_are_drafted() -> None:
    drafter, short, model = opened(replace(SHORT, draft_window=0), [1, 2, 3])
    model.max_positions = 40
    long = drafter.open(Request((1, 2, 3) * 200, Greedy(), 400))
    short.max_read = long.max_read = 512
    trees = [TokenTree(3), TokenTree(3)]
    drafter.grow([short, long], trees)
    assert [len(tree) > 1 for tree in trees] == [True, False]


def test_the_window_is_the_drafts_own_unless_one_is_named() -> None:
    model = Counted()
    model.draft_window = 9
    assert ModelDrafter(model, Options()).capabilities.sources[0].reads == 9
    assert ModelDrafter(model, Options(draft_window=0)).capabilities.sources[0].reads is None
    assert ModelDrafter(model, Options(draft_window=5)).capabilities.sources[0].reads == 5
    with pytest.raises(UserError, match="draft_window is -1, it must be"):
        Options(draft_window=-1)


def test_a_config_says_how_much_its_draft_reads() -> None:
    assert from_dict(CONFIG).draft_window == 0
    assert from_dict(CONFIG | {"outpace": {"draft_window": 64}}).draft_window == 64
    with pytest.raises(UserError, match="draft_window is 'much', it must be a whole number of at least 1"):
        from_dict(CONFIG | {"outpace": {"draft_window": "much"}})


def test_an_option_that_may_be_none_is_read_from_text() -> None:
    module = registry.find("drafters", "model")
    assert registry.build_options(module, {"draft_window": "32"}).draft_window == 32
    with pytest.raises(UserError, match="draft_window is 'wide', it must be a number"):
        registry.build_options(module, {"draft_window": "wide"})

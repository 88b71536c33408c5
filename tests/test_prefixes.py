"""The index of cached prefixes, which hashes blocks, gives the same results as comparing all texts."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from machines import DEPTHS

from outpace.engine.earlier_texts import BLOCK, HashedTokens, PrefixIndex

TOKENS = st.lists(st.integers(0, 1), max_size=2 * BLOCK)
WHICH = st.integers(0, 1 << 16)


class Holding:
    """A holder of the first `length` tokens of a text that may grow."""

    def __init__(self, tokens: list[int], key: str | None) -> None:
        self.text, self.length = HashedTokens(tokens, key), 0


def in_common(one: HashedTokens, other: HashedTokens) -> int:
    """Return the length of the common prefix."""
    if one.key != other.key:
        return 0
    pairs = zip(one.tokens, other.tokens, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one.tokens), len(other.tokens)))


class PrefixMachine(RuleBasedStateMachine):
    """Texts share prefixes, grow, are held a little further, and are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: PrefixIndex[Holding] = PrefixIndex()
        self.all: list[Holding] = []

    @rule(tokens=TOKENS, key=st.sampled_from([None, "a"]), which=WHICH, length=WHICH)
    def begin(self, tokens: list[int], key: str | None, which: int, length: int) -> None:
        stem = list(self.all[which % len(self.all)].text.tokens) if self.all else []
        self.all.append(Holding([*stem[: length % (len(stem) + 1)], *tokens], key))

    @precondition(lambda self: self.all)
    @rule(tokens=TOKENS, which=WHICH)
    def grow(self, tokens: list[int], which: int) -> None:
        one = self.all[which % len(self.all)]
        assert isinstance(one.text.tokens, list)
        one.text.tokens.extend(tokens)

    @precondition(lambda self: self.all)
    @rule(which=WHICH, more=WHICH)
    def hold(self, which: int, more: int) -> None:
        one = self.all[which % len(self.all)]
        one.length += more % (len(one.text.tokens) - one.length + 1)
        self.holders.hold(one, one.length)

    @precondition(lambda self: self.all)
    @rule(which=WHICH)
    def drop(self, which: int) -> None:
        one = self.all.pop(which % len(self.all))
        if one in self.holders:
            self.holders.drop(one)

    @precondition(lambda self: self.all)
    @rule(which=WHICH, cut=WHICH)
    def cut(self, which: int, cut: int) -> None:
        one = self.all[which % len(self.all)]
        length = cut % (len(one.text.tokens) + 1)
        short = one.text.upto(length)
        assert short.tokens == one.text.tokens[:length]
        assert short.hashes(length) == HashedTokens(short.tokens, short.key).hashes(length)

    @precondition(lambda self: self.all)
    @rule(tokens=TOKENS, which=WHICH, most=st.integers(0, 6 * BLOCK))
    def look(self, tokens: list[int], which: int, most: int) -> None:
        like = self.all[which % len(self.all)].text
        text = HashedTokens([*like.tokens[:most], *tokens], like.key)
        most = min(most, len(text.tokens))
        held = {one: min(in_common(text, one.text), one.length, most) // BLOCK for one in self.all}
        best = max(held.values())
        found = self.holders.nearest(text, most)
        assert set(found) == {one for one, blocks in held.items() if best and blocks == best}
        for one in self.all:
            assert text.common(one.text, most) == min(in_common(text, one.text), most)

    @invariant()
    def the_index_has_only_live_holders(self) -> None:
        assert set(self.holders._blocks) <= set(self.all)
        blocks = {hash for one in self.all for hash in one.text.hashes(one.length)}
        assert set(self.holders._by_block) == blocks


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_longest_prefix_is_found(depth: settings) -> None:
    run_state_machine_as_test(PrefixMachine, settings=depth)

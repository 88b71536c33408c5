"""Single parts where a fault would hide behind a text that is still right: chances, counts, threads, row counts."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter

import pytest
import torch
from doubles import Candidate, level_of
from light import grown
from torch import Tensor
from toy import Toy

from outpace.card.cache import CandidateCache, CandidateLevel
from outpace.card.thread import ThreadWorker
from outpace.core.drafting import DraftDirectives
from outpace.core.sampling import Sampling, log_probs
from outpace.core.stats import acceptance_rate
from outpace.core.tree import Role, TokenTree
from outpace.core.types import Observation, Request, Verdict
from outpace.drafters._composite import SharedTree
from outpace.drafters._model_drafter import PickModel
from outpace.drafters.model import ModelDrafter, Options
from outpace.drafters.ngram import NgramDrafter
from outpace.drafters.ngram import Options as NgramOptions
from outpace.models.llama.torch.linear import apply_in_chunks, find_row_counts, pad_rows
from outpace.rules.greedy import Greedy
from outpace.rules.gumbel import Gumbel

TARGET = Toy(16, 3, 0)


def request(*prompt: int, **fields: object) -> Request:
    return Request(prompt, fields.pop("rule", Greedy()), 50, **fields)


def test_filtered_tokens_are_never_offered() -> None:
    drafter = ModelDrafter(TARGET, Options(width=8))
    state = drafter.open(request(1, 2, 3, rule=Gumbel(), sampling=Sampling(1.0, top_k=2)))
    tree = TokenTree(3)
    for _ in range(4):
        drafter.grow([state], [tree])
    assert len(tree) > 4
    assert all(math.isfinite(score) for score in tree.scores)
    assert max(len(tree.children(node)) for node in range(len(tree))) == 2
    picked = next(token for token in range(16) if tree.child(0, token) is None)
    drafter.observe(state, Observation([0], [picked], TokenTree(picked, 900, 901)))
    assert all(math.isfinite(value) for value in state.pick_model.log_chances([0.0, -1.0]))


def test_a_branch_that_stands_already_is_confirmed_and_then_continued() -> None:
    drafter = SharedTree([NgramDrafter(NgramOptions(copies=4)), ModelDrafter(TARGET, Options(width=1))])
    text = [1, 2]
    session = TARGET.open(100, 100)
    from outpace.models.base import chain

    for _ in range(60):  # the target's own greedy text, so that both drafters agree once it repeats itself
        session.truncate(0)
        scores = TARGET.score([chain(session, text, logit_rows=[len(text) - 1])])
        session.keep(range(len(text)))
        text.append(int(scores.argmax()))
    state, tree = drafter.open(request(*text[:50])), TokenTree(text[49])
    lengths = [grown(drafter, state, tree) for _ in range(8)]
    assert tree.num_confirmed >= lengths.count(0) > 0
    walked = 0
    for token in text[50:58]:
        walked = tree.child(walked, token)
        assert walked is not None


def test_the_estimated_chances_follow_what_was_picked() -> None:
    pick_model = PickModel()
    values = [0.0, -1.0, -2.0]
    for turn in range(200):
        pick_model.learn(values, turn % 3)  # all alike, whatever q says
    low, high = min(pick_model.log_chances(values)), max(pick_model.log_chances(values))
    assert high - low < 0.6
    for _ in range(800):  # four times the memory
        pick_model.learn(values, 0)
    assert math.exp(pick_model.log_chances(values)[0]) > 0.85
    rate = acceptance_rate(0.5)
    for _ in range(100):
        rate.learn(False)
    assert rate.value < 0.1


def test_a_sure_draft_leaves_less_open_than_another() -> None:
    chance = random.Random(3)
    sure, vague = [math.log(q) for q in (0.97, 0.02)], [math.log(q) for q in (0.3, 0.2)]
    told, blind = PickModel(has_shares=True), PickModel()
    for _ in range(600):
        for values in (sure, vague):  # the target picks as the draft says
            picked = chance.choices((0, 1, None), [*map(math.exp, values), 1.0 - sum(map(math.exp, values))])[0]
            told.learn(values, picked)
            blind.learn(values, picked)
    for values in (sure, vague):
        assert told.log_chances(values) == pytest.approx(values, abs=0.15)
    assert blind.log_chances(vague)[0] > vague[0] + 0.3, "one coverage for all places overrates the vague ones"
    again = PickModel(has_shares=True)
    again.load_state_dict(told.state_dict())
    assert again.log_chances(vague) == pytest.approx(told.log_chances(vague), abs=0.1)
    again.load_state_dict({"coverage": 0.9, "temperature": 1.0})  # a profile of before
    assert again.log_chances(vague) == pytest.approx(vague, abs=0.01)


def test_levels_leave_room_in_a_tree_for_those_to_come() -> None:
    drafter = ModelDrafter(TARGET, Options(width=4, tree_nodes=64, floor=0.0))
    state, tree = drafter.open(request(1, 2, 3)), TokenTree(3)
    state.directives = DraftDirectives(share=0.25)
    added = [grown(drafter, state, tree) for _ in range(6)]
    assert added[:2] == [4, 14], "of a level of sixteen as many as are a quarter of the room"
    assert min(added[2:]) >= 8, "twice its width in any case"
    state.directives = DraftDirectives()
    assert grown(drafter, state, tree) == 64 - 1 - sum(added)


def test_a_last_word_for_an_old_root_does_not_cut_the_next_wait_short() -> None:
    cache = CandidateCache(5)
    tree = cache.query(4)
    cache.correct(tree, Verdict([0], 7), 1)
    cache.insert(level_of(0, []))  # nothing more below the root that is gone
    assert cache.levels == 0
    cache.insert(level_of(-1, []))
    assert cache.levels > 0
    assert cache.insert(level_of(-1, [Candidate(1, -1, 3, -0.5, Role.PRIMARY)])) == 1
    assert cache.insert(level_of(-1, [Candidate(2, 77, 3, -0.5, Role.PRIMARY)])) == 0
    assert cache.counts["orphan"] == 1


def test_late_levels_find_their_parents_by_text() -> None:
    def insert(*nodes: tuple[int, int, int]) -> int:
        return cache.insert(level_of(0, [Candidate(*node, -0.5, Role.PRIMARY) for node in nodes]))

    cache = CandidateCache(5)
    cache.correct(cache.query(9), Verdict([0], 7), 1)
    assert insert((1, 0, 7), (2, 1, 8), (3, 0, 9), (4, 3, 8)) == 1, "7 is written, 9 is not"
    assert cache.query(9).tokens == [7, 8]
    assert cache.counts["orphan"] == 2
    tree = cache.query(9)
    assert cache.correct(tree, Verdict([0, 1], 3), 2)[1] == ([8, 3], 3, -2)
    assert insert((5, 2, 3), (6, 5, 4)) == 1, "3 was written after 8"
    assert insert((7, 5, 4), (8, 7, 2)) == 1, "4 was drafted twice"
    assert insert((9, 6, 1), (10, 8, 6)) == 2
    assert cache.query(9).tokens == [3, 4, 2, 1, 6]
    tree = cache.query(1)
    cache.add_late_children(tree)
    assert cache.correct(tree, Verdict([0], 4), 1)[1] == ([4], 4, 6)
    assert insert((11, 7, 0), (12, 1, 5)) == 1
    assert cache.query(9).tokens == [4, 2, 1, 6, 0]
    cache.correct(cache.query(9), Verdict([0], 9), 9)
    cache.insert(CandidateLevel(-3, level_of(-3, [Candidate(21, 20, 3, -0.5, Role.PRIMARY)]).nodes, alias=20))
    assert cache.query(9).tokens == [9, 3], "the level in which 20 was drafted is lost"
    assert cache.next_id == 22


def test_written_tokens_and_their_ids_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.card.cache._REMEMBERED", 8)
    cache, aliases = CandidateCache(5), 0
    for number in range(40):
        if number < 30:
            cache.insert(level_of(-number, [Candidate(number + 1, -max(number - 3, 0), 1, -0.5, Role.PRIMARY)]))
        aliases = max(aliases, len(cache._aliases))
        cache.correct(cache.query(1), Verdict([0], 1 if number % 2 else 2), 1)
    assert len(cache._next) == 8
    assert 0 < aliases <= 17
    cache._aliases |= dict.fromkeys(range(100, 120), 99)  # an id that is gone
    cache.correct(cache.query(1), Verdict([0], 1), 1)
    assert not cache._aliases


def test_a_stale_level_is_dropped_without_a_search_for_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, searches, find = CandidateCache(5), Counter[str](), TokenTree.find
    cache._aliases = {-number: 0 for number in range(2, 300)}
    monkeypatch.setattr(TokenTree, "find", lambda tree, node_id: searches.update(["all"]) or find(tree, node_id))
    cache.correct(cache.query(1), Verdict([0], 7), 1)
    chain = [Candidate(number, number - 1, 8, -0.5, Role.PRIMARY) for number in range(1, 300)]
    assert cache.insert(level_of(0, chain)) == 0
    assert cache.counts["orphan"] == 299
    assert searches["all"] < 5


def test_a_wait_ends_if_the_drafter_gave_up_before_its_levels_were_counted() -> None:
    cache = CandidateCache(5)
    cache.insert(level_of(0, []))  # nothing more below this root
    assert cache.has_grown(cache.levels + 1)
    cache.wait(cache.levels + 1, 3600.0)


def test_a_worker_leaves_other_threads_their_cores() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    worker = ThreadWorker(ModelDrafter(TARGET, Options()), threads=1).start()
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    try:
        assert (torch.get_num_threads(), seen) == (2, [2])
    finally:
        worker.close()
        torch.set_num_threads(before)


def test_half_precision_scores_are_sampled_in_single() -> None:
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    samplings = [Sampling(0.8), Sampling(0.8, top_p=0.9)]
    assert torch.equal(log_probs(logits, samplings), log_probs(logits.float(), samplings))


def test_products_meet_probed_row_counts_only() -> None:
    counts, met = (4, 8, 64), []

    def linear(x: Tensor, residual: Tensor | None = None) -> Tensor:
        met.append(len(x))
        return x if residual is None else x + residual

    for rows in (1, 4, 5, 8, 9, 63, 64, 65, 70, 127, 128, 200):
        x = torch.randn(rows, 3)
        product = apply_in_chunks(linear, pad_rows(x, counts), pad_rows(x, counts), counts)
        assert torch.equal(product[:rows], 2 * x)
    assert set(met) <= set(counts)


def test_rows_that_see_one_another_are_noticed() -> None:
    def leaky(x: Tensor, residual: Tensor | None = None) -> Tensor:
        return x + (1e-7 if len(x) in (5, 6) else 0.0)

    def hopeless(x: Tensor, residual: Tensor | None = None) -> Tensor:
        return x + 1e-3 * len(x)

    counts = (4, 5, 6, 8, 16)
    assert find_row_counts([(leaky, 7)], counts) == (4, 8, 16)
    assert find_row_counts([(hopeless, 7)], (4, 8, 32)) == ()

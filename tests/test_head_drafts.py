"""Drafting with a trained head: shared prefixes, windows, captures, confidence; and what `doctor` says of one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_heads import VARIANTS, block_config, block_tensors
from heads import P_EAGLE, exact_pair, write_folder, write_head
from test_head_kinds import PROMPTS, WRITERS
from test_head_kinds import folder as folder
from test_head_kinds import targets as targets

from outpace.api.llm import LLM
from outpace.cli import head_report
from outpace.drafters.block import BlockDrafter
from outpace.engine.sequence import TokenSequence
from outpace.models.base import chain
from outpace.models.llama.torch.runtime import Llama
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded

CHAIN = {"draft_length": 3, "width": 1, "drafter": "eagle"}
pytestmark = pytest.mark.filterwarnings("error:the drafter.*failed")


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a target, `exact`, and of a head that drafts what it writes, `good`."""
    return exact_pair(tmp_path_factory.mktemp("right"))[0].parent


@pytest.fixture(scope="module", params=["float32", "int8"])
def exact(request: pytest.FixtureRequest, right: Path) -> Loaded:
    return load_model(right / "exact", dtype=request.param)


@pytest.fixture(params=["llama", "native"])
def target(request: pytest.FixtureRequest, targets: Any) -> Loaded:
    found: Loaded = targets[request.param, "target"]
    return found


def open_llm(target: Loaded, head: Path | str, **options: Any) -> LLM:
    return LLM(target, load_draft(head, target), **{"method": "speculative", "profile": False} | options)


def watch(llm: LLM) -> list[TokenSequence]:
    """Collect the sequences of later requests."""
    runs: list[TokenSequence] = []
    create = llm.engine.create

    def noted(*asked: Any, **options: Any) -> TokenSequence:
        runs.append(create(*asked, **options))
        return runs[-1]

    llm.engine.create = noted  # type: ignore[method-assign]
    return runs


def answer(llm: LLM, prompt: Any, **options: Any) -> Any:
    return llm.generate(prompt, max_tokens=40, ignore_eos=True, **options)[0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_mask_slots_draft_a_tree_in_one_forward(temperature: float, target: Loaded, tmp_path: Path) -> None:
    """P-EAGLE by drafter parallel: the text of plain decoding, also for a prompt that begins like another."""
    head, prompt = write_head(tmp_path / "head", **P_EAGLE), target.tokenizer.encode(PROMPTS[1] * 6)
    asked = {"max_tokens": 30, "temperature": temperature, "seed": 5, "ignore_eos": True}
    with open_llm(target, head, block=4) as llm:
        assert llm.build_options.drafter == "parallel"
        for prompts in ([*PROMPTS], [prompt], [[*prompt, *prompt[:9]]]):
            plain = [one.tokens for one in llm.generate(prompts, plain=True, **asked)]
            drafted = llm.generate(prompts, **asked)
            assert [one.tokens for one in drafted] == plain
            assert sum(one.figures.drafted for one in drafted) > 0


def test_passes_of_target_and_head_are_captured(right: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only chunks of a prompt of more than 64 tokens run uncaptured."""
    exact, uncaptured = load_model(right / "exact", dtype="float32", graphs="eager"), list[int]()
    head = load_draft(right / "good", exact)
    score = Llama._score_hidden

    def noted(model: Any, forest: Any, layers: Any) -> Any:
        uncaptured.extend(len(part.tokens) for part in forest)
        return score(model, forest, layers)

    monkeypatch.setattr(Llama, "_score_hidden", noted)
    with LLM(exact, head, method="speculative", profile=False, **CHAIN) as llm:
        answer(llm, exact.tokenizer.encode(PROMPTS[1] * 8))
    assert min(exact.model.captures.count, head.model.num_captures) > 0
    assert all(count > 64 for count in uncaptured)


def test_a_request_that_begins_like_another_is_drafted_as_well(exact: Loaded, right: Path) -> None:
    prompt = exact.tokenizer.encode(PROMPTS[1] * 8)
    longer = [*prompt, *exact.tokenizer.encode(" eight nine")]
    with open_llm(exact, right / "good", **CHAIN) as llm:
        alone = answer(llm, longer)
    with open_llm(exact, right / "good", **CHAIN) as llm:
        first, runs = answer(llm, prompt), watch(llm)
        second = answer(llm, longer)
        turn = [*prompt, *first.tokens, *prompt[:4]]
        third, plain = answer(llm, turn), answer(llm, turn, plain=True)
        several = llm.generate([longer], n=3, max_tokens=20, temperature=1.0, ignore_eos=True)
    assert second.tokens == alone.tokens
    assert third.tokens == plain.tokens
    assert second.figures.positions == third.figures.positions == alone.figures.positions
    assert runs[0].history.reused == len(prompt) - 1  # the position before the first token that differs is read again
    assert runs[1].history.reused >= len(turn) - len(prompt[:4]) - 8  # the head has not seen the last round
    assert all(run.history.reused >= len(longer) - 2 for run in runs[3:])
    assert all(one.figures.mean_accepted_length > 3.0 for one in several)


def test_a_prefix_without_the_heads_state_is_read_again(exact: Loaded, right: Path) -> None:
    prompt = exact.tokenizer.encode(PROMPTS[1] * 8)
    with open_llm(exact, right / "good", **CHAIN) as llm:
        plain, runs = answer(llm, prompt, plain=True), watch(llm)
        drafted = answer(llm, prompt)
        again = answer(llm, prompt, plain=True)
    assert [run.history.reused for run in runs] == [0, len(prompt) - 1]
    assert drafted.tokens == plain.tokens == again.tokens
    assert drafted.figures.mean_accepted_length > 3.5


def test_a_head_that_reads_its_own_slot_only_needs_a_window_of_one(exact: Loaded, right: Path) -> None:
    with open_llm(exact, right / "good", head_window=1, **CHAIN) as llm:
        assert answer(llm, PROMPTS[1]).figures.mean_accepted_length > 3.5


@pytest.mark.parametrize("kind", ["dflash", "specformer"])
def test_a_head_drafts_with_a_window(kind: str, target: Loaded, tmp_path: Path) -> None:
    with open_llm(target, WRITERS[kind](tmp_path / "head"), head_window=3) as llm:
        plain, drafted = answer(llm, PROMPTS[1], plain=True), answer(llm, PROMPTS[1])
    assert drafted.tokens == plain.tokens
    assert drafted.figures.drafted > 0


def check_blocks(target: Any, drafter: BlockDrafter, monkeypatch: pytest.MonkeyPatch, every: int = 1) -> list[int]:
    """Compare every block, or one of `every`, with that of a new session that reads the whole text; return the texts'
    lengths."""
    head, lengths = drafter._head, []
    draft = head.draft

    def checked(sessions: Sequence[Any], anchors: Sequence[int]) -> Any:
        found = draft(sessions, anchors)
        for number, (session, anchor) in enumerate(zip(sessions, anchors, strict=True)):
            state = next(state for state in states if state.session is session)
            text, own = state.tokens[:-1], target.open(512, 64)
            assert anchor == state.tokens[-1]
            assert session.length == len(text)
            lengths.append(len(text))
            if len(lengths) % every:
                continue
            part = chain(own, text)._replace(hidden_rows=range(len(text)))
            hidden = target.score_hidden([part], head.spec.taps).hidden
            fresh = head.open(512, 64)
            fresh.add_features(head.fuse(hidden))
            [mine, other] = [
                np.asarray(one.layer(place, 0, [[anchor]]).to_dense())
                for one, place in ((found, number), (draft([fresh], [anchor]), 0))
            ]
            assert np.allclose(mine, other, atol=1e-4)
        return found

    states, open_state = [], drafter.open

    def noted(request: Any) -> Any:
        states.append(open_state(request))
        return states[-1]

    monkeypatch.setattr(drafter, "open", noted)
    monkeypatch.setattr(head, "draft", checked)
    return lengths


def test_blocks_are_those_of_the_whole_text(target: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For prompts, answers, a request that begins like another, several answers, and requests that are paused."""
    prompt, head = target.tokenizer.encode(PROMPTS[1] * 6), WRITERS["dflash"](tmp_path / "head")
    with open_llm(target, head) as llm:
        lengths = check_blocks(target.model, llm.engine.drafting.drafters["block"], monkeypatch)
        first = llm.generate([prompt], max_tokens=20, ignore_eos=True)[0]
        longer = [*prompt, *first.tokens, *prompt[:5]]
        llm.generate([longer, prompt[:9]], max_tokens=20, ignore_eos=True)
        llm.generate([longer], n=3, max_tokens=10, temperature=1.0, ignore_eos=True)
    assert len(lengths) > 20
    prompts = [target.tokenizer.encode(one) for one in ("one two ", "three four ", "five six ")]
    with open_llm(target, head, reuse=False) as llm:
        expected = [one.tokens for one in llm.generate(prompts, max_tokens=200, ignore_eos=True)]
        slots = [256, 160]
        drafter = llm.engine.drafting.drafters["block"]
        needed = target.model.stored_bytes(slots) + drafter.capabilities.memory(slots)
    with open_llm(target, head, reuse=False, kv_memory=needed / 2**30) as llm:
        check_blocks(target.model, llm.engine.drafting.drafters["block"], monkeypatch, every=9)
        assert [one.tokens for one in llm.generate(prompts, max_tokens=200, ignore_eos=True)] == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_heads_confidence_limits_the_scores(
    temperature: float, targets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Estimated probabilities of greedy requests are the lower, the less confident the head is."""
    target, best = targets["llama", "target"], {}
    for bias in (-4.0, 4.0):
        config = block_config(**VARIANTS["dspark"])
        tensors = block_tensors(config) | {"confidence_head.proj.bias": np.array([bias], np.float32)}
        path = write_folder(tmp_path / str(bias), config, tensors)
        with open_llm(target, path) as llm:
            grow = BlockDrafter.grow
            found: list[float] = []

            def noted(self: Any, states: Any, trees: Any, grow: Any = grow, found: Any = found) -> None:
                grow(self, states, trees)
                found.extend(max(tree.scores[1:]) for tree in trees if len(tree) > 1)

            monkeypatch.setattr(BlockDrafter, "grow", noted)
            llm.generate(PROMPTS[0], max_tokens=2, temperature=temperature, ignore_eos=True)
            monkeypatch.setattr(BlockDrafter, "grow", grow)
            best[bias] = found[0]
    assert best[-4.0] < best[4.0] - 0.1 if temperature == 0.0 else best[-4.0] == best[4.0]


def test_a_head_names_its_target(folder: Path, tmp_path: Path) -> None:
    path = write_head(tmp_path / "head", "speculators")
    config = json.loads((path / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(folder / "target")
    (path / "config.json").write_text(json.dumps(config))
    with LLM(draft=str(path), profile=False) as llm:
        assert llm.target.name == str(folder / "target")
        assert llm.build_options.drafter == "eagle+prediction+ngram"
        assert answer(llm, PROMPTS[0]).tokens == answer(llm, PROMPTS[0], plain=True).tokens


def test_doctor_examines_a_head(folder: Path, right: Path, tmp_path: Path) -> None:
    good = head_report.examine(str(right / "exact"), str(right / "good"), quiet=True)
    assert good["mean_accepted_length"] > 4.5
    assert "the head fits the target" in good["advice"]
    poor = head_report.examine(str(folder / "target"), str(write_head(tmp_path / "random")), quiet=True)
    assert poor["mean_accepted_length"] < 1.3
    assert poor["taps"] == [2, 4, 5]
    assert "the target's weights are int8" in poor["advice"]
    rows = dict(head_report.rows_of(poor))
    assert rows["vocabulary"] == "128 of 272 tokens can be proposed"
    other = head_report.advise(poor | {"trained_for": "Qwen/Qwen3-8B"})
    assert other == f"the head was trained for Qwen/Qwen3-8B, and the target is {poor['target']}"

"""Drafter block: the same text with any head, drafts from the whole text's hidden states, and its refusals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_heads import BLOCK, VARIANTS, bigram_pair, block_config, block_tensors, write_block
from files import model_folder
from heads import LAYERS, write_folder

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.drafters.block import BlockDrafter
from outpace.models.base import chain
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded

PROMPTS = ("hello world hello world", "one two three four five six seven", "h")
KINDS = ("dflash", "sliding", "dspark")
pytestmark = pytest.mark.filterwarnings("error:the drafter.*failed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("block")
    model_folder(folder, "target", num_hidden_layers=LAYERS, max_position_embeddings=512)
    for kind in KINDS:
        write_block(folder / kind, **VARIANTS[kind])
    bigram_pair(folder)
    return folder


@pytest.fixture(scope="module", params=["float32", "int8"])
def target(request: pytest.FixtureRequest, folder: Path) -> Loaded:
    return load_model(folder / "target", dtype=request.param)


def open_llm(target: Loaded, head: Path, **options: Any) -> LLM:
    return LLM(target, load_draft(head, target), **{"method": "speculative", "profile": False} | options)


@pytest.mark.parametrize(("kind", "method"), [*((kind, "speculative") for kind in KINDS), ("dspark", "auto")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(
    kind: str, method: str, temperature: float, target: Loaded, folder: Path
) -> None:
    asked = {"max_tokens": 30, "temperature": temperature, "seed": 5, "ignore_eos": True}
    options = {"trials": 1.0} if method == "auto" else {}  # tried although it does not pay
    with open_llm(target, folder / kind, method=method, **options) as llm:
        plain = [one.tokens for one in llm.generate([*PROMPTS], plain=True, **asked)]
        drafted = llm.generate([*PROMPTS], **asked)
    assert [one.tokens for one in drafted] == plain
    assert sum(one.figures.drafted for one in drafted) > 0


@pytest.mark.parametrize("options", [{"runtime": "transformers"}, {"graphs": "eager"}, {"dtype": "bfloat16"}], ids=str)
def test_a_head_drafts_for_every_runtime_of_torch(options: dict[str, str], folder: Path) -> None:
    target = load_model(folder / "bigram", **({"dtype": "float32"} | options))
    with open_llm(target, folder / "good", width=1) as llm:
        plain = llm.generate(PROMPTS[1], plain=True, max_tokens=40, ignore_eos=True)[0]
        drafted = llm.generate(PROMPTS[1], max_tokens=40, ignore_eos=True)[0]
    assert drafted.tokens == plain.tokens
    assert drafted.figures.mean_accepted_length > 0.9 * (BLOCK + 1)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("width", [1, 3])
def test_a_head_that_is_right_by_construction_is_accepted(dtype: str, width: int, folder: Path) -> None:
    target = load_model(folder / "bigram", dtype=dtype)
    with open_llm(target, folder / "good", width=width) as llm:
        plain = llm.generate(PROMPTS[1], plain=True, max_tokens=40, ignore_eos=True)[0]
        drafted = llm.generate(PROMPTS[1], max_tokens=40, ignore_eos=True)[0]
    assert drafted.tokens == plain.tokens
    assert drafted.figures.mean_accepted_length > 0.9 * (BLOCK + 1)


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


def test_blocks_are_those_of_the_whole_text(target: Loaded, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For prompts, answers, a request that begins like another, several answers, and requests that are paused."""
    prompt = target.tokenizer.encode(PROMPTS[1] * 6)
    with open_llm(target, folder / "dflash") as llm:
        lengths = check_blocks(target.model, llm.engine.drafting.drafters["block"], monkeypatch)
        first = llm.generate([prompt], max_tokens=20, ignore_eos=True)[0]
        longer = [*prompt, *first.tokens, *prompt[:5]]
        llm.generate([longer, prompt[:9]], max_tokens=20, ignore_eos=True)
        llm.generate([longer], n=3, max_tokens=10, temperature=1.0, ignore_eos=True)
    assert len(lengths) > 20
    prompts = [target.tokenizer.encode(one) for one in ("one two ", "three four ", "five six ")]
    with open_llm(target, folder / "dflash", reuse=False) as llm:
        expected = [one.tokens for one in llm.generate(prompts, max_tokens=200, ignore_eos=True)]
        slots = [256, 160]
        drafter = llm.engine.drafting.drafters["block"]
        needed = target.model.stored_bytes(slots) + drafter.capabilities.memory(slots)
    with open_llm(target, folder / "dflash", reuse=False, kv_memory=needed / 2**30) as llm:
        check_blocks(target.model, llm.engine.drafting.drafters["block"], monkeypatch, every=9)
        assert [one.tokens for one in llm.generate(prompts, max_tokens=200, ignore_eos=True)] == expected


@pytest.mark.parametrize("rule", ["rejection", "multi_round", "without_replacement"])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_ratio_rules_judge_the_heads_draws(rule: str, kind: str, target: Loaded, folder: Path) -> None:
    asked = {"max_tokens": 30, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    with open_llm(target, folder / kind, rule=rule) as llm:
        [one], [again] = llm.generate([PROMPTS[1]], **asked), llm.generate([PROMPTS[1]], **asked)
    assert one.tokens == again.tokens
    assert one.figures.drafted > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_heads_confidence_limits_the_scores(
    temperature: float, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Estimated probabilities of greedy requests are the lower, the less confident the head is."""
    target, best = load_model(folder / "target", dtype="float32"), {}
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


def test_methods_and_drafters_that_cannot_run_a_head_are_refused(folder: Path) -> None:
    target = load_model(folder / "target")
    refused = [
        ({"method": "card"}, "drafter block needs to see the target's passes, .* use method auto or speculative"),
        ({"drafter": "eagle"}, "drafter eagle does not run .*, which is a trained head: use drafter block"),
        ({"drafter": "model"}, "drafter model does not run .*, which is a trained head: use drafter block"),
        ({"head_window": 1 << 31}, f"head_window is {1 << 31}, it must be between 0 and {1 << 30}"),
    ]
    for options, said in refused:
        with pytest.raises(UserError, match=said):
            open_llm(target, folder / "dflash", **options)
    with pytest.raises(UserError, match=r"drafter block does not run .*, which is a draft model: use drafter model"):
        LLM(target, load_draft(folder / "target", target), drafter="block", profile=False)
    with pytest.raises(UserError, match="drafter block needs a DFlash, DSpark or Medusa head for the target"):
        LLM(target, drafter="block", method="speculative", profile=False)


def test_a_head_drafts_with_a_window(target: Loaded, folder: Path) -> None:
    with open_llm(target, folder / "dflash", head_window=3) as llm:
        plain, drafted = (llm.generate(PROMPTS[1], plain=plain, max_tokens=20)[0].tokens for plain in (True, False))
    assert drafted == plain

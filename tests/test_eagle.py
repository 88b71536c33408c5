"""Drafter eagle: the same text with any head, accepted drafts with a good one, the prefix cache, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from files import model_folder
from heads import LAYERS, P_EAGLE, exact_pair, write_head

from outpace.api.llm import LLM
from outpace.cli import head_report
from outpace.core.errors import UserError
from outpace.engine.sequence import TokenSequence
from outpace.models.llama.torch.runtime import Llama
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded

PROMPTS = ("hello world hello world", "one two three four five six seven", "h")
RUNTIMES = ("llama", "native")
CHAIN = {"draft_length": 3, "width": 1, "drafter": "eagle"}
pytestmark = pytest.mark.filterwarnings("error:the drafter.*failed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle")
    model_folder(folder, "target", num_hidden_layers=LAYERS, max_position_embeddings=512)
    write_head(folder / "random")
    exact_pair(folder)
    return folder


@pytest.fixture(scope="module", params=RUNTIMES)
def dtype(request: pytest.FixtureRequest) -> str:
    return "float32" if request.param == "llama" else "int8"


@pytest.fixture(scope="module")
def target(dtype: str, folder: Path) -> Loaded:
    return load_model(folder / "target", dtype=dtype)


@pytest.fixture(scope="module")
def exact(dtype: str, folder: Path) -> Loaded:
    """The target for which the head `good` is right by construction."""
    return load_model(folder / "exact", dtype=dtype)


def open_llm(target: Loaded, head: Path, **options: Any) -> LLM:
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


@pytest.mark.parametrize("method", ["speculative", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(method: str, temperature: float, target: Loaded, folder: Path) -> None:
    asked = {"max_tokens": 40, "temperature": temperature, "seed": 5, "ignore_eos": True}
    options = {"trials": 1.0} if method == "auto" else {}  # tried although it does not pay
    with open_llm(target, folder / "random", method=method, **options) as llm:
        plain = [one.tokens for one in llm.generate([*PROMPTS], plain=True, **asked)]
        drafted = llm.generate([*PROMPTS], **asked)
    assert [one.tokens for one in drafted] == plain
    assert sum(one.figures.drafted for one in drafted) > 0


@pytest.mark.parametrize("shape", [{"draft_length": 3, "width": 1}, {"draft_length": 4, "width": 3, "nodes": 12}])
def test_a_head_that_is_right_by_construction_is_accepted(shape: dict[str, int], exact: Loaded, folder: Path) -> None:
    with open_llm(exact, folder / "good", **shape) as llm:
        plain = answer(llm, PROMPTS[1], plain=True)
        drafted = answer(llm, PROMPTS[1])
    assert drafted.tokens == plain.tokens
    assert drafted.figures.mean_accepted_length > 0.9 * (shape["draft_length"] + 1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_mask_slots_draft_a_tree_in_one_forward(
    temperature: float, target: Loaded, folder: Path, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("options", [{"runtime": "transformers"}, {"graphs": "eager"}, {"dtype": "bfloat16"}], ids=str)
def test_a_head_drafts_for_every_runtime_of_torch(options: dict[str, str], folder: Path) -> None:
    exact = load_model(folder / "exact", **({"dtype": "float32"} | options))
    with LLM(exact, load_draft(folder / "good", exact), method="speculative", profile=False, **CHAIN) as llm:
        plain, drafted = answer(llm, PROMPTS[1], plain=True), answer(llm, PROMPTS[1])
    assert drafted.tokens == plain.tokens
    assert drafted.figures.mean_accepted_length == 4.0


def test_passes_of_target_and_head_are_captured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only chunks of a prompt of more than 64 tokens run uncaptured."""
    exact, uncaptured = load_model(folder / "exact", dtype="float32", graphs="eager"), list[int]()
    head = load_draft(folder / "good", exact)
    score = Llama._score_hidden

    def noted(model: Any, forest: Any, layers: Any) -> Any:
        uncaptured.extend(len(part.tokens) for part in forest)
        return score(model, forest, layers)

    monkeypatch.setattr(Llama, "_score_hidden", noted)
    with LLM(exact, head, method="speculative", profile=False, **CHAIN) as llm:
        answer(llm, exact.tokenizer.encode(PROMPTS[1] * 8))
    assert min(exact.model.captures.count, head.model.num_captures) > 0
    assert all(count > 64 for count in uncaptured)


def test_a_request_that_begins_like_another_is_drafted_as_well(exact: Loaded, folder: Path) -> None:
    prompt = exact.tokenizer.encode(PROMPTS[1] * 8)
    longer = [*prompt, *exact.tokenizer.encode(" eight nine")]
    with open_llm(exact, folder / "good", **CHAIN) as llm:
        alone = answer(llm, longer)
    with open_llm(exact, folder / "good", **CHAIN) as llm:
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


def test_a_prefix_without_the_heads_state_is_read_again(exact: Loaded, folder: Path) -> None:
    prompt = exact.tokenizer.encode(PROMPTS[1] * 8)
    with open_llm(exact, folder / "good", **CHAIN) as llm:
        plain, runs = answer(llm, prompt, plain=True), watch(llm)
        drafted = answer(llm, prompt)
        again = answer(llm, prompt, plain=True)
    assert [run.history.reused for run in runs] == [0, len(prompt) - 1]
    assert drafted.tokens == plain.tokens == again.tokens
    assert drafted.figures.mean_accepted_length > 3.5


def test_paused_requests_keep_the_heads_state(exact: Loaded, folder: Path) -> None:
    """Memory for the beginning of two answers, but not for both as a whole: one is paused and read again."""
    prompts = [exact.tokenizer.encode(prompt) for prompt in ("one two ", "three four ", "five six ")]
    asked = {"max_tokens": 200, "ignore_eos": True}
    with open_llm(exact, folder / "good", reuse=False, **CHAIN) as llm:
        expected = llm.generate(prompts, **asked)
        model = exact.model
        slots = [256, 160]
        needed = model.stored_bytes(slots) + llm.engine.drafting.drafters["eagle"].capabilities.memory(slots)
    with open_llm(exact, folder / "good", reuse=False, kv_memory=needed / 2**30, **CHAIN) as llm:
        pauses = []
        release = llm.engine.memory.release
        llm.engine.memory.release = lambda sequence: (pauses.append(sequence.finish_reason), release(sequence))  # type: ignore[method-assign, assignment]
        found = llm.generate(prompts, **asked)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert None in pauses, "no request was paused"
    lengths = [one.figures.mean_accepted_length for one in found]
    assert min(lengths) > 3.5


@pytest.mark.parametrize("rule", ["rejection", "multi_round", "without_replacement"])
def test_ratio_rules_judge_the_heads_draws(rule: str, exact: Loaded, folder: Path) -> None:
    with open_llm(exact, folder / "good", rule=rule) as llm:
        [one] = llm.generate([PROMPTS[1]], max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
        [again] = llm.generate([PROMPTS[1]], max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    assert one.tokens == again.tokens
    assert one.figures.accepted > 0.9 * one.figures.drafted or rule != "rejection"  # p and q are equal


def test_a_head_drafts_with_a_window(exact: Loaded, folder: Path) -> None:
    """The head attends to its own slot only, so a window of one slot does not change its drafts."""
    with open_llm(exact, folder / "good", head_window=1, **CHAIN) as llm:
        assert answer(llm, PROMPTS[1]).figures.mean_accepted_length > 3.5


def test_a_window_of_too_many_tokens_is_refused(exact: Loaded, folder: Path) -> None:
    with pytest.raises(UserError, match=f"head_window is {1 << 31}, it must be between 0 and {1 << 30}"):
        open_llm(exact, folder / "good", head_window=1 << 31)


def test_methods_and_drafters_that_cannot_run_a_head_are_refused(exact: Loaded, target: Loaded, folder: Path) -> None:
    refused = [
        ({"method": "card"}, "drafter eagle needs to see the target's passes, .* use method auto or speculative"),
        ({"method": "planned"}, "drafter eagle.* use method auto or speculative"),
        ({"drafter": "model"}, "drafter model does not run .*, which is a trained head: use drafter eagle"),
        ({"drafter": "eagle,model"}, "drafter model does not run"),
    ]
    for options, said in refused:
        with pytest.raises(UserError, match=said):
            open_llm(exact, folder / "good", **options)
    with pytest.raises(UserError, match=r"drafter eagle does not run .*, which is a draft model: use drafter model"):
        LLM(exact, load_draft(folder / "target", exact), drafter="eagle", profile=False)
    with pytest.raises(UserError, match="drafter eagle needs an EAGLE head for the target, or its MTP layer"):
        LLM(exact, drafter="eagle", method="speculative", profile=False)
    with pytest.raises(UserError, match=r"is a trained head \(EAGLE-3\), which drafts for another model"):
        load_model(folder / "good")
    with pytest.raises(
        UserError, match="needs drafter eagle, but only drafter model chooses among drafts: name it alone"
    ):
        LLM(exact, [str(folder / "good"), str(folder / "target")], profile=False)


def test_a_head_names_its_target(folder: Path, tmp_path: Path) -> None:
    path = write_head(tmp_path / "head", "speculators")
    config = json.loads((path / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(folder / "target")
    (path / "config.json").write_text(json.dumps(config))
    with LLM(draft=str(path), profile=False) as llm:
        assert llm.target.name == str(folder / "target")
        assert llm.build_options.drafter == "eagle+prediction+ngram"
        assert answer(llm, PROMPTS[0]).tokens == answer(llm, PROMPTS[0], plain=True).tokens


def test_doctor_examines_a_head(folder: Path) -> None:
    good = head_report.examine(str(folder / "exact"), str(folder / "good"), quiet=True)
    assert good["mean_accepted_length"] > 4.5
    assert "the head fits the target" in good["advice"]
    poor = head_report.examine(str(folder / "target"), str(folder / "random"), quiet=True)
    assert poor["mean_accepted_length"] < 1.3
    assert poor["taps"] == [2, 4, 5]
    assert "the target's weights are int8" in poor["advice"]
    rows = dict(head_report.rows_of(poor))
    assert rows["vocabulary"] == "128 of 272 tokens can be proposed"
    other = head_report.advise(poor | {"trained_for": "Qwen/Qwen3-8B"})
    assert other == f"the head was trained for Qwen/Qwen3-8B, and the target is {poor['target']}"

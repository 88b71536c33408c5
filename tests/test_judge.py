"""The rule `judge`: which drafted tokens it accepts on chains and trees, in every runtime, and what it refuses."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles import QuickToy, make_drafter, make_request, write
from engine_runs import finish
from judges import THRESHOLDS, judge_file, random_judge, rule_of
from safetensors.numpy import save
from serving import served
from test_tree import random_tree
from toy import Toy

from outpace.api.llm import LLM
from outpace.core.drafting import Needs
from outpace.core.errors import UserError
from outpace.core.tree import Role, TokenTree
from outpace.core.types import Adjustments
from outpace.decoders.speculative import Speculative
from outpace.engine.engine import Engine
from outpace.models.load import Loaded, load_draft, load_model
from outpace.rules.judge import FILE, Judge, JudgedNode, JudgeFile
from outpace.server.service import system_fingerprint

PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6), (7,), (2, 7, 1, 8))
TAP = 2
WEIGHT = np.random.default_rng(5).normal(size=16)
TARGET = Toy(16, 3, 0, mlp=0.5)


def accepted_paths(tree: TokenTree, picks: Sequence[JudgedNode], window: int) -> Iterator[list[int]]:
    """All paths whose every node is the target's token or unimportant, by the definition."""
    for node in range(len(tree)):
        path = tree.path(node)
        pairs = list(itertools.pairwise(path))
        stands = (
            parent < len(picks)
            and tree.roles[child] != Role.PROBE
            and (tree.tokens[child] == picks[parent].token or (child < len(picks) and picks[child].is_unimportant))
            for parent, child in pairs
        )
        if all(stands):
            yield path[: window + 1]


@pytest.mark.parametrize("seed", range(40))
def test_the_longest_path_of_own_and_unimportant_tokens_is_taken(seed: int) -> None:
    tree, chance = random_tree(seed), random.Random(seed)
    share, rule = chance.choice([0.2, 0.5, 0.9]), Judge(Judge.Options(judge_window=chance.choice([2, 16])))
    nodes = [
        JudgedNode(chance.choice([tree.tokens[n] for n in tree.children(node)] or [9]), chance.random() < share, None)
        for node in range(len(tree))
    ]
    for rows in range(1, len(tree) + 1):  # the other nodes are late
        picks = nodes[:rows]

        def relaxed(path: Sequence[int], picks: Sequence[JudgedNode] = picks) -> int:
            return sum(tree.tokens[b] != picks[a].token for a, b in itertools.pairwise(path))

        verdict = rule.walk(tree, picks)
        paths = list(accepted_paths(tree, picks, rule.options.judge_window))
        assert verdict.path in paths
        assert len(verdict.path) == max(map(len, paths))
        assert verdict.relaxed == relaxed(verdict.path)
        if rule.options.judge_window == 16:
            assert verdict.relaxed == min(relaxed(path) for path in paths if len(path) == len(verdict.path))
        last = verdict.path[-1]
        assert verdict.next_token == (picks[last].token if last < rows else None)


def judged(path: Path, threshold: float, requests: Sequence[tuple[int, ...]] = PROMPTS, **more: Any) -> list[list[int]]:
    """Texts by drafts of another toy, at once."""
    rule = rule_of(path, judge_file(WEIGHT, TAP), threshold=threshold)
    drafter = make_drafter("garbage", QuickToy(16, 3, 0), width=more.pop("width", 1))
    with Engine(TARGET, drafter, needs=Needs(layers=(TAP,))) as engine:
        options = Speculative.Options(draft_length=3)
        runs = [engine.submit(make_request(one, rule, 25, **more), Speculative, options) for one in requests]
        return finish(engine, *runs)


@pytest.mark.parametrize("width", [1, 3])
def test_threshold_0_is_greedy_and_what_is_accepted_is_below_the_threshold(tmp_path: Path, width: int) -> None:
    plain = [write(TARGET, make_request(one, "greedy", 25)) for one in PROMPTS]
    assert judged(tmp_path / "j", 0.0, width=width) == plain
    texts = judged(tmp_path / "j", 0.5, width=width)
    if width == 1:  # a tree's nodes are shared by the requests of a batch
        assert texts == [judged(tmp_path / "j", 0.5, [one])[0] for one in PROMPTS]
    relaxed = 0
    for prompt, text in zip(PROMPTS, texts, strict=True):
        for place, token in enumerate(text):
            if token != int(TARGET._stream([*prompt, *text[:place]])[-1].argmax()):
                hidden = TARGET._stream([*prompt, *text[: place + 1]])[TAP].numpy()  # of the token itself
                assert 1 / (1 + np.exp(-hidden @ WEIGHT)) < 0.5
                relaxed += 1
    assert relaxed > 10


def test_threshold_1_accepts_every_drafted_token(tmp_path: Path) -> None:
    rule = rule_of(tmp_path / "j", judge_file(1e9 * WEIGHT, TAP), threshold=1.0)
    drafter = make_drafter("garbage", QuickToy(16, 3, 0), width=1)
    with Engine(TARGET, drafter, needs=Needs(layers=(TAP,))) as engine:
        run = engine.submit(make_request(PROMPTS[0], rule, 24), Speculative, Speculative.Options(draft_length=3))
        finish(engine, run)
    assert [step.accepted for step in run.history.steps] == [3] * 6
    assert sum(step.relaxed for step in run.history.steps) > 0


def test_excluded_tokens_are_refused_however_unimportant(tmp_path: Path) -> None:
    allowed = (1, 2, 5, 11)
    biased = tuple((token, -100.0) for token in range(16) if token not in allowed)
    for adjustments in (Adjustments(allowed=allowed), Adjustments(logit_bias=biased)):
        texts = judged(tmp_path / "j", 1.0, adjustments=adjustments, width=3)
        assert {token for text in texts for token in text} <= {*allowed}


def test_a_judge_is_read_as_it_was_written(tmp_path: Path) -> None:
    curve = np.linspace(0, 1, 6).reshape(2, 3)
    file = judge_file(WEIGHT, 7, -0.25, curve=curve, target={"weights": "a"}, tasks={"t": "b"}, facts={"c": 1.5})
    file.save(tmp_path / FILE)
    for path in (tmp_path, tmp_path / FILE):
        found = JudgeFile.read(path)
        assert (found.weight == WEIGHT).all()
        assert (found.curve == curve).all()
        assert (found.bias, found.tap, found.thresholds) == (-0.25, 7, THRESHOLDS)
        assert (found.target, found.tasks, found.facts) == ({"weights": "a"}, {"t": "b"}, {"c": 1.5})
    assert Judge(Judge.Options(str(tmp_path))).threshold == THRESHOLDS[0.9]
    assert Judge(Judge.Options(str(tmp_path), recall=0.99)).threshold == THRESHOLDS[0.99]


@pytest.mark.parametrize("at", [0, 9, 60, 200, -1])
def test_a_damaged_judge_is_refused_in_a_sentence(tmp_path: Path, at: int) -> None:
    path = tmp_path / FILE
    judge_file(WEIGHT, TAP).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:at])
    with pytest.raises(UserError, match="is no judge"):
        JudgeFile.read(path)
    path.write_bytes(whole.replace(b'"format":"1"', b'"format":"9"'))
    with pytest.raises(UserError, match="is no judge in format 1"):
        JudgeFile.read(path)
    nested = {"format": "1", "tap": "2", "thresholds": "[" * 9**5}
    path.write_bytes(save({"weight": WEIGHT, "bias": np.zeros(1), "curve": np.zeros((1, 3))}, metadata=nested))
    with pytest.raises(UserError, match=r"is no judge, or is damaged .maximum recursion depth"):
        JudgeFile.read(path)
    judge_file([*WEIGHT[:-1], np.nan], TAP).save(path)
    with pytest.raises(UserError, match="values are out of range"):
        JudgeFile.read(path)


@pytest.fixture(scope="module")
def random_judge_folder(tiny_pair: tuple[Loaded, Loaded], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_judge(tmp_path_factory.mktemp("judge"), tiny_pair[0])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"judge": ""}, "rule judge needs a judge: name one with --judge"),
        ({"judge": "nowhere"}, "judge is 'nowhere', which cannot be read"),
        ({"judge": "~no-such-user/j"}, "is no judge, or is damaged .Could not determine home"),
        ({"judge": "j" * 5000}, "which cannot be read .File name too long"),
        ({"threshold": 1.5}, "threshold is 1.5, it must be between 0 and 1"),
        ({"recall": 0.85}, "recall is 0.85, .* has thresholds for 0.8, 0.9, 0.95, 0.99"),
        ({"recall": 0.9, "threshold": 0.5}, "recall is 0.9 and threshold 0.5: give one of them"),
        ({"judge_window": 0}, "judge_window is 0"),
        ({"method": "card"}, "rule judge writes a text that depends on what was drafted, use it with method specul"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    options: dict[str, Any], says: str, tiny_pair: tuple[Loaded, Loaded], random_judge_folder: Path
) -> None:
    with pytest.raises(UserError, match=says):
        LLM(*tiny_pair, rule="judge", **{"judge": str(random_judge_folder), **options})


@pytest.mark.parametrize("name", ["tokenizer", "template", "weights", "runtime"])
def test_a_judge_of_another_target_is_refused(name: str, tiny_pair: tuple[Loaded, Loaded], tmp_path: Path) -> None:
    folder = random_judge(tmp_path, tiny_pair[0])
    file = JudgeFile.read(folder)
    judge_file(file.weight, file.tap, target={**file.target, name: "other"}).save(folder / FILE)
    with pytest.raises(UserError, match=f"was trained for a target with another {name} than .*: {name} other, not"):
        LLM(*tiny_pair, rule="judge", judge=str(folder))


def test_temperature_and_hidden_states_are_checked(
    tiny_folder: str, tiny_pair: tuple[Loaded, Loaded], random_judge_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(*tiny_pair, rule="judge", judge=str(random_judge_folder)) as llm:
        with pytest.raises(UserError, match=r"rule judge does not work with temperature 0\.7, use rule"):
            llm.generate("hello", temperature=0.7)
        assert llm.generate("hello", plain=True)[0].tokens
    target = load_model(tiny_folder)
    monkeypatch.setattr(type(target.model), "capabilities", frozenset())
    with pytest.raises(UserError, match="cannot give hidden states of its layers, models of the runtime"):
        LLM(target, rule="judge", judge=str(random_judge_folder))


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU of CUDA is here")
RUNTIMES: dict[str, Any] = {
    "native": {"dtype": "float32"},
    "captured": {"graphs": "eager"},
    "captured, exact": {"graphs": "eager", "exact": True, "dtype": "float32"},
    "transformers": {"runtime": "transformers"},
    "cuda": pytest.param({"device": "cuda", "dtype": "float32", "graphs": "cuda"}, marks=[pytest.mark.cuda, NO_GPU]),
}


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("loading", RUNTIMES.values(), ids=RUNTIMES)
def test_every_runtime_gives_the_same_verdicts_alone_and_in_batches(
    loading: dict[str, Any], width: int, tiny_folder: str, tmp_path: Path
) -> None:
    prompts, found = ["hello", "the quick brown", "a b c d"], []
    for options in ({"dtype": "float32", "runtime": "llama"}, loading):
        target = load_model(tiny_folder, **options)
        folder = random_judge(tmp_path / str(len(found)), target)
        draft = load_draft("layers:0", load_model(tiny_folder))
        with LLM(target, draft, rule="judge", judge=str(folder), threshold=0.5, width=width) as llm:
            alone = [verdicts(llm, [prompt])[0] for prompt in prompts]
            if width == 1:  # a tree's nodes are shared by the requests of a batch
                assert verdicts(llm, prompts) == alone
        assert sum(relaxed for _, steps in alone for *_, relaxed in steps) > 0
        found.append(alone)
        captures = getattr(target.model, "captures", None)
        assert (captures is not None and captures.count > 0) == ("graphs" in options)
    assert found[0] == found[1]


def verdicts(llm: LLM, prompts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int, int]]]]:
    """The tokens of each answer, and what each round drafted, accepted and accepted only by the judge."""
    streams = [llm.stream(prompt, max_tokens=24, ignore_eos=True) for prompt in prompts]
    texts = [stream.finish().tokens for stream in streams]
    steps = [stream._run.history.steps for stream in streams]
    return [
        ([*text], [(step.drafted, step.accepted, step.relaxed) for step in its])
        for text, its in zip(texts, steps, strict=True)
    ]


PROMPT, ASKED = "the quick brown", {"max_tokens": 24, "ignore_eos": True}


@pytest.mark.parametrize("method", ["auto", "speculative"])
def test_a_request_chooses_the_judge(method: str, tiny_pair: tuple[Loaded, Loaded], random_judge_folder: Path) -> None:
    options: dict[str, Any] = {"judge": str(random_judge_folder), "threshold": 0.5, "drafter": "model", "width": 1}
    with LLM(*tiny_pair, rule="judge", **options) as llm:
        expected = llm.generate(PROMPT, **ASKED)[0]
        assert expected.figures.relaxed > 0
    with LLM(*tiny_pair, rules=["judge"], method=method, **options) as llm:
        streams = [llm.stream(PROMPT, rule=rule, **ASKED) for rule in ("judge", None, "judge", "greedy")]
        judged, own, again, greedy = (stream.finish() for stream in streams)
        assert judged.tokens == again.tokens == expected.tokens
        assert own.tokens == greedy.tokens == llm.generate(PROMPT, plain=True, **ASKED)[0].tokens != judged.tokens
        assert [one.lossless for one in (judged, own, again, greedy)] == [False, True, False, True]
        with pytest.raises(UserError, match=r"rule judge does not work with temperature 0\.7"):
            llm.generate(PROMPT, rule="judge", temperature=0.7)
        with pytest.raises(UserError, match=r"unknown rule 'jugde', .* did you mean 'judge'"):
            llm.generate(PROMPT, rule="jugde")


def test_a_judge_that_a_request_may_choose_is_checked_beforehand(
    tiny_pair: tuple[Loaded, Loaded], random_judge_folder: Path, tiny_folder: str
) -> None:
    from commands import run_command

    with pytest.raises(UserError, match="rule judge needs a judge"):
        LLM(*tiny_pair, rules=["judge"])
    with LLM(*tiny_pair) as llm, pytest.raises(UserError, match="rule judge needs a judge"):
        llm.generate(PROMPT, rule="judge")
    card = LLM(*tiny_pair, method="card", rules=["judge"], judge=str(random_judge_folder))
    with card as llm, pytest.raises(UserError, match="use it with method speculative"):
        llm.generate(PROMPT, rule="judge")
    code, _, error = run_command("serve", "--target", tiny_folder, "--port", "0", "--allow-method", "judge")
    assert (code, "error: rule judge needs a judge: name one with --judge" in error) == (2, True)


def test_a_request_to_a_server_chooses_the_judge(tiny_pair: tuple[Loaded, Loaded], random_judge_folder: Path) -> None:
    options: dict[str, Any] = {"judge": str(random_judge_folder), "threshold": 0.5, "drafter": "model", "width": 1}
    asked = {**ASKED, "return_token_ids": True, "temperature": 0, "outpace": {"rule": "judge"}}
    with LLM(*tiny_pair, rules=["judge"], **options) as llm:
        expected = llm.generate(PROMPT, rule="judge", **ASKED)[0]
        with served(llm, allow_method=["judge"]) as site:
            found = [
                site.complete(PROMPT, **asked).choice["token_ids"],
                site.complete(PROMPT, **asked | {"outpace": {}}).choice["token_ids"],
            ]
            assert found == [[*expected.tokens], [*llm.generate(PROMPT, **ASKED)[0].tokens]]
            refused = site.complete(PROMPT, **asked | {"temperature": 0.7})
            assert (refused.status, "rule judge does not work with temperature 0.7" in refused.error["message"]) == (
                400,
                True,
            )
        with served(llm) as site:
            refused = site.complete(PROMPT, **asked)
            assert (refused.status, "rule 'judge' is not allowed here" in refused.error["message"]) == (400, True)


def test_a_servers_fingerprint_depends_on_the_judge_and_its_threshold(
    tiny_pair: tuple[Loaded, Loaded], tmp_path: Path
) -> None:
    found, judges = [], [random_judge(tmp_path / str(seed), tiny_pair[0], seed) for seed in (0, 1)]
    shutil.copytree(judges[0], tmp_path / "copy")
    for folder, threshold in ((judges[0], 0.5), (tmp_path / "copy", 0.5), (judges[1], 0.5), (judges[0], 0.4)):
        options = {"judge": str(folder), "threshold": threshold}
        with LLM(*tiny_pair, rules=["judge"], **options) as llm:
            found.append(system_fingerprint(llm))
    with LLM(*tiny_pair) as llm:
        found.append(system_fingerprint(llm))
    assert found[0] == found[1]
    assert len({*found}) == 4


def test_the_command_line_takes_the_judge(random_judge_folder: Path, tiny_folder: str) -> None:
    from commands import run_command

    words = ["generate", "hello", "--target", tiny_folder, "--draft", "layers:0", "--json", "--max-tokens", "12"]
    judge = ["--rule", "judge", "--judge", str(random_judge_folder)]
    said = json.loads(run_command(*words, *judge, "--recall", "0.8")[1])
    assert said["lossless"] is False
    code, _, error = run_command(*words, *judge, "--threshold", "2")
    assert code == 2
    assert "error: threshold is 2.0, it must be between 0 and 1" in error

"""Steered drafts: training and drafting compute the same, the text is the target's, what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distill_files import HEAD_TARGETS, settings, silent, target_folder
from safetensors.torch import load_file, save_file

from outpace.api.llm import LLM
from outpace.core.drafting import BuildContext, TargetFeedback
from outpace.core.errors import UserError
from outpace.core.stats import merge_stats
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.distill.batches import PackedRows, Packer, read_samples
from outpace.distill.draft_shape import DraftShape
from outpace.distill.kinds.steered import SteeredStudent
from outpace.distill.options import DistillOptions
from outpace.distill.run import distill
from outpace.distill.train import CHAIN, agreement
from outpace.drafters import build_drafter
from outpace.drafters._tree_expander import tokens_below_root
from outpace.drafters.steered import SteeredExpander
from outpace.models.heads import steering
from outpace.models.heads.config import STEERING
from outpace.models.heads.steering import DELTA, FC, NORM, NORM_BIAS, Steering
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded
from outpace.rules.greedy import Greedy

TAPS = (1, 3, 4)
PROMPTS = ("hello world hello world", "one two three four five six seven", "h")
RUNTIMES = ({"dtype": "int8"}, {"dtype": "float32"}, {"dtype": "float32", "graphs": "eager"})
pytestmark = pytest.mark.filterwarnings("error:the drafter.*failed")


def write_steering(draft: Path, size: float, **metadata: str) -> None:
    """Write a random steering of these taps to a draft's folder."""
    config = json.loads((draft / "config.json").read_text())
    width, outputs = config["hidden_size"], config["num_hidden_layers"] * config["intermediate_size"]
    generator = torch.Generator().manual_seed(5)
    shapes = {FC: (width, len(TAPS) * width), NORM: (width,), NORM_BIAS: (width,), DELTA: (outputs, width)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors[DELTA] *= size
    save_file(tensors, draft / STEERING, {"taps": "1,3,4"} | metadata)


def write_pair(folder: Path, changes: dict[str, Any]) -> DistillOptions:
    """Write a target and, in the folder plain/draft, a draft of two of its layers with a random steering."""
    target = target_folder(folder / "target", changes | {"num_hidden_layers": 4}, max_position_embeddings=512)
    weights = load_file(target / "model.safetensors")
    save_file({name: value.bfloat16() for name, value in weights.items()}, target / "model.safetensors")
    plain = settings(target, folder / "plain", stage="start", shape=DraftShape(layers="0,1"))
    distill(plain, silent)
    write_steering(plain.out / "draft", 0.1)
    return plain


@pytest.fixture(scope="module", params=HEAD_TARGETS)
def options(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DistillOptions:
    return write_pair(tmp_path_factory.mktemp(request.param), HEAD_TARGETS[request.param])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of one target and its draft."""
    return write_pair(tmp_path_factory.mktemp("steered"), {}).out.parent


def load_pair(folder: Path, **changes: Any) -> tuple[Loaded, Loaded]:
    target = load_model(folder / "target" / "model", **changes)
    return target, load_draft(folder / "plain" / "draft", target, **changes)


class Rounds:
    """Rounds of a drafter on a text of its own drafts, with random hidden states; `largest` is the largest difference
    of its scores from the trainer's, over all nodes of all trees."""

    def __init__(self, draft: Loaded, student: Any, width: int) -> None:
        self.student, self.largest, self.num_nodes = student, 0.0, 0
        context = BuildContext(draft.model)
        self.drafter: Any = build_drafter("steered", context, {"width": width, "floor": 0.0, "draft_window": 0})
        random = np.random.default_rng(3)
        self.hidden = random.standard_normal((len(TAPS), 60, student.config.hidden_size)).astype(np.float32)
        prompt = random.integers(3, 100, 9).tolist()
        self.state: Any = self.drafter.open(Request(tuple(prompt), Greedy(), 40))
        self.offsets = [1] * (len(prompt) - 1)  # of the committed tokens before the root
        self.tree = TokenTree(prompt[-1])
        for places in (range(3), range(3, len(prompt) - 1)):  # the prompt in two chunks
            self.observe([], [], places, places)
        self.drafter._expander.score = self.watched(self.drafter._expander.score)

    def observe(self, nodes: Sequence[int], tokens: Sequence[int], ids: Sequence[int], places: Sequence[int]) -> None:
        seen = TargetFeedback(list(ids), [0] * len(ids), None, torch.from_numpy(self.hidden[:, list(places)]))
        self.drafter.observe(self.state, Observation(nodes, tokens, self.tree, seen))

    def watched(self, score: Callable[..., Any]) -> Callable[..., Any]:
        def compared(jobs: Any) -> Any:
            held = score(jobs)
            [(state, tree, frontier)] = jobs
            for node, row in zip(frontier, np.asarray(held.to_dense()), strict=True):
                path = [*state.tokens, *tokens_below_root(tree, node)]
                offsets = [*self.offsets, *range(1, len(path) - len(self.offsets) + 1)]
                self.largest = max(self.largest, float(np.abs(self.trained(path, offsets) - row).max()))
                self.num_nodes += 1
            return held

        return compared

    @torch.no_grad()
    def trained(self, path: Sequence[int], offsets: Sequence[int]) -> np.ndarray:
        taps = torch.from_numpy(self.hidden[:, : len(path)].swapaxes(0, 1).reshape(1, len(path), -1))
        places, zeros = torch.arange(len(path))[None], torch.zeros(1, len(path), dtype=torch.long)
        rows = PackedRows(torch.tensor([path]), places, zeros, torch.tensor([len(path) - 1]), taps)
        return self.student.steered_logits(rows, torch.tensor([offsets]))[0].numpy()  # type: ignore[no-any-return]

    def run(self, accepted: int) -> None:
        """Grow a tree; the target accepts this number of drafted tokens."""
        for _ in range(CHAIN):
            self.drafter.grow([self.state], [self.tree])
        depths, root = [*self.tree.depths], len(self.state.tokens) - 1
        path = self.tree.path(depths.index(max(depths)))[: accepted + 1]
        ids = [self.tree.ids[node] for node in path]
        self.offsets += [1 + depth if node in self.state.slots else 1 for depth, node in enumerate(ids)]
        tokens = [*(self.tree.tokens[node] for node in path[1:]), 7]
        seen = self.tree.ids
        self.tree = TokenTree(7, root_id=self.tree.next_id, next_id=self.tree.next_id + 1)
        places = {node: root + depth for depth, node in enumerate(ids)}
        self.observe(ids, tokens, seen, [places.get(node, 0) for node in seen])


def largest_difference(draft: Loaded, student: Any, width: int) -> float:
    rounds = Rounds(draft, student, width)
    for accepted in (CHAIN, 0, 2, CHAIN, 1):
        rounds.run(accepted)
    assert rounds.num_nodes >= 5 * CHAIN * width - 10
    return rounds.largest


def student_of(options: DistillOptions) -> Any:
    shape = SteeredStudent.shape_from_options("3", str(options.out / "draft"), 0, None)
    return SteeredStudent.new(Path(str(options.target)), shape, None, taps=TAPS)


@pytest.fixture
def drafted(options: DistillOptions) -> tuple[Loaded, Any]:
    target = load_model(options.target, dtype="float32", runtime="llama")
    return load_draft(options.out / "draft", target, dtype="float32", runtime="llama"), student_of(options)


@pytest.mark.parametrize("width", [1, 3])
def test_training_and_drafting_compute_the_same_scores(width: int, drafted: tuple[Loaded, Any]) -> None:
    assert largest_difference(*drafted, width) < 1e-4


def stale(sources: Any) -> Any:
    return lambda self, state, part: [source - CHAIN for source in sources(self, state, part)]


def one_too_late(sources: Any) -> Any:
    return lambda self, state, part: [source - 1 for source in sources(self, state, part)]


def all_by_the_root(sources: Any) -> Any:
    return lambda self, state, part: [sources(self, state, part)[-1]] * len(part.tokens)


def not_normed(layer_norm: Any) -> Any:
    return lambda x, weight, bias: x


def reversed_layers(biases: Any) -> Any:
    return lambda self, features: biases(self, features).flip(1)


def reversed_taps(features: Any) -> Any:
    return lambda self, hidden: features(self, hidden.flip(0))


@pytest.mark.parametrize(
    ("owner", "name", "mistake"),
    [
        (SteeredExpander, "_sources", stale),
        (SteeredExpander, "_sources", one_too_late),
        (SteeredExpander, "_sources", all_by_the_root),
        (steering, "layer_norm", not_normed),
        (Steering, "biases", reversed_layers),
        (Steering, "features", reversed_taps),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_in_drafting_is_far_away(
    owner: Any, name: str, mistake: Any, drafted: tuple[Loaded, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mistake(getattr(owner, name)))
    assert largest_difference(*drafted, 1) > 3e-3


def test_the_kernels_steer_as_torch_does(folder: Path) -> None:
    found = []
    for changes in RUNTIMES[:2]:
        _, draft = load_pair(folder, **changes)
        given = np.random.default_rng(1).standard_normal((len(TAPS), 5, draft.model.steering.width))
        hidden = given.astype(np.float32) if changes["dtype"] == "int8" else torch.from_numpy(given)
        found.append(np.asarray(draft.model.steering.biases(draft.model.steering.features(hidden))))
    assert found[0].shape == found[1].shape
    assert 0 < np.abs(found[0] - found[1]).max() < 0.05 * np.abs(found[1]).max()


@pytest.mark.parametrize("changes", RUNTIMES[:2], ids=str)
def test_a_steering_of_zero_is_the_plain_draft(changes: dict[str, str], folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "plain", tmp_path / "plain")
    (tmp_path / "target").symlink_to(folder / "target")
    write_steering(tmp_path / "plain" / "draft", 0.0)
    target, draft = load_pair(tmp_path, **changes)
    found: dict[str, list[Any]] = {}
    for drafter in ("model", "steered"):
        with LLM(target, draft, method="speculative", drafter=drafter, profile=False) as llm:
            expander, rows = llm.engine.drafting.drafters[drafter]._expander, list[np.ndarray]()  # type: ignore[attr-defined]
            score = expander.score

            def noted(jobs: Any, score: Any = score, rows: Any = rows) -> Any:
                held = score(jobs)
                rows.append(np.asarray(held.to_dense()))
                return held

            expander.score = noted
            answers = llm.generate([*PROMPTS], max_tokens=20, ignore_eos=True)
        found[drafter] = [*(one.tokens for one in answers), [one.figures.positions for one in answers], *rows]
    assert len(found["model"]) == len(found["steered"]) > 20
    assert all(np.array_equal(*both) for both in zip(*found.values(), strict=True))


@pytest.mark.parametrize("changes", RUNTIMES, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(temperature: float, changes: dict[str, str], folder: Path) -> None:
    """Alone and in batches, by chains, trees and the planner, and where the text begins with a stored prefix."""
    target, draft = load_pair(folder, **changes)
    asked = {"max_tokens": 25, "temperature": temperature, "seed": 5, "ignore_eos": True}
    long = target.tokenizer.encode(PROMPTS[1] * 8)
    for shape in ({"method": "speculative", "width": 1}, {"method": "speculative", "width": 3}, {"method": "auto"}):
        with LLM(target, draft, profile=False, **shape) as llm:
            assert str(llm.build_options.drafter).startswith("steered")
            for prompts in ([*PROMPTS], [long], [[*long, *long[:9]]], [[*long, *long[:40]]]):
                plain = llm.generate(prompts, plain=True, **asked)
                drafted = llm.generate(prompts, **asked)
                assert [one.tokens for one in drafted] == [one.tokens for one in plain]
                assert sum(one.figures.drafted for one in drafted) > 0 or shape["method"] == "auto"


def watched(llm: LLM, name: str) -> list[Any]:
    """Collect the states of later requests."""
    drafter, states = llm.engine.drafting.drafters[name], list[Any]()
    open_state = drafter.open

    def noted(request: Request) -> Any:
        states.append(open_state(request))
        return states[-1]

    drafter.open = noted  # type: ignore[method-assign]
    return states


def test_a_stored_prefix_keeps_its_last_features(folder: Path) -> None:
    """The prefix is not read again. The features of its end are copied; of its beginning there are none."""
    target, draft = load_pair(folder, dtype="int8")
    prompt = target.tokenizer.encode(PROMPTS[1] * 8)
    with LLM(target, draft, method="speculative", draft_window=8, profile=False) as llm:
        states = watched(llm, "steered")
        first = llm.generate([prompt], max_tokens=20, ignore_eos=True)[0]
        turn = [*prompt, *first.tokens, *prompt[:4]]
        again = llm.generate([turn], max_tokens=3, ignore_eos=True)[0]
        llm.generate([[*prompt[:30], 5, 6]], max_tokens=1, ignore_eos=True)
        assert again.tokens == llm.generate([turn], max_tokens=3, ignore_eos=True, plain=True)[0].tokens
    places = [sorted(state.features) for state in states]
    assert places[1][0] < len(prompt) + len(first.tokens) - 3
    assert set(range(places[1][0], len(turn) - 1)) <= {*places[1]}
    assert places[2][0] == 29  # the prefix's last position is read again
    assert all(len(one) <= 2 * 9 for one in places)


def test_paused_requests_are_steered_on(folder: Path) -> None:
    target, draft = load_pair(folder, dtype="int8")
    prompts = [target.tokenizer.encode(prompt) for prompt in ("one two ", "three four ", "five six ")]
    asked = {"max_tokens": 90, "ignore_eos": True}
    shape: dict[str, Any] = {"method": "speculative", "reuse": False, "profile": False}
    with LLM(target, draft, **shape) as llm:
        expected = llm.generate(prompts, **asked)
        slots = [128, 96]
        needed = target.model.stored_bytes(slots) + llm.engine.drafting.drafters["steered"].capabilities.memory(slots)
    with LLM(target, draft, kv_memory=needed / 2**30, **shape) as llm:
        pauses, release = list[Any](), llm.engine.memory.release
        llm.engine.memory.release = lambda sequence: (pauses.append(sequence.finish_reason), release(sequence))  # type: ignore[method-assign, assignment]
        found = llm.generate(prompts, **asked)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert None in pauses, "no request was paused"


@pytest.fixture(scope="module")
def trained(folder: Path) -> DistillOptions:
    """A run after text and training, on top of a draft that was not trained."""
    plain = folder / "plain" / "untrained"
    shutil.copytree(folder / "plain" / "draft", plain, ignore=shutil.ignore_patterns(STEERING))
    base = settings(folder / "target" / "model", folder / "out", kind="steered", taps=TAPS, tokens=3000)
    train = replace(base.train, tokens=6000, learning_rate=1e-2)
    options = replace(base, train=train, shape=SteeredStudent.shape_from_options("3", str(plain), 0, None))
    for stage in ("text", "train"):
        distill(replace(options, stage=stage), silent)
    return options


def test_training_begins_with_the_draft_and_gains(trained: DistillOptions) -> None:
    """The draft's own files stay as they are, and the estimate is that of real decoding."""
    draft, plain = trained.out / "draft", trained.shape.draft
    assert plain is not None
    assert (draft / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    samples, _ = read_samples(trained.out / "text", 64, TAPS)
    greedy = [one for one in samples if one.temperature == 0][:40]
    packer = Packer(2, 64, 272, None, torch.device("cpu"))
    before, after = (
        agreement(
            SteeredStudent.new(Path(str(trained.target)), replace(trained.shape, draft=one), None, taps=TAPS),
            packer,
            greedy,
        )
        for one in (plain, draft)
    )
    assert before.chain is not None
    assert after.chain is not None
    assert after.chain > 1.05 * before.chain
    target = load_model(trained.target, runtime="native", kv_dtype="float16")
    shape = {"draft_length": CHAIN, "width": 1, "floor": 0.0, "nodes": CHAIN + 1, "draft_window": 0}
    with LLM(target, load_draft(draft, target, dtype="int8"), method="speculative", profile=False, **shape) as llm:
        prompts = [one.tokens[: one.prompt].tolist() for one in greedy]
        figures = merge_stats([one.figures for one in llm.generate(prompts, max_tokens=10)])
    assert figures.mean_accepted_length == pytest.approx(after.chain, rel=0.05)


def test_training_goes_on_from_a_steered_draft(trained: DistillOptions, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(trained.out / "draft", draft)
    again = replace(
        trained,
        out=tmp_path / "out",
        shape=SteeredStudent.shape_from_options("3", str(draft), 0, None),
        stage="train",
    )
    again.out.mkdir()
    (again.out / "text").symlink_to(trained.out / "text")
    distill(replace(again, train=replace(again.train, tokens=200, learning_rate=1e-4)), silent)
    before, after = (load_file(one / STEERING) for one in (draft, again.out / "draft"))
    assert 0 < (before[DELTA] - after[DELTA]).abs().max() < 0.01
    with pytest.raises(UserError, match="reads the layers 1,3,4, not 1,3: name --taps 1,3,4"):
        distill(replace(again, taps=(1, 3)), silent)


def refusals(draft: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What each refusal says, and the change of a good folder that brings it about."""
    tensors, metadata = load_file(draft / STEERING), {"taps": "1,3,4"}

    def write(changes: dict[str, Any], **more: str) -> Callable[[], None]:
        return lambda: save_file({**tensors, **changes}, draft / STEERING, metadata | more)

    for name in ("tokenizer", "template", "weights"):
        yield f"a target with another {name} than .*: {name} others, not", write({}, **{name: "others"})
    yield "taps is 'x', it must be numbers", write({}, taps="x")
    yield "hidden states after layer 9, and .* after layer 4 at most", write({}, taps="1,3,9")
    yield r"'fc.weight' has shape \[64, 192\], expected \[64, 128\]", write({}, taps="1,3")
    narrow = tensors[FC][:, :96].contiguous()
    yield r"'fc.weight' has shape \[64, 96\], expected \[64, 192\]", write({FC: narrow})
    half = tensors[DELTA][: len(tensors[DELTA]) // 2].contiguous()
    yield "'delta.weight' has shape", write({DELTA: half})
    yield "holds values that are not finite", write({NORM: tensors[NORM] * torch.inf})
    yield "is not a whole safetensors file", lambda: (draft / STEERING).write_bytes(b"torn")


def test_a_steering_that_does_not_fit_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    target = load_model(folder / "target" / "model")
    shutil.copytree(folder / "plain" / "draft", tmp_path / "draft")
    for says, change in refusals(tmp_path / "draft"):
        change()
        with pytest.raises(UserError, match=says):
            load_draft(tmp_path / "draft", target)
    write_steering(tmp_path / "draft", 0.1, runtime="Another float32")
    assert "trained on hidden states of Another float32, not NativeLlama" in str(
        load_draft(tmp_path / "draft", target).notice
    )


def test_methods_and_options_that_do_not_fit_are_refused(folder: Path) -> None:
    target, draft = load_pair(folder)
    for options, says in (
        ({"method": "card"}, "drafter steered needs to see the target's passes, .* use method auto or speculative"),
        ({"steps": 2}, r"unknown option 'steps' .* of method speculative, drafter steered"),
    ):
        with pytest.raises(UserError, match=says):
            LLM(target, draft, profile=False, **{"method": "speculative"} | options)
    plain = load_draft(str(folder / "target" / "model"), target)
    with pytest.raises(UserError, match="drafter steered needs a draft model with a steering"):
        LLM(target, plain, drafter="steered", profile=False)
    for given, says in (
        (("2", "shipped", 0), "leave out --layers and --vocab"),
        (("3", "shipped", 9), "leave out --layers and --vocab"),
        (("3", "layers", 0), "no draft comes with outpace for .*: name the draft to steer with --init FOLDER"),
        (("3", str(folder), 0), "folder of a draft"),
    ):
        with pytest.raises(UserError, match=says):
            SteeredStudent.shape_from_options(*given, str(folder / "target" / "model"))
    assert SteeredStudent.shape_from_options("3", "layers", 0, None).draft is not None  # the shipped one

"""`outpace distill --kind eagle3`: the text's hidden states, and a head whose training and serving compute the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distill_files import check_estimate, head_settings, head_targets, make_draft, silent
from heads import PARENTS, layers_of
from safetensors.torch import load_file, save_file

from outpace.core.errors import UserError
from outpace.distill.batches import PackedRows, read_samples
from outpace.distill.draft_shape import DraftShape
from outpace.distill.kinds.eagle3 import Eagle3Student
from outpace.distill.options import DistillOptions
from outpace.distill.run import distill
from outpace.distill.train import CHAIN
from outpace.models.base import Part, chain
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded

TAPS = (1, 3, 4)


@pytest.fixture(scope="module", params=head_targets("llama"))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DistillOptions:
    """A run after text and training."""
    options = head_settings(request.param, tmp_path_factory.mktemp(request.param), kind="eagle3", taps=TAPS)
    make_draft(options)
    return options


@pytest.fixture(scope="module")
def target(run: DistillOptions) -> Loaded:
    return load_model(run.target, dtype="float32", runtime="llama")


def student_of(run: DistillOptions) -> Eagle3Student:
    """Return the trained head, read from its folder."""
    draft = run.out / "draft"
    return Eagle3Student.new(
        Path(str(run.target)), DraftShape(vocab=120, draft=draft), Eagle3Student.vocab_ids(draft), taps=TAPS
    )


def sample_of(run: DistillOptions) -> tuple[list[int], np.ndarray, int]:
    """Return an answer of the shards: its tokens, hidden states [taps, tokens, width] and number of prompt tokens."""
    samples, _ = read_samples(run.out / "text", 64, TAPS)
    sample = max(samples, key=lambda one: len(one.tokens))
    assert sample.taps is not None
    hidden = sample.taps.read().reshape(len(sample.tokens), len(TAPS), -1).swapaxes(0, 1)
    return sample.tokens.tolist(), np.ascontiguousarray(hidden), sample.prompt


@torch.no_grad()
def trained_scores(
    student: Eagle3Student, text: Sequence[int], hidden: np.ndarray, slot: int, steps: int
) -> np.ndarray:
    """Return the trainer's scores of a chain that begins at a slot and reads the rest of `text`: [steps, ids]."""
    count = len(text)
    taps = torch.from_numpy(hidden.swapaxes(0, 1).reshape(1, hidden.shape[1], -1))[:, :count]
    taps = torch.cat([taps, taps.new_zeros(1, count - taps.shape[1], taps.shape[2])], 1)
    places, zeros = torch.arange(count)[None], torch.zeros(1, count, dtype=torch.long)
    rows = PackedRows(torch.tensor([text]), places, zeros, torch.tensor([slot]), taps)
    return np.stack([student._scores(out, torch.tensor([slot]))[0].numpy() for out in student.steps(rows, steps)])


def served_scores(
    model: Any, tokens: Sequence[int], hidden: np.ndarray, slot: int, part: Sequence[int], parents: Any
) -> np.ndarray:
    """Return the runtime's scores of a tree of the tokens `part`, whose root is a slot's token: [nodes, vocab]."""
    session = model.open(len(tokens) + len(part), len(tokens) + len(part))
    session.add_features(model.fuse(torch.from_numpy(hidden[:, : slot + 1])))
    model.score_sparse([chain(session, tokens[1 : slot + 1])])
    session.keep(range(slot))
    steps = layers_of(Part(session, part, parents, range(len(part))))
    return np.concatenate([np.asarray(model.score_sparse([step]).to_dense()) for step in steps])


def largest_difference(run: DistillOptions, target: Loaded, student: Eagle3Student) -> float:
    """Return the largest difference between the scores of trainer and runtime.

    It is taken over every step of a chain at several slots of an answer, and over every node of a tree.
    """
    model = load_draft(run.out / "draft", target, dtype="float32").model
    tokens, hidden, prompt = sample_of(run)
    ids, worst = student.ids, 0.0
    assert ids is not None
    for slot in range(prompt - 1, len(tokens) - 2 - CHAIN, 2):
        path = tokens[slot + 1 : slot + 1 + CHAIN]
        found = served_scores(model, tokens, hidden, slot, path, chain(None, path).parents)  # type: ignore[arg-type]
        wanted = trained_scores(student, tokens[: slot + 1] + path, hidden[:, : slot + 1], slot, CHAIN)
        worst = max(worst, float(np.abs(found[:, ids.numpy()] - wanted).max()))
    nodes = [path[0], *np.random.default_rng(1).integers(0, 100, len(PARENTS) - 1).tolist()]
    found = served_scores(model, tokens, hidden, slot, nodes, PARENTS)[:, ids.numpy()]
    for node in range(len(nodes)):
        way = [node]
        while way[0]:
            way.insert(0, PARENTS[way[0]])
        text = tokens[: slot + 1] + [nodes[one] for one in way]
        wanted = trained_scores(student, text, hidden[:, : slot + 1], slot, len(way))[-1]
        worst = max(worst, float(np.abs(found[node] - wanted).max()))
    return worst


def test_training_and_serving_compute_the_same_scores(run: DistillOptions, target: Loaded) -> None:
    student = student_of(run)
    assert largest_difference(run, target, student) < 1e-4
    scores = trained_scores(student, sample_of(run)[0], sample_of(run)[1], 5, CHAIN)
    assert scores.std(1).min() > 0.01


def test_speculators_own_class_loads_the_folder_and_computes_the_same(run: DistillOptions, tmp_path: Path) -> None:
    """Where it is installed: the scores of each draft step over an answer. The embeddings, which the folder leaves out,
    are the target's."""
    eagle3 = pytest.importorskip("speculators.models.eagle3")
    folder = shutil.copytree(run.out / "draft", tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(run.target)
    config["transformer_layer_config"]["_attn_implementation"] = "eager"
    (folder / "config.json").write_text(json.dumps(config))
    theirs = eagle3.Eagle3DraftModel.from_pretrained(folder).float().eval()
    torch.nn.init.constant_(theirs.embed_tokens.weight, torch.nan)  # says that they are missing
    theirs.load_verifier_weights()
    tokens, hidden, _ = sample_of(run)
    count, found = len(tokens) - CHAIN - 1, list[torch.Tensor]()
    theirs.lm_head.register_forward_hook(lambda module, given, out: found.append(out[0]))
    taps = torch.from_numpy(hidden.swapaxes(0, 1).reshape(1, len(tokens), -1))
    zeros, places = torch.zeros(1, len(tokens), dtype=torch.long), torch.arange(len(tokens))[None]
    with torch.no_grad():
        following = torch.tensor([tokens]).roll(-1, 1)  # slot t reads token t + 1
        theirs(taps, following, zeros, position_ids=places, ttt_steps=CHAIN)
    student = student_of(run)
    with torch.no_grad():
        steps = student.steps(PackedRows(torch.tensor([tokens]), places, zeros, zeros[0], taps), CHAIN)
        for ours, wanted in zip(steps, found, strict=True):
            scores = student._scores(ours, torch.arange(count))
            torch.testing.assert_close(scores, wanted[:count], atol=1e-4, rtol=1e-4)


def shifted(student: Any) -> None:
    fuse = student.fuse
    student.fuse = lambda batch: fuse(batch).roll(1, 1)


def without_norm(student: Any) -> None:
    normed = student._normed
    student._normed = lambda x, name: x if name.endswith("hidden_norm.weight") else normed(x, name)


def stale(student: Any) -> None:
    """Each step reads the feature of the step before."""
    fuse, normed = student.fuse, student._normed
    seen: list[torch.Tensor] = []

    def begin(batch: PackedRows) -> torch.Tensor:
        seen.clear()
        return fuse(batch)  # type: ignore[no-any-return]

    def old(x: torch.Tensor, name: str) -> torch.Tensor:
        if name.endswith("hidden_norm.weight"):
            seen.append(x)
            x = seen[max(len(seen) - 2, 0)]
        return normed(x, name)  # type: ignore[no-any-return]

    student.fuse, student._normed = begin, old


def swapped(student: Any) -> None:
    heads = student._heads
    student._heads = lambda prefix, h, table: heads(prefix, torch.cat(h.chunk(2, -1)[::-1], -1), table)


def taps_reversed(student: Any) -> None:
    fuse = student.fuse
    student.fuse = lambda batch: fuse(replace(batch, taps=torch.cat(batch.taps.chunk(len(TAPS), -1)[::-1], -1)))


@pytest.mark.parametrize("mistake", [shifted, without_norm, stale, swapped, taps_reversed])
def test_a_mistake_in_training_is_far_away(mistake: Callable[[Any], None], run: DistillOptions, target: Loaded) -> None:
    student = student_of(run)
    mistake(student)
    assert largest_difference(run, target, student) > 3e-3


def test_the_text_holds_the_states_of_the_passes_that_wrote_it(run: DistillOptions) -> None:
    tokens, hidden, _ = sample_of(run)
    model = load_model(run.target, runtime="native", kv_dtype="float16").model
    for layers, is_right in ((TAPS, True), ((0, 2, 3), False)):  # the second: off by one
        session = model.open(len(tokens), len(tokens))
        part = chain(session, tokens)._replace(hidden_rows=range(len(tokens)))
        states = np.asarray(model.score_hidden([part], layers).hidden)[:, : len(tokens) - 2]
        error = np.abs(states - hidden[:, : len(tokens) - 2]).max(-1) / np.abs(states).max(-1)
        assert (error.max() < 0.02) == is_right
    assert not hidden[:, len(tokens) - 2 :].any()


def test_the_text_stays_the_same_and_the_estimate_is_right(run: DistillOptions) -> None:
    check_estimate(run, student_of(run), "eagle", floor=0.0)


def test_training_goes_on_from_a_head(run: DistillOptions, tmp_path: Path) -> None:
    """It keeps the head's taps, also where none are named, and its vocabulary. Other layers are refused."""
    shape = Eagle3Student.shape_from_options("3", str(run.out / "draft"), 0, None)
    assert shape.vocab == 120
    (tmp_path / "out").mkdir()
    shutil.copytree(run.out / "text", tmp_path / "out" / "text")
    train = replace(run.train, tokens=300)
    again = replace(run, out=tmp_path / "out", shape=shape, stage="train", train=train, taps=None)
    distill(again, silent)
    before, after = (load_file(folder / "draft" / "model.safetensors") for folder in (run.out, again.out))
    assert before.keys() == after.keys()
    assert torch.equal(before["d2t"], after["d2t"])
    assert not torch.equal(before["fc.weight"], after["fc.weight"])
    assert (before["fc.weight"] - after["fc.weight"]).abs().max() < 0.1
    with pytest.raises(UserError, match="reads the layers 1,3,4, not 1,3: name --taps 1,3,4"):
        distill(replace(again, taps=(1, 3)), silent)


@pytest.mark.parametrize(
    ("damage", "says"), [(lambda d2t: d2t[0], "'d2t' has shape"), (lambda d2t: d2t - 1000, "d2t maps row 0 to token")]
)
def test_a_damaged_vocabulary_is_refused_by_name(damage: Any, says: str, run: DistillOptions, tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(run.out / "draft", head)
    tensors = load_file(head / "model.safetensors")
    save_file(tensors | {"d2t": damage(tensors["d2t"]).clone()}, head / "model.safetensors")
    with pytest.raises(UserError, match=says):
        distill(replace(run, stage="train", shape=Eagle3Student.shape_from_options("3", str(head), 0, None)), silent)


def test_what_does_not_fit_is_refused_by_name(run: DistillOptions, tmp_path: Path) -> None:
    for changes, says in (
        ({"kind": "medusa"}, "unknown kind 'medusa'"),
        ({"kind": "standalone"}, "the kind standalone reads none"),
        ({"stage": "start"}, "not eagle3"),
    ):
        with pytest.raises(UserError, match=says):
            replace(run, **{"stage": "all"} | changes)
    for taps, says in (((1, 9), "a layer of taps is 9"), ((3, 1), "taps is 3,1"), ((2, 2), "taps is 2,2")):
        with pytest.raises(UserError, match=says):
            distill(replace(run, taps=taps), silent)
    for options, says in (
        (("2", "layers", 0), "--layers is 2"),
        (("3", "shipped", 0), "init is 'shipped'"),
        (("3", str(run.target), 0), "folder of an EAGLE-3 head"),
        (("3", str(run.out / "draft"), 50), "leave out --vocab"),
    ):
        with pytest.raises(UserError, match=says):
            Eagle3Student.shape_from_options(*options, None)
    head = tmp_path / "head"
    shutil.copytree(run.out / "draft", head)
    config = json.loads((head / "config.json").read_text())
    assert config["outpace"].keys() == {"weights", "tokenizer", "template", "runtime"}
    config["outpace"]["weights"] = "others"
    (head / "config.json").write_text(json.dumps(config))
    target = load_model(run.target)
    assert "hidden states of other weights" in str(load_draft(head, target).notice)
    own = str(load_draft(run.out / "draft", target).notice)
    assert "hidden states" not in own
    assert "ignored" not in own  # all of its fields are known
    config["outpace"]["tokenizer"] = "another"
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="another tokenizer"):
        load_draft(head, target)

"""`outpace distill --kind eagle3, dspark, specformer`: heads whose training and serving compute the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import block_heads
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distill_files import HEAD_TARGETS, check_estimate, head_settings, make_draft, silent
from heads import PARENTS, layers_of, silent_target
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from outpace.core.errors import UserError
from outpace.distill import evaluate
from outpace.distill.batches import PackedRows, Packer, TrainingBatch, read_samples
from outpace.distill.draft_shape import DraftShape
from outpace.distill.kinds import KINDS, dspark
from outpace.distill.kinds.dspark import BLOCK, DSparkStudent
from outpace.distill.kinds.eagle3 import Eagle3Student
from outpace.distill.kinds.specformer import SLOTS, SpecFormerStudent
from outpace.distill.losses import LossOptions, loss
from outpace.distill.options import DistillOptions
from outpace.distill.run import distill, save_evaluation
from outpace.distill.train import CHAIN
from outpace.models.base import Part, chain
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded

TAPS = (1, 3, 4)
Mistake = Callable[[Any], None]


@dataclass(frozen=True)
class TrainedHead:
    """A run of a kind after text and training."""

    run: DistillOptions

    @property
    def taps(self) -> tuple[int, ...]:
        return TAPS if self.run.taps else SpecFormerStudent.default_taps(4)

    @property
    def student(self) -> Any:
        """The trained head, read from its folder."""
        kind, draft = KINDS[self.run.kind], self.run.out / "draft"
        return kind.new(
            Path(str(self.run.target)), DraftShape(vocab=120, draft=draft), kind.vocab_ids(draft), taps=self.taps
        )

    @property
    def target(self) -> Loaded:
        return load_model(self.run.target, dtype="float32", runtime="llama")

    def answer(self) -> tuple[list[int], np.ndarray, int]:
        """Return an answer of the shards: its tokens, hidden states [taps, tokens, width] and number of prompt
        tokens."""
        samples, _ = read_samples(self.run.out / "text", 64, self.taps)
        sample = max(samples, key=lambda one: len(one.tokens))
        assert sample.taps is not None
        hidden = sample.taps.read().reshape(len(sample.tokens), len(self.taps), -1).swapaxes(0, 1)
        return sample.tokens.tolist(), np.ascontiguousarray(hidden), sample.prompt

    def largest_difference(self, mistake: Mistake = lambda student: None) -> float:
        """Return the largest difference between the scores of trainer and runtime, with a mistake in the trainer."""
        student = self.student
        mistake(student)
        model = load_draft(self.run.out / "draft", self.target, dtype="float32").model
        with torch.no_grad():
            return DIFFERENCES[self.run.kind](student, model, *self.answer())


def heads(*kinds: str) -> Any:
    """Tests of these kinds, each with a target of its own and in the long tests with all of them."""
    short = {"eagle3": "llama", "dspark": "qwen3", "specformer": "gemma3"}
    cases = [
        pytest.param((kind, name), id=f"{kind}-{name}", marks=[] if name == short[kind] else pytest.mark.long)
        for kind in kinds
        for name in HEAD_TARGETS
    ]
    return pytest.mark.parametrize("head", cases, indirect=True, scope="module")


@pytest.fixture(scope="module")
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainedHead:
    kind, name = request.param
    changes = {"eagle3": {"taps": TAPS}, "dspark": {"taps": TAPS, "shape": DraftShape("2", 120)}, "specformer": {}}
    options = head_settings(name, tmp_path_factory.mktemp(name), kind=kind, **changes[kind])
    make_draft(options)
    return TrainedHead(options)


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


def eagle_difference(student: Any, model: Any, tokens: list[int], hidden: np.ndarray, prompt: int) -> float:
    """Of every step of a chain at several slots of an answer, and of every node of a tree."""
    ids, worst = student.ids, 0.0
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


def paths_from(tokens: Sequence[int], anchor: int) -> list[list[int]]:
    """Return the answer's tokens up to each slot of a block, and other paths from the same anchor."""
    true = [[*tokens[anchor : anchor + length]] for length in range(1, BLOCK + 1) if anchor + length <= len(tokens)]
    others = np.random.default_rng(anchor).integers(0, 100, (BLOCK - 1, BLOCK)).tolist()
    return [*true, *([tokens[anchor], *row[:length]] for length, row in enumerate(others, 1))]


def block_difference(student: Any, model: Any, tokens: list[int], hidden: np.ndarray, prompt: int) -> float:
    """Of scores and confidence of any slot, for blocks at several places of an answer, after its own tokens and after
    others."""
    count, worst = len(tokens), 0.0
    for anchor in range(prompt, count - 2, 2):
        taps = np.where(np.arange(count)[None, :, None] < anchor, hidden, 0.0).swapaxes(0, 1).reshape(1, count, -1)
        places, zeros = torch.arange(count)[None], torch.zeros(1, count, dtype=torch.long)
        packed = PackedRows(torch.tensor([tokens]), places, zeros, places[0], torch.from_numpy(taps).float())
        outputs = student.blocks(packed, torch.tensor([anchor]))[0, 0]
        session = model.open(count + BLOCK, count + BLOCK)
        session.add_features(model.fuse(torch.from_numpy(hidden[:, :anchor])))
        draft = model.draft([session], [tokens[anchor]])
        for path in paths_from(tokens, anchor):
            slot, before = len(path) - 1, torch.tensor(path[-1:])
            served = draft.layer(0, slot, [path])
            ids = np.arange(student.config.vocab_size) if student.ids is None else student.ids.numpy()
            scores = student.scores(outputs[slot : slot + 1], before)[0].numpy()
            found = np.asarray(served.values)[0] - scores[np.searchsorted(ids, np.asarray(served.ids))]
            confidence = student.confidence(outputs[slot : slot + 1], before)
            assert confidence is not None
            log_odds = float(F.logsigmoid(confidence)) - draft.log_confidence(0, path)
            worst = max(worst, float(np.abs(found).max()), abs(log_odds))
    return worst


def slot_difference(student: Any, model: Any, tokens: list[int], hidden: np.ndarray, prompt: int) -> float:
    """Of every slot, at each position of an answer, which the trainer computes in one batch."""
    count, worst, states = len(tokens), 0.0, torch.from_numpy(hidden)
    places, zeros = torch.arange(prompt - 1, count - 2), torch.zeros(1, count, dtype=torch.long)
    taps = states.transpose(0, 1).flatten(1)[None]
    rows = PackedRows(torch.tensor([tokens]), torch.arange(count)[None], zeros, places, taps)
    wanted = student._scores(student.slots(rows, places))
    for number, place in enumerate(places.tolist()):
        session = model.open(count + 8, count + 8)
        session.add_features(model.fuse(states[:, : place + 1]))
        found = model.score_sparse([chain(session, tokens[1 : place + 2], [place])]).to_dense()[:, student.ids]
        worst = max(worst, float((found - wanted[number]).abs().max()))
    assert wanted.std(-1).min() > 0.01
    return worst


DIFFERENCES = {"eagle3": eagle_difference, "dspark": block_difference, "specformer": slot_difference}


def changed(method: str, change: Callable[..., Any]) -> Mistake:
    """The method, given itself before its arguments, does what `change` does."""

    def mistake(student: Any) -> None:
        own = getattr(student, method)
        setattr(student, method, lambda *given: change(own, *given))

    return mistake


def without_norm(name: str) -> Mistake:
    return changed("_normed", lambda own, x, weight: x if weight.endswith(f"{name}.weight") else own(x, weight))


def reversed_parts(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat(x.chunk(count, -1)[::-1], -1)


def of_other_taps(own: Any, batch: PackedRows) -> Any:
    assert batch.taps is not None
    return own(replace(batch, taps=reversed_parts(batch.taps, len(TAPS))))


def of_taps(change: Callable[[torch.Tensor], torch.Tensor]) -> Mistake:
    """A mistake in the hidden states [rows, length, taps, width] that the trainer reads."""
    count = len(SpecFormerStudent.default_taps(4))
    return changed("normed_taps", lambda own, taps: own(change(taps.unflatten(2, (count, -1))).flatten(2)))


def of_the_step_before(student: Any) -> None:
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


def without_the_last(own: Any, batch: PackedRows) -> Any:
    """A block does not see the position before its anchor."""
    assert batch.taps is not None
    known = (batch.taps != 0).any(-1)[0].nonzero().max()
    taps = batch.taps.clone()
    taps[:, known] = taps[:, known - 1]
    return own(replace(batch, taps=taps))


MISTAKES: dict[str, Mapping[str, Mistake]] = {
    "eagle3": {
        "features shifted by one": changed("fuse", lambda own, batch: own(batch).roll(1, 1)),
        "no norm of features": without_norm("hidden_norm"),
        "features of the step before": of_the_step_before,
        "embedding and feature swapped": changed("_heads", lambda own, p, h, t: own(p, reversed_parts(h, 2), t)),
        "taps in another order": changed("fuse", of_other_taps),
    },
    "dspark": {
        "slots in another order": changed("blocks", lambda own, batch, columns: own(batch, columns).flip(2)),
        "features shifted by one": changed("features", lambda own, batch: own(batch).roll(1, 1)),
        "no norm of features": without_norm(dspark.FEATURE_NORM.removesuffix(".weight")),
        "stale features": changed("features", without_the_last),
        "taps in another order": changed("features", of_other_taps),
        "the bias of another token": changed("scores", lambda own, x, before: own(x, (before - 1).clamp_min(0))),
    },
    "specformer": {
        "tap off by one": of_taps(lambda taps: taps.roll(1, 2)),
        "stale features": of_taps(lambda taps: taps.roll(1, 1)),
        "tokens shifted by one": changed(
            "embedded", lambda own, batch: own(replace(batch, tokens=batch.tokens.roll(1, 1)))
        ),
        "no embedding": changed("embedded", lambda own, batch: 0.0 * own(batch)),
        "slots in another order": changed("slots", lambda own, batch, places: own(batch, places).flip(1)),
        **{f"no {n}": without_norm(n) for n in ("fc_norm.2", "embed_norm", "hidden_norm", "layers.0.input_layernorm")},
    },
}


@heads("eagle3", "dspark", "specformer")
def test_training_and_serving_compute_the_same_scores(head: TrainedHead) -> None:
    assert head.largest_difference() < 1e-4


@heads("eagle3", "dspark", "specformer")
def test_a_mistake_in_training_is_far_away(head: TrainedHead) -> None:
    for name, mistake in MISTAKES[head.run.kind].items():
        assert head.largest_difference(mistake) > 3e-3, name


@heads("eagle3", "dspark", "specformer")
def test_the_text_stays_the_same_and_the_estimate_is_right(head: TrainedHead) -> None:
    drafter = {"eagle3": "eagle", "dspark": "block", "specformer": "specformer"}[head.run.kind]
    check_estimate(head.run, head.student, drafter, **({"floor": 0.0} if drafter == "eagle" else {}))


@heads("eagle3", "dspark", "specformer")
def test_training_goes_on_from_a_head(head: TrainedHead, tmp_path: Path) -> None:
    """It keeps the head's taps, also where none are named, its vocabulary and its shape. Other layers are refused."""
    run, kind = head.run, KINDS[head.run.kind]
    shape = kind.shape_from_options("3", str(run.out / "draft"), 0, None)
    assert shape.vocab == 120
    shutil.copytree(run.out / "text", tmp_path / "out" / "text")
    train = replace(run.train, tokens=300)
    again = replace(run, out=tmp_path / "out", shape=shape, stage="train", train=train, taps=None)
    distill(again, silent)
    before, after = (load_file(folder / "draft" / "model.safetensors") for folder in (run.out, again.out))
    assert before.keys() == after.keys()
    assert torch.equal(before["d2t"], after["d2t"])
    assert 0 < (before["fc.weight"] - after["fc.weight"]).abs().max() < 0.1
    configs = [json.loads((folder / "draft" / "config.json").read_text()) for folder in (run.out, again.out)]
    for name in (
        "block_size",
        "mask_token_id",
        "aux_hidden_state_layer_ids",
        "eagle_aux_hidden_state_layer_ids",
        "markov_rank",
    ):
        assert configs[0].get(name) == configs[1].get(name)
    own = ",".join(map(str, head.taps))
    with pytest.raises(UserError, match=f"reads the layers {own}, not 1,3: name --taps {own}"):
        distill(replace(again, taps=(1, 3)), silent)


@heads("dspark")
def test_text_without_hidden_states_will_do(head: TrainedHead, tmp_path: Path) -> None:
    run, shape = head.run, DSparkStudent.shape_from_options("3", str(head.run.out / "draft"), 0, None)
    text = replace(run, kind="standalone", shape=DraftShape("1"), taps=None, out=tmp_path / "out", stage="text")
    distill(text, silent)
    train = replace(run.train, tokens=300)
    distill(replace(run, out=text.out, shape=shape, stage="train", train=train, taps=None), silent)
    before, after = (load_file(folder / "draft" / "model.safetensors") for folder in (run.out, text.out))
    assert 0 < (before["fc.weight"] - after["fc.weight"]).abs().max() < 0.1


@heads("eagle3", "dspark", "specformer")
def test_what_does_not_fit_is_refused_by_name(head: TrainedHead, tmp_path: Path) -> None:
    run, kind = head.run, KINDS[head.run.kind]
    trained = str(run.out / "draft")
    layers = {"dspark": (("2", trained, 0), "leave out --layers")}
    article = {"eagle3": "an EAGLE-3", "dspark": "a DSpark", "specformer": "a SpecFormer"}[run.kind]
    for options, says in (
        layers.get(run.kind, (("2", "layers", 0), f"--layers is 2, and a head of the kind {run.kind} has ")),
        (("3", str(run.target), 0), f"the kind {run.kind} it must be layers or the folder of {article} head"),
        (("3", "shipped", 0), "init is 'shipped'"),
        (("3", trained, 50), "leave out --vocab"),
    ):
        with pytest.raises(UserError, match=says):
            kind.shape_from_options(*options, None)
    folder, target = shutil.copytree(trained, tmp_path / "head"), load_model(run.target)
    config = json.loads((folder / "config.json").read_text())
    assert config["outpace"].keys() == {"weights", "tokenizer", "template", "runtime"}
    own = str(load_draft(folder, target).notice)
    assert "hidden states" not in own
    assert "ignored" not in own  # all of its fields are known
    (folder / "config.json").write_text(json.dumps(config | {"outpace": config["outpace"] | {"weights": "others"}}))
    assert "hidden states of other weights" in str(load_draft(folder, target).notice)
    (folder / "config.json").write_text(json.dumps(config | {"outpace": config["outpace"] | {"tokenizer": "another"}}))
    with pytest.raises(UserError, match="another tokenizer"):
        load_draft(folder, target)


@heads("dspark", "specformer")
def test_a_head_is_evaluated_by_the_time_of_a_block(head: TrainedHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "CONTEXT", 16)  # as for a target of short texts
    options = evaluate.EvaluationOptions(prompts=3, max_tokens=8)
    found = distill(replace(head.run, stage="judge", tasks=head.run.prompts, evaluation=options), silent)
    assert found is not None
    assert found.speed.drafts_blocks
    assert all(row.chain >= 1.0 for row in found.rows)
    save_evaluation(head.run, found)
    card = (head.run.out / "draft" / "README.md").read_text()
    assert f"layers: {list(head.taps)}" in card
    assert "draft block" in card


@heads("eagle3")
def test_speculators_own_class_loads_the_folder_and_computes_the_same(head: TrainedHead, tmp_path: Path) -> None:
    """Where it is installed: the scores of each draft step over an answer. The embeddings, which the folder leaves out,
    are the target's."""
    eagle3 = pytest.importorskip("speculators.models.eagle3")
    folder = shutil.copytree(head.run.out / "draft", tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(head.run.target)
    config["transformer_layer_config"]["_attn_implementation"] = "eager"
    (folder / "config.json").write_text(json.dumps(config))
    theirs = eagle3.Eagle3DraftModel.from_pretrained(folder).float().eval()
    torch.nn.init.constant_(theirs.embed_tokens.weight, torch.nan)  # says that they are missing
    theirs.load_verifier_weights()
    tokens, hidden, _ = head.answer()
    count, found = len(tokens) - CHAIN - 1, list[torch.Tensor]()
    theirs.lm_head.register_forward_hook(lambda module, given, out: found.append(out[0]))
    taps = torch.from_numpy(hidden.swapaxes(0, 1).reshape(1, len(tokens), -1))
    zeros, places = torch.zeros(1, len(tokens), dtype=torch.long), torch.arange(len(tokens))[None]
    with torch.no_grad():
        following = torch.tensor([tokens]).roll(-1, 1)  # slot t reads token t + 1
        theirs(taps, following, zeros, position_ids=places, ttt_steps=CHAIN)
    student = head.student
    with torch.no_grad():
        steps = student.steps(PackedRows(torch.tensor([tokens]), places, zeros, zeros[0], taps), CHAIN)
        for ours, wanted in zip(steps, found, strict=True):
            scores = student._scores(ours, torch.arange(count))
            torch.testing.assert_close(scores, wanted[:count], atol=1e-4, rtol=1e-4)


@heads("eagle3")
def test_the_text_holds_the_states_of_the_passes_that_wrote_it(head: TrainedHead) -> None:
    tokens, hidden, _ = head.answer()
    model = load_model(head.run.target, runtime="native", kv_dtype="float16").model
    for layers, is_right in ((TAPS, True), ((0, 2, 3), False)):  # the second: off by one
        session = model.open(len(tokens), len(tokens))
        part = chain(session, tokens)._replace(hidden_rows=range(len(tokens)))
        states = np.asarray(model.score_hidden([part], layers).hidden)[:, : len(tokens) - 2]
        error = np.abs(states - hidden[:, : len(tokens) - 2]).max(-1) / np.abs(states).max(-1)
        assert (error.max() < 0.02) == is_right
    assert not hidden[:, len(tokens) - 2 :].any()


@pytest.mark.parametrize(
    ("damage", "says"), [(lambda d2t: d2t[0], "'d2t' has shape"), (lambda d2t: d2t - 1000, "d2t maps row 0 to token")]
)
@heads("eagle3")
def test_a_damaged_vocabulary_is_refused_by_name(damage: Any, says: str, head: TrainedHead, tmp_path: Path) -> None:
    folder = shutil.copytree(head.run.out / "draft", tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"d2t": damage(tensors["d2t"]).clone()}, folder / "model.safetensors")
    shape = Eagle3Student.shape_from_options("3", str(folder), 0, None)
    with pytest.raises(UserError, match=says):
        distill(replace(head.run, stage="train", shape=shape), silent)


@heads("eagle3")
def test_options_that_do_not_fit_a_head_are_refused(head: TrainedHead) -> None:
    for changes, says in (
        ({"kind": "medusa"}, "unknown kind 'medusa'"),
        ({"kind": "standalone"}, "the kind standalone reads none"),
        ({"stage": "start"}, "not eagle3"),
    ):
        with pytest.raises(UserError, match=says):
            replace(head.run, **{"stage": "all"} | changes)
    for taps, says in (((1, 9), "a layer of taps is 9"), ((3, 1), "taps is 3,1"), ((2, 2), "taps is 2,2")):
        with pytest.raises(UserError, match=says):
            distill(replace(head.run, taps=taps), silent)


def batch_of(head: TrainedHead) -> TrainingBatch:
    student = head.student
    samples, _ = read_samples(head.run.out / "text", 64, TAPS)
    packer = Packer(3, 64, student.config.vocab_size, student.ids, student.device)
    return packer.batch(samples, packer.epoch(samples, 0, 0)[0])


@heads("dspark")
def test_a_slots_label_is_the_token_that_it_predicts(head: TrainedHead) -> None:
    """Slot k of a block predicts the token k + 1 places after its anchor, if it is of the same answer."""
    batch, columns = batch_of(head), torch.arange(1, 64, 4)
    columns = columns[columns < batch.packed.tokens.shape[1]]
    found = dspark._labels_of(batch, columns, BLOCK).view(len(batch.packed.tokens), len(columns), BLOCK)
    scored, length = batch.packed.scored.tolist(), batch.packed.tokens.shape[1]
    answers, kept = batch.labels.answers.tolist(), 0
    for row in range(len(found)):
        for place, column in enumerate(columns.tolist()):
            anchor = row * length + column
            for slot in range(BLOCK):
                number = scored.index(anchor + slot) if anchor + slot in scored and anchor in scored else -1
                if number >= 0 and answers[number] != answers[scored.index(anchor)]:
                    number = -1
                assert found[row, place, slot] == number
                kept += number >= 0
    assert kept > 50


@heads("dspark")
def test_what_is_after_the_anchor_does_not_matter(head: TrainedHead) -> None:
    """Neither do other sequences of the row."""
    student, batch = head.student, batch_of(head).packed
    assert batch.taps is not None
    column = torch.tensor([20])
    is_seen = (torch.arange(batch.tokens.shape[1]) < 20) & (batch.sequences == batch.sequences[:, column])
    changed = replace(batch, taps=torch.where(is_seen[..., None], batch.taps, torch.randn_like(batch.taps)))
    with torch.no_grad():
        before, after = student.blocks(batch, column), student.blocks(changed, column)
        other = student.blocks(replace(batch, taps=torch.randn_like(batch.taps)), column)
    assert torch.allclose(before, after, atol=1e-5)
    assert (before - other).abs().max() > 0.1


@heads("dspark")
def test_the_confidence_learns_the_chance_of_acceptance(head: TrainedHead) -> None:
    """After some steps it is nearer than one half."""
    student, batch = head.student, batch_of(head)
    optimizer = torch.optim.Adam([student.tensors[name] for name in (dspark.WEIGHT, dspark.BIAS)], 0.05)
    for _ in range(30):
        optimizer.zero_grad()
        loss = student.loss(batch, LossOptions(1.0, 1.0))
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        columns = torch.arange(batch.num_tokens % dspark.STRIDE, batch.packed.tokens.shape[1], dspark.STRIDE)
        found = dspark._labels_of(batch, columns, BLOCK)
        kept = (found >= 0).nonzero().squeeze(1)
        hidden, before = (
            student.blocks(batch.packed, columns).flatten(0, 2)[kept],
            dspark._tokens_before(batch, found[kept]),
        )
        log_q = student.scores(hidden, before).log_softmax(-1)
        chance = 1 - dspark.total_variation(log_q, batch.labels[found[kept]])
        score = student.confidence(hidden, before)
    assert score is not None
    assert float((score.sigmoid() - chance).abs().mean()) < 0.7 * float((chance - 0.5).abs().mean())


@heads("specformer")
def test_the_loss_is_the_weighted_mean_over_the_slots(head: TrainedHead) -> None:
    """The same by a loop over positions: slot i is compared with the label i positions later, in the same answer."""
    student, options = head.student, LossOptions()
    samples, _ = read_samples(head.run.out / "text", 64, head.taps)
    samples = sorted(samples, key=lambda one: -len(one.top_ids))[:3]
    batch = Packer(2, 64, student.config.vocab_size, student.ids, student.device).batch(samples, [[0], [1, 2]])
    total = weights = 0.0
    with torch.no_grad():
        for slot in range(SLOTS):
            rows = []
            for row, answer in enumerate(batch.labels.answers.tolist()):
                last = row + slot
                is_root = row > 0 and batch.labels.answers[row - 1] == answer
                if is_root and last < len(batch.labels.answers) and batch.labels.answers[last] == answer:
                    rows.append(row)
            if rows:
                outputs = student.slots(batch.packed, batch.packed.scored[rows] - 1)[:, slot]
                total += 0.8**slot * float(
                    loss(student._scores(outputs), batch.labels[torch.tensor(rows) + slot], options)
                )
                weights += 0.8**slot
        assert float(student.loss(batch, options)) == pytest.approx(total / weights, rel=1e-5)


@pytest.mark.parametrize("layout", ["speculators", "z-lab"])
def test_a_public_head_goes_on_by_the_formulas(layout: str, tmp_path: Path) -> None:
    """It keeps its own embedding and output layer, which differ from the target's; other variants are refused."""
    target, weights = silent_target(tmp_path, "target")
    save_arrays(weights, target / "model.safetensors")
    config = block_heads.block_config(**block_heads.DSPARK)
    head = block_heads.write_block(tmp_path / "head", layout, **block_heads.DSPARK)
    shape = DSparkStudent.shape_from_options("3", str(head), 0, None)
    student = DSparkStudent.new(target, shape, DSparkStudent.vocab_ids(head), taps=block_heads.TAPS)
    student.write(tmp_path / "again", target, shape, {})
    hidden = np.random.default_rng(0).standard_normal((3, 9, block_heads.WIDTH)).astype(np.float32)
    known = torch.from_numpy(np.pad(hidden, ((0, 0), (0, 1), (0, 0))).swapaxes(0, 1).reshape(1, 10, -1))
    text = torch.arange(40, 50)[None]
    packed = PackedRows(text, torch.arange(10)[None], torch.zeros_like(text), torch.arange(10), known)
    reference = block_heads.BlockReference(config, block_heads.block_tensors(config))
    again = DSparkStudent.new(target, replace(shape, draft=tmp_path / "again"), student.ids, taps=block_heads.TAPS)
    for found, bound in ((student, 1e-4), (again, 0.3)):  # the second was rounded to bfloat16
        with torch.no_grad():
            outputs = found.blocks(packed, torch.tensor([9]))[0, 0]
            for path in ([49], [49, 7, 200]):
                slot, before = len(path) - 1, torch.tensor(path[-1:])
                wanted, confidence = reference.below(hidden, path)
                scores, odds = found.scores(outputs[slot][None], before), found.confidence(outputs[slot][None], before)
                assert np.abs(scores[0].numpy() - wanted).max() < bound
                assert odds is not None
                assert float(odds.sigmoid()) == pytest.approx(confidence, abs=bound / 10)
    for changes in ({"markov_head_type": "gated"}, {"sample_from_anchor": False}, {"is_causal": True}):
        other = block_heads.write_block(tmp_path / str(changes), "z-lab", **block_heads.DSPARK | changes)
        with pytest.raises(UserError, match="such heads are not trained"):
            DSparkStudent.new(target, replace(shape, draft=other), student.ids, taps=block_heads.TAPS)

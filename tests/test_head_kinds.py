"""All kinds of heads: the forward against the formulas in every runtime, the same text, and accepted drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import block_heads
import heads
import joined_heads
import medusa_heads
import numpy as np
import pytest
import slot_heads
import torch
from files import model_folder
from heads import LAYERS, VOCAB, WIDTH
from test_block_heads import draft, reference_of, rows_of
from test_block_heads import expected as expected_blocks
from test_heads import distance, expected, tree_logits

from outpace.api.llm import LLM
from outpace.models.base import Part, chain
from outpace.models.heads import native as native_heads
from outpace.models.llama.native import runtime as native_runtime
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded

SEEDS, LENGTHS = (0, 1, 2), (13, 6, 1)  # of the texts of a batch
PROMPTS = ("hello world hello world", "one two three four five six seven", "h")
RUNTIMES = {"llama": {"dtype": "float32"}, "captured": {"dtype": "float32", "graphs": "eager"}}
RUNTIMES["native"] = {"dtype": "int8"}
NATIVE = {"dtype": "int8", "kv_dtype": "float32"}
pytestmark = pytest.mark.filterwarnings("error:the drafter.*failed")


class Kind(NamedTuple):
    """`write` takes a folder, a variant and a layout; `wanted` the target's folder, a variant and a mistake. `scores`
    are logits of several texts. `near`: the largest difference in int8, as a part of their deviation. `whole`: variants
    that have all weights, so that the emulated kernels can run them."""

    variants: Sequence[str]
    layouts: Sequence[str]
    mistakes: Sequence[str]
    write: Callable[[Path, str, str], Path | str]
    scores: Callable[[Any], np.ndarray]
    wanted: Callable[[Path, str, str], np.ndarray]
    near: float
    whole: Sequence[str] = ()


def tree_scores(model: Any) -> np.ndarray:
    return np.array(tree_logits(model, SEEDS))


def eagle3_scores(target: Path, variant: str, mistake: str) -> np.ndarray:
    config = heads.head_config(**heads.VARIANTS[variant])
    reference = heads.Reference(config, heads.head_tensors(config), mistake)
    return np.array([expected(reference, seed) for seed in SEEDS])


def joined_scores(target: Path, variant: str, mistake: str) -> np.ndarray:
    is_mtp = target.name == "mimo"
    names = joined_heads.MTP_TENSORS if is_mtp else joined_heads.VARIANTS[variant]
    reference = joined_heads.JoinedReference(target, joined_heads.joined_tensors(names), mistake, is_mtp)
    return np.array([expected(reference, seed) for seed in SEEDS])


def block_scores(target: Path, variant: str, mistake: str) -> np.ndarray:
    return expected_blocks(reference_of(block_heads.VARIANTS[variant], mistake))


def given(model: Any, states: np.ndarray) -> Any:
    """The hidden states as the target's runtime gives them."""
    return states if model.dtype is None else torch.from_numpy(states)


def last_states() -> np.ndarray:
    return np.random.default_rng(4).standard_normal((3, WIDTH)).astype(np.float32)


def medusa_scores(model: Any) -> np.ndarray:
    """Logits [texts, heads, vocab] after texts whose hidden states come in pieces."""
    sessions = []
    for state in last_states():
        session = model.open(100, 10)
        for piece in (np.ones((1, 5, WIDTH), np.float32), np.stack([np.zeros(WIDTH, np.float32), state])[None]):
            session.add_features(model.fuse(given(model, piece)))
        sessions.append(session)
    found = model.draft(sessions, [1] * len(sessions))
    assert [session.length for session in sessions] == [7] * len(sessions)
    count = range(medusa_heads.HEADS)
    return np.array(
        [[np.asarray(found.layer(n, head, [(1,)]).to_dense()[0]) for head in count] for n in range(len(sessions))]
    )


def wanted_of_medusa(target: Path, variant: str, mistake: str) -> np.ndarray:
    tensors = medusa_heads.medusa_tensors()
    return np.array([medusa_heads.medusa_logits(target, tensors, state, mistake) for state in last_states()])


def text_of(length: int) -> tuple[np.ndarray, list[int]]:
    """Return the hidden states [taps, length, width] of a text, and the token after each position."""
    random = np.random.default_rng(length)
    hidden = random.standard_normal((len(slot_heads.TAPS), length, WIDTH)).astype(np.float32)
    return hidden, random.integers(0, VOCAB, length).tolist()


def slot_scores(model: Any, lengths: Sequence[int] = LENGTHS) -> np.ndarray:
    """Logits of all slots after texts of these lengths, which are read in two pieces: [texts, slots, vocab]"""
    parts = []
    for length in lengths:
        session, (hidden, tokens), first = model.open(100, 60), text_of(length), length // 2
        if first:
            session.add_features(model.fuse(given(model, hidden[:, :first])))
            model.score_sparse([chain(session, tokens[:first])])
            session.keep(range(first))
        session.add_features(model.fuse(given(model, hidden[:, first:])))
        parts.append(chain(session, tokens[first:], [length - first - 1]))
    found = model.score_sparse(parts).to_dense()
    return np.asarray(found).reshape(len(lengths), slot_heads.SLOTS, -1)


def wanted_of_slots(target: Path, variant: str, mistake: str) -> np.ndarray:
    reference = slot_heads.reference_of(target, variant, mistake)
    found = np.full((len(LENGTHS), slot_heads.SLOTS, VOCAB), -np.inf)
    found[..., reference.ids] = [reference(*text_of(length)) for length in LENGTHS]
    return found


BLOCKS = [name for name in block_heads.VARIANTS if not name.startswith("dspark")]
KINDS = {
    "eagle3": Kind(
        [*heads.VARIANTS],
        [*heads.LAYOUTS],
        heads.MISTAKES,
        lambda folder, variant, layout: heads.write_head(folder, layout or "midlayer", **heads.VARIANTS[variant]),
        tree_scores,
        eagle3_scores,
        0.25,
        [*heads.VARIANTS],
    ),
    "eagle1": Kind(
        ["norms", *(one for one in joined_heads.VARIANTS if one != "norms")],
        [*joined_heads.LAYOUTS],
        joined_heads.JOINED_MISTAKES,
        lambda folder, variant, layout: joined_heads.write_eagle1(folder, variant, layout or "eagle"),
        tree_scores,
        joined_scores,
        0.3,
        ["own embedding"],
    ),
    "mimo": Kind(
        ["norms"],
        [],
        joined_heads.JOINED_MISTAKES,
        lambda folder, variant, layout: "mtp",
        tree_scores,
        joined_scores,
        0.3,
    ),
    "block": Kind(
        BLOCKS,
        [],  # `test_block_heads.py` compares them
        block_heads.MISTAKES,
        lambda folder, variant, layout: block_heads.write_block(folder, **block_heads.VARIANTS[variant]),
        lambda model: rows_of(draft(model)),
        block_scores,
        0.35,
        BLOCKS,
    ),
    "medusa": Kind(
        ["two blocks"],
        [*medusa_heads.LAYOUTS],
        medusa_heads.MEDUSA_MISTAKES,
        lambda folder, variant, layout: medusa_heads.write_medusa(folder, layout or "named"),
        medusa_scores,
        wanted_of_medusa,
        0.2,
    ),
    "specformer": Kind(
        [*slot_heads.VARIANTS],
        [],
        slot_heads.MISTAKES,
        lambda folder, variant, layout: slot_heads.write_slots(folder, **slot_heads.VARIANTS[variant]),
        slot_scores,
        wanted_of_slots,
        0.45,
    ),
}
WRITERS: dict[str, Callable[[Path], Path | str]] = {  # heads of random weights
    **{kind: partial(one.write, variant=one.variants[0], layout="") for kind, one in KINDS.items() if kind != "block"},
    "peagle": partial(heads.write_head, **heads.P_EAGLE),
    "dflash": block_heads.write_block,
    "jetspec": partial(block_heads.write_block, **block_heads.VARIANTS["jetspec"]),
    "sliding": partial(block_heads.write_block, **block_heads.VARIANTS["sliding"]),
    "dspark": partial(block_heads.write_block, **block_heads.VARIANTS["dspark"]),
}


def cases(field: str) -> list[tuple[str, str]]:
    """Return every kind with each of its variants, layouts or mistakes."""
    return [(kind, one) for kind, its in KINDS.items() for one in getattr(its, field)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    model_folder(folder, "target", num_hidden_layers=LAYERS, max_position_embeddings=512)
    joined_heads.write_mimo(folder)
    return folder


@pytest.fixture(scope="module")
def targets(folder: Path) -> dict[tuple[str, str], Loaded]:
    """Both targets in every runtime."""
    names = ("target", "mimo")
    return {(one, name): load_model(folder / name, **RUNTIMES[one]) for one in RUNTIMES for name in names}


def name_of(kind: str) -> str:
    """The target of a kind."""
    return "mimo" if kind == "mimo" else "target"


def load(targets: Any, kind: str, path: Path | str, runtime: str = "llama") -> Any:
    return load_draft(path, targets[runtime, name_of(kind)], **(NATIVE if runtime == "native" else {})).model


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(("kind", "variant"), cases("variants"))
def test_the_forward_is_that_of_the_formulas(
    kind: str,
    variant: str,
    runtime: str,
    targets: Any,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The native kernels give the bits of their emulation."""
    its, path = KINDS[kind], KINDS[kind].write(tmp_path / "head", variant, "")
    model, wanted = load(targets, kind, path, runtime), its.wanted(folder / name_of(kind), variant, "")
    found = its.scores(model)
    near = its.near * np.std(wanted[np.isfinite(wanted)]) if runtime == "native" else 1e-4
    assert distance(found, wanted) < near
    assert (model.num_captures > 0) == (runtime == "captured")
    if runtime == "native" and variant in its.whole:
        from outpace_kernels import emulation

        monkeypatch.setattr(native_heads, "kernels", emulation)
        monkeypatch.setattr(native_runtime, "kernels", emulation)
        assert np.array_equal(found, its.scores(load(targets, kind, path, runtime)))


@pytest.mark.parametrize(("kind", "layout"), cases("layouts"))
def test_every_layout_gives_the_same_scores(kind: str, layout: str, targets: Any, tmp_path: Path) -> None:
    its = KINDS[kind]
    one, other = (its.write(tmp_path / (name or "usual"), its.variants[0], name) for name in ("", layout))
    assert np.array_equal(its.scores(load(targets, kind, one)), its.scores(load(targets, kind, other)))


@pytest.mark.parametrize(("kind", "mistake"), cases("mistakes"))
def test_a_mistake_in_the_forward_is_far_away(
    kind: str, mistake: str, targets: Any, folder: Path, tmp_path: Path
) -> None:
    its = KINDS[kind]
    found = its.scores(load(targets, kind, its.write(tmp_path / "head", its.variants[0], "")))
    assert distance(found, its.wanted(folder / name_of(kind), its.variants[0], mistake)) > 0.1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("kind", "method", "runtime"),
    [
        *((kind, "speculative", runtime) for kind in WRITERS for runtime in RUNTIMES),
        *((kind, "auto", runtime) for kind in ("eagle3", "dspark") for runtime in ("llama", "native")),
    ],
)
def test_the_text_is_that_of_plain_decoding(
    kind: str, method: str, runtime: str, temperature: float, targets: Any, tmp_path: Path
) -> None:
    target = targets[runtime, name_of(kind)]
    head = load_draft(WRITERS[kind](tmp_path / "head"), target)
    asked = {"max_tokens": 40, "temperature": temperature, "seed": 5, "ignore_eos": True}
    options = {"trials": 1.0} if method == "auto" else {}  # tried although it does not pay
    with LLM(target, head, method=method, profile=False, **options) as llm:
        assert llm.build_options.drafter.split("+")[0] == head.model.drafter
        plain = [one.tokens for one in llm.generate([*PROMPTS], plain=True, **asked)]
        drafted = llm.generate([*PROMPTS], **asked)
    assert [one.tokens for one in drafted] == plain
    assert sum(one.figures.drafted for one in drafted) > 0
    assert (head.model.num_captures > 0) == (runtime == "captured")


EXACT: dict[str, tuple[Callable[[Path], Any], str, int]] = {
    # what writes a target and a head, the target's name, and the number of drafts in a round
    "good": (heads.exact_pair, "exact", 3),
    "joined": (joined_heads.exact_joined, "exact", 3),
    "mtp": (joined_heads.exact_joined, "mtp", 3),
    "good block": (block_heads.bigram_pair, "bigram", block_heads.BLOCK),
    "medusa": (medusa_heads.exact_medusa, "chained", medusa_heads.HEADS),
    "slots": (slot_heads.exact_slots, "cycled", slot_heads.SLOTS),
    "states": (slot_heads.exact_slots, "cycled", slot_heads.SLOTS),
}


def exact(folder: Path, name: str, **options: Any) -> tuple[Loaded, Loaded, dict[str, Any]]:
    """A target, a head that drafts what it writes, and options for chains."""
    write, target_name, length = EXACT[name]
    write(folder)
    target = load_model(folder / target_name, **({"dtype": "float32"} | options))
    head = load_draft("auto" if name == "mtp" else folder / name.split()[0], target)
    shape = {} if head.drafter == "block" else {"draft_length": length}
    return target, head, {"method": "speculative", "profile": False, "width": 1, **shape}


LOADED: list[dict[str, str]] = [{}, {"graphs": "eager"}, {"dtype": "bfloat16"}, {"dtype": "int8"}]


@pytest.mark.parametrize(
    ("name", "options", "tree"),
    [
        *((name, options, {}) for name in EXACT for options in LOADED),
        *((name, {"runtime": "transformers"}, {}) for name in ("good", "good block")),
        ("good", {}, {"draft_length": 4, "width": 3, "nodes": 12}),
        ("good block", {"dtype": "int8"}, {"width": 3}),
    ],
    ids=str,
)
def test_a_head_that_is_right_by_construction_is_accepted(
    name: str, options: dict[str, str], tree: dict[str, int], tmp_path: Path
) -> None:
    """Also by a request with the first one's text as its prefix, and by several answers."""
    target, head, shape = exact(tmp_path, name, **options)
    prompt = target.tokenizer.encode(PROMPTS[1] * 6)
    sampled = {"n": 2, "temperature": 0.5, "seed": 1}
    with LLM(target, head, **shape | tree) as llm:
        for asked, more in ((prompt, {}), ([*prompt, *prompt[:7]], {}), (prompt, sampled)):
            plain = llm.generate([asked], plain=True, max_tokens=40, ignore_eos=True, **more)
            drafted = llm.generate([asked], max_tokens=40, ignore_eos=True, **more)
            assert [one.tokens for one in drafted] == [one.tokens for one in plain]
            assert more or drafted[0].figures.mean_accepted_length > 0.85 * (EXACT[name][2] + 1)


@pytest.mark.parametrize("rule", ["rejection", "multi_round", "without_replacement"])
@pytest.mark.parametrize("name", ["good", "joined", "good block", "dspark", "medusa", "slots"])
def test_ratio_rules_judge_the_heads_draws(name: str, rule: str, targets: Any, tmp_path: Path) -> None:
    if name in EXACT:
        target, head, _ = exact(tmp_path, name, dtype="int8")
    else:
        target = targets["native", "target"]
        head = load_draft(WRITERS[name](tmp_path / "head"), target)
    asked = {"max_tokens": 30, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    with LLM(target, head, method="speculative", profile=False, rule=rule) as llm:
        [one], [again] = llm.generate([PROMPTS[1]], **asked), llm.generate([PROMPTS[1]], **asked)
    assert one.tokens == again.tokens
    assert one.figures.drafted > 0
    assert one.figures.accepted > 0 or name == "dspark"
    if (name, rule) == ("good", "rejection"):  # p and q are equal
        assert one.figures.accepted > 0.9 * one.figures.drafted


@pytest.mark.parametrize("runtime", ["llama", "native"])
def test_a_batch_and_a_copied_prefix_give_the_same_slots(runtime: str, targets: Any, tmp_path: Path) -> None:
    model = load(targets, "specformer", slot_heads.write_slots(tmp_path / "head"), runtime)
    together = slot_scores(model)
    for number, length in enumerate(LENGTHS):
        assert distance(slot_scores(model, [length])[0], together[number]) < (1e-4 if runtime == "llama" else 1e-30)
    whole, copied, (hidden, tokens) = model.open(100, 60), model.open(100, 60), text_of(13)
    whole.add_features(model.fuse(given(model, hidden[:, :9])))
    model.score_sparse([chain(whole, tokens[:9])])
    whole.keep(range(9))
    copied.start_from(whole, 7)
    copied.add_features(model.fuse(given(model, hidden[:, 7:])))
    found = model.score_sparse([Part(copied, tokens[7:], range(-1, 5), [5])])
    assert distance(np.asarray(found.to_dense()), together[0]) < 1e-4
    assert model.weight_bytes > 0


@pytest.mark.parametrize("options", [{}, {"graphs": "eager"}, {"dtype": "int8"}], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_paused_requests_keep_their_drafts(name: str, options: dict[str, str], tmp_path: Path) -> None:
    """Memory for the beginning of three answers, but not for all as a whole: one is paused and read again."""
    target, head, shape = exact(tmp_path, name, **options)
    prompts, pauses = [target.tokenizer.encode(one) for one in ("one two ", "three four ", "five six ")], list[Any]()
    asked = {"max_tokens": 200, "ignore_eos": True}
    with LLM(target, head, reuse=False, **shape) as llm:
        plain = [one.tokens for one in llm.generate(prompts, plain=True, **asked)]
        memory = llm.engine.drafting.drafters[head.drafter].capabilities.memory
        rooms = [[128, 128], [256]] if "graphs" in options else [[256, 160]]  # rows of a pool are powers of two
        needed = max(target.model.stored_bytes(slots) + memory(slots) for slots in rooms)
    with LLM(target, head, reuse=False, kv_memory=needed / 2**30, **shape) as llm:
        release = llm.engine.memory.release
        llm.engine.memory.release = lambda one: (pauses.append(one.finish_reason), release(one))  # type: ignore[method-assign, assignment]
        found = llm.generate(prompts, **asked)
    assert None in pauses, "no request was paused"
    assert [one.tokens for one in found] == plain
    assert min(one.figures.mean_accepted_length for one in found) > 0.8 * (EXACT[name][2] + 1)

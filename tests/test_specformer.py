"""SpecFormer heads: the forward against the formulas, the same text, accepted drafts, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files import model_folder
from heads import LAYERS, VOCAB, WIDTH, write_folder
from safetensors.numpy import load_file
from slot_heads import (
    CONFIG,
    MISTAKES,
    SLOTS,
    TAPS,
    VARIANTS,
    SlotReference,
    exact_slots,
    slot_tensors,
    write_slots,
)

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.models.base import Part, chain
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded

LENGTHS = (13, 6, 1)  # of the texts of a batch
PROMPTS = ("hello world hello world", "one two three four five six seven", "h")
DTYPES = ("float32", "int8")
pytestmark = pytest.mark.filterwarnings("error:the drafter.*failed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("specformer")
    model_folder(folder, "target", num_hidden_layers=LAYERS, max_position_embeddings=512)
    for name, changes in VARIANTS.items():
        write_slots(folder / name, **changes)
    exact_slots(folder)
    return folder


@pytest.fixture(scope="module")
def targets(folder: Path) -> dict[tuple[str, str], Loaded]:
    """Every target, by its dtype and name."""
    return {(dtype, name): load_model(folder / name, dtype=dtype) for dtype in DTYPES for name in ("target", "cycled")}


def load(target: Loaded, path: Path) -> Any:
    given = {"dtype": "int8", "kv_dtype": "float32"} if target.model.dtype is None else {}
    return load_draft(path, target, **given).model


def text_of(length: int) -> tuple[np.ndarray, list[int]]:
    """Return the hidden states [taps, length, width] of a text, and the token after each position."""
    random = np.random.default_rng(length)
    hidden = random.standard_normal((len(TAPS), length, WIDTH)).astype(np.float32)
    return hidden, random.integers(0, VOCAB, length).tolist()


def feed(model: Any, session: Any, hidden: np.ndarray) -> None:
    session.add_features(model.fuse(hidden if model.dtype is None else torch.from_numpy(hidden)))


def scores(model: Any, lengths: Sequence[int] = LENGTHS) -> np.ndarray:
    """Return the logits of all slots after texts of these lengths, which are read in two pieces: [texts, slots,
    vocab]."""
    parts = []
    for length in lengths:
        session, (hidden, tokens), first = model.open(100, 60), text_of(length), length // 2
        if first:
            feed(model, session, hidden[:, :first])
            model.score_sparse([chain(session, tokens[:first])])
            session.keep(range(first))
        feed(model, session, hidden[:, first:])
        parts.append(chain(session, tokens[first:], [length - first - 1]))
    return np.asarray(model.score_sparse(parts).to_dense()).reshape(len(lengths), SLOTS, -1)


def expected(folder: Path, variant: str = "llama", mistake: str = "") -> np.ndarray:
    config, stored = CONFIG | VARIANTS[variant], load_file(folder / "target" / "model.safetensors")
    table = stored["model.embed_tokens.weight"]
    target = {"embedding": table, "output": table, "norm.weight": stored["model.norm.weight"]}
    reference = SlotReference(config, slot_tensors(config), target, mistake)
    found = np.full((len(LENGTHS), SLOTS, VOCAB), -np.inf)
    found[..., reference.ids] = [reference(*text_of(length)) for length in LENGTHS]
    return found


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    known = np.isfinite(wanted)
    assert (np.isfinite(found) == known).all()
    return float(np.abs(found[known] - wanted[known]).max())


@pytest.mark.parametrize("runtime", ["llama", "captured"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_forward_is_that_of_the_formulas(variant: str, runtime: str, targets: Any, folder: Path) -> None:
    captured = runtime == "captured"
    target = (
        load_model(folder / "target", dtype="float32", graphs="eager") if captured else targets["float32", "target"]
    )
    model = load(target, folder / variant)
    assert distance(scores(model), expected(folder, variant)) < 1e-4
    assert not captured or min(model.layers.num_captures, model.slots.num_captures) > 0


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_forward_is_far_away(mistake: str, targets: Any, folder: Path) -> None:
    assert (
        distance(scores(load(targets["float32", "target"], folder / "llama")), expected(folder, "llama", mistake)) > 0.1
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_native_scores_are_near_the_formulas(variant: str, targets: Any, folder: Path) -> None:
    wanted = expected(folder, variant)
    found = scores(load(targets["int8", "target"], folder / variant))
    assert distance(found, wanted) < 0.45 * np.std(wanted[np.isfinite(wanted)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_and_a_copied_prefix_give_the_same_scores(dtype: str, targets: Any, folder: Path) -> None:
    model = load(targets[dtype, "target"], folder / "llama")
    together = scores(model)
    for number, length in enumerate(LENGTHS):
        assert distance(scores(model, [length])[0], together[number]) < (1e-4 if dtype == "float32" else 1e-30)
    whole, copied, (hidden, tokens) = model.open(100, 60), model.open(100, 60), text_of(13)
    feed(model, whole, hidden[:, :9])
    model.score_sparse([chain(whole, tokens[:9])])
    whole.keep(range(9))
    copied.start_from(whole, 7)
    feed(model, copied, hidden[:, 7:])
    found = model.score_sparse([Part(copied, tokens[7:], range(-1, 5), [5])])
    assert distance(np.asarray(found.to_dense()), together[0]) < 1e-4
    assert model.weight_bytes > 0


@pytest.mark.parametrize(("method", "width"), [("speculative", 1), ("speculative", 3), ("auto", 2)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_text_is_that_of_plain_decoding(
    dtype: str, temperature: float, method: str, width: int, targets: Any, folder: Path
) -> None:
    target, asked = targets[dtype, "target"], {"max_tokens": 30, "temperature": temperature, "seed": 5}
    head = load_draft(folder / "reduced vocabulary", target)
    with LLM(target, head, method=method, profile=False, width=width) as llm:
        assert str(llm.build_options.drafter).split("+")[0] == "specformer"
        plain = [one.tokens for one in llm.generate([*PROMPTS], plain=True, ignore_eos=True, **asked)]
        drafted = llm.generate([*PROMPTS], ignore_eos=True, **asked)
    assert [one.tokens for one in drafted] == plain
    assert sum(one.figures.drafted for one in drafted) > 0 or method == "auto"


@pytest.mark.parametrize("name", ["slots", "states"])
@pytest.mark.parametrize("options", [{}, {"graphs": "eager"}, {"dtype": "bfloat16"}, {"dtype": "int8"}], ids=str)
def test_a_head_that_is_right_by_construction_is_accepted(options: dict[str, str], name: str, folder: Path) -> None:
    """Also by a request with the first one's text as its prefix, and by several answers. In prompts the last state does
    not determine the next token, so the first draft from states is wrong."""
    target = load_model(folder / "cycled", **({"dtype": "float32"} | options))
    prompt, shape = target.tokenizer.encode(PROMPTS[1] * 6), {"width": 1, "draft_length": SLOTS}
    with LLM(target, load_draft(folder / name, target), method="speculative", profile=False, **shape) as llm:
        for asked, more in (
            (prompt, {}),
            ([*prompt, *prompt[:7]], {}),
            (prompt, {"n": 2, "temperature": 0.5, "seed": 1}),
        ):
            plain = llm.generate([asked], plain=True, max_tokens=40, ignore_eos=True, **more)
            drafted = llm.generate([asked], max_tokens=40, ignore_eos=True, **more)
            assert [one.tokens for one in drafted] == [one.tokens for one in plain]
            assert drafted[0].figures.mean_accepted_length > 0.85 * (SLOTS + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_paused_requests_keep_the_heads_state(dtype: str, targets: Any, folder: Path) -> None:
    """Memory for the beginning of three answers, but not for all as a whole: one is paused and read again."""
    target, pauses = targets[dtype, "cycled"], list[Any]()
    prompts = [target.tokenizer.encode(one) for one in ("one two ", "three four ", "five six ")]
    options: dict[str, Any] = {"method": "speculative", "profile": False, "reuse": False, "width": 1}
    options |= {"draft_length": SLOTS}
    with LLM(target, load_draft(folder / "states", target), **options) as llm:
        whole = llm.generate(prompts, max_tokens=200, ignore_eos=True)
        slots = [256, 160]
        memory = llm.engine.drafting.drafters["specformer"].capabilities.memory
        needed = target.model.stored_bytes(slots) + memory(slots)
    with LLM(target, load_draft(folder / "states", target), kv_memory=needed / 2**30, **options) as llm:
        release = llm.engine.memory.release
        llm.engine.memory.release = lambda one: (pauses.append(one.finish_reason), release(one))  # type: ignore[method-assign, assignment]
        found = llm.generate(prompts, max_tokens=200, ignore_eos=True)
    assert [one.tokens for one in found] == [one.tokens for one in whole]
    assert None in pauses, "no request was paused"
    assert min(one.figures.mean_accepted_length for one in found) > 0.8 * (SLOTS + 1)


@pytest.mark.parametrize("rule", ["rejection", "multi_round", "without_replacement"])
def test_ratio_rules_judge_the_heads_draws(rule: str, targets: Any, folder: Path) -> None:
    target, asked = targets["int8", "cycled"], {"max_tokens": 30, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    with LLM(target, load_draft(folder / "slots", target), method="speculative", profile=False, rule=rule) as llm:
        [one], [again] = llm.generate([PROMPTS[1]], **asked), llm.generate([PROMPTS[1]], **asked)
    assert one.tokens == again.tokens
    assert one.figures.accepted > 0


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"num_slots": None}, {}, "num_slots is missing"),
    ({"num_slots": 0}, {}, "num_slots is 0, it must be a whole number of at least 1"),
    ({"num_slots": 65}, {}, "num_slots is 65, it must be at most 64"),
    ({"num_slots": 5}, {}, r"'slots.weight' has shape \[256, 64\], expected \[320, 64\]"),
    ({"num_hidden_layers": 2}, {}, "num_hidden_layers is 2, and SpecFormer has one layer"),
    ({"aux_hidden_state_layer_ids": [0, 4, 8]}, {}, r"256 inputs, which are not 3 hidden states of width 64"),
    ({"aux_hidden_state_layer_ids": [0, 4, 8, 9]}, {}, r"is \[0, 4, 8, 9\], it must be a list of layers from 0 to 8"),
    ({"hidden_size": 32}, {}, "hidden_size is 32, and the target's is 64"),
    ({"vocab_size": 4096}, {}, f"a head for 4096 tokens, and the target has {VOCAB} tokens in {VOCAB} rows"),
    ({}, {"embed_norm.weight": None}, "holds no tensor 'embed_norm.weight'"),
    ({}, {"norm.weight": np.ones(WIDTH, np.float32)}, "holds the tensor 'norm.weight', which its config.json does not"),
    (
        {"speculators_config": {"verifier": {"name_or_path": "some/model", "architectures": ["Qwen3ForCausalLM"]}}},
        {},
        r"was trained for a Qwen3ForCausalLM \(some/model\), and the target is a LlamaForCausalLM",
    ),
]


@pytest.mark.parametrize(("changes", "tensors", "said"), BAD)
def test_heads_that_do_not_fit_are_refused(
    changes: dict[str, Any], tensors: dict[str, Any], said: str, targets: Any, tmp_path: Path
) -> None:
    held = {name: one for name, one in (slot_tensors(CONFIG) | tensors).items() if one is not None}
    path = write_folder(tmp_path / "head", CONFIG | changes, held)
    with pytest.raises(UserError, match=said) as error:
        load_draft(path, targets["float32", "target"])
    assert str(path) in str(error.value)


def test_methods_and_drafters_that_cannot_run_a_head_are_refused(targets: Any, folder: Path) -> None:
    target = targets["int8", "target"]
    for options, said in (
        ({"method": "card"}, "drafter specformer needs to see the target's passes"),
        ({"drafter": "eagle"}, "drafter eagle does not run .*, which is a trained head: use drafter specformer"),
    ):
        with pytest.raises(UserError, match=said):
            LLM(target, load_draft(folder / "llama", target), profile=False, **options)
    with pytest.raises(UserError, match="drafter specformer needs a SpecFormer head for the target"):
        LLM(target, drafter="specformer", method="speculative", profile=False)
    with LLM(target, load_draft(folder / "llama", target), method="speculative", profile=False, head_window=3) as llm:
        plain, drafted = (llm.generate(PROMPTS[1], plain=plain, max_tokens=20)[0].tokens for plain in (True, False))
    assert drafted == plain
    hf = load_model(folder / "target", runtime="transformers")
    with pytest.raises(UserError, match=r"reads the hidden states after layer 8, .* gives those after layer 7 at most"):
        load_draft(folder / "llama", hf)

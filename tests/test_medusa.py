"""Medusa's heads: the forward against the formulas, the same text, accepted drafts, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files import model_folder
from heads import LAYERS, VOCAB, WIDTH, write_folder
from medusa_heads import (
    HEADS,
    LAYOUTS,
    MEDUSA_CONFIG,
    MEDUSA_MISTAKES,
    exact_medusa,
    medusa_logits,
    medusa_tensors,
    write_medusa,
)

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded

PROMPTS = ("hello world hello world", "one two three four five six seven", "h")
DTYPES = {"float32": {"dtype": "float32"}, "int8": {"dtype": "int8"}}
DTYPES["captured"] = DTYPES["float32"] | {"graphs": "eager"}
pytestmark = pytest.mark.filterwarnings("error:the drafter.*failed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("medusa")
    model_folder(folder, "target", num_hidden_layers=LAYERS, max_position_embeddings=512)
    write_medusa(folder / "random")
    exact_medusa(folder)
    return folder


@pytest.fixture(scope="module")
def targets(folder: Path) -> dict[tuple[str, str], Loaded]:
    """Every target, by its dtype (or captured) and name."""
    names = "target", "chained"
    return {(dtype, name): load_model(folder / name, **given) for dtype, given in DTYPES.items() for name in names}


def logits_of(target: Loaded, path: Path, hidden: np.ndarray) -> np.ndarray:
    """Return logits [texts, heads, vocab] after texts with these last hidden states [texts, width], read in pieces."""
    model, sessions = load_draft(path, target).model, []
    for state in hidden:
        session = model.open(100, 10)
        for states in (np.ones((1, 5, WIDTH), np.float32), np.stack([np.zeros(WIDTH, np.float32), state])[None]):
            is_native = target.model.dtype is None
            session.add_features(model.fuse(states if is_native else torch.from_numpy(states)))
        sessions.append(session)
    draft = model.draft(sessions, [1] * len(sessions))
    assert [session.length for session in sessions] == [7] * len(sessions)
    rows = [[draft.layer(text, head, [(1,)]).to_dense()[0] for head in range(HEADS)] for text in range(len(sessions))]
    return np.array([[np.asarray(row) for row in text] for text in rows])


def states(count: int = 3) -> np.ndarray:
    return np.random.default_rng(4).standard_normal((count, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_that_of_the_formulas(
    layout: str, dtype: str, targets: Any, folder: Path, tmp_path: Path
) -> None:
    found = logits_of(targets[dtype, "target"], write_medusa(tmp_path / "head", layout), states())
    assert np.array_equal(found, logits_of(targets[dtype, "target"], folder / "random", states()))
    wanted = np.array([medusa_logits(folder / "target", medusa_tensors(), state) for state in states()])
    assert np.abs(found - wanted).max() < (0.2 * wanted.std() if dtype == "int8" else 1e-4)


@pytest.mark.parametrize("mistake", MEDUSA_MISTAKES)
def test_a_mistake_in_the_forward_is_far_away(mistake: str, targets: Any, folder: Path) -> None:
    [found] = logits_of(targets["float32", "target"], folder / "random", states(1))
    assert np.abs(found - medusa_logits(folder / "target", medusa_tensors(), states(1)[0], mistake)).max() > 0.1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_text_is_that_of_plain_decoding(dtype: str, temperature: float, targets: Any, folder: Path) -> None:
    target = targets[dtype, "target"]
    head = load_draft(folder / "random", target)
    asked = {"max_tokens": 30, "temperature": temperature, "seed": 5, "ignore_eos": True}
    with LLM(target, head, method="speculative", profile=False) as llm:
        assert llm.build_options.drafter == "block"
        plain = [one.tokens for one in llm.generate([*PROMPTS], plain=True, **asked)]
        drafted = llm.generate([*PROMPTS], **asked)
    assert [one.tokens for one in drafted] == plain
    assert sum(one.figures.drafted for one in drafted) > 0
    assert (head.model.num_captures > 0) == (dtype == "captured")


@pytest.mark.parametrize("options", [{}, {"graphs": "eager"}, {"dtype": "bfloat16"}, {"dtype": "int8"}], ids=str)
def test_heads_that_are_right_by_construction_are_accepted(options: dict[str, str], folder: Path) -> None:
    """Also by a request with the first one's text as its prefix, and by one of several answers."""
    target = load_model(folder / "chained", **({"dtype": "float32"} | options))
    prompt = target.tokenizer.encode(PROMPTS[1] * 6)
    with LLM(target, load_draft(folder / "medusa", target), method="speculative", profile=False, width=1) as llm:
        for asked, more in (
            (prompt, {}),
            ([*prompt, *prompt[:7]], {}),
            (prompt, {"n": 2, "temperature": 0.5, "seed": 1}),
        ):
            plain = llm.generate([asked], plain=True, max_tokens=40, ignore_eos=True, **more)
            drafted = llm.generate([asked], max_tokens=40, ignore_eos=True, **more)
            assert [one.tokens for one in drafted] == [one.tokens for one in plain]
            assert more or drafted[0].figures.mean_accepted_length > 0.9 * (HEADS + 1)


@pytest.mark.parametrize("rule", ["rejection", "multi_round"])
def test_ratio_rules_judge_the_heads_draws(rule: str, targets: Any, folder: Path) -> None:
    target = targets["int8", "chained"]
    with LLM(target, load_draft(folder / "medusa", target), method="speculative", profile=False, rule=rule) as llm:
        one, again = (
            llm.generate([PROMPTS[1]], max_tokens=30, temperature=1.0, seed=3, ignore_eos=True)[0] for _ in range(2)
        )
    assert one.tokens == again.tokens
    assert one.figures.drafted > 0


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"medusa_num_heads": 4}, {}, "holds no tensor 'lm_heads.3.weight'"),
    ({"medusa_num_heads": "x"}, {}, "medusa_num_heads is 'x'"),
    ({"medusa_num_layers": 3}, {}, r"holds no tensor 'blocks.0.layers.2.weight'"),
    ({"medusa_num_layers": 10**9}, {}, "medusa_num_layers is 1000000000, but the weight files hold 15 tensors"),
    ({}, {"0.2.weight": np.zeros(9, np.float32)}, r"'lm_heads.0.weight' has shape \[9\], it must be a matrix"),
    ({}, {"0.0.linear.bias": None}, r"holds no tensor 'blocks.0.layers.0.bias'"),
    ({}, {"0.2.weight": None}, r"holds no tensor 'lm_heads.0.weight'"),
    ({}, {"1.2.weight": np.zeros((9, WIDTH), np.float32)}, r"has shape \[9, 64\], expected \[272, 64\]"),
    ({}, {"token_map": np.zeros(9, np.float32)}, "holds the tensor 'token_map', which its config.json does not"),
    ({}, medusa_tensors(vocab=4096), f"a head for 4096 tokens, and the target has {VOCAB} tokens in {VOCAB} rows"),
    ({}, medusa_tensors(width=32), "reads hidden states of width 32, and the target's have 64"),
]


@pytest.mark.parametrize(("changes", "tensors", "said"), BAD)
def test_heads_that_do_not_fit_are_refused(
    changes: dict[str, Any], tensors: dict[str, Any], said: str, targets: Any, tmp_path: Path
) -> None:
    held = {name: one for name, one in (medusa_tensors() | tensors).items() if one is not None}
    path = write_folder(tmp_path / "head", MEDUSA_CONFIG | changes, held)
    with pytest.raises(UserError, match=said):
        load_draft(path, targets["float32", "target"])

"""EAGLE-1 heads and MTP layers: the forward against the formulas, the same text, accepted drafts, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from files import model_folder
from heads import LAYERS, VOCAB, WIDTH, write_folder
from joined_heads import (
    EAGLE1_CONFIG,
    JOINED_MISTAKES,
    LAYOUTS,
    MTP_TENSORS,
    VARIANTS,
    JoinedReference,
    exact_joined,
    joined_tensors,
    write_eagle1,
    write_mimo,
)
from safetensors.numpy import load_file, save_file
from test_heads import RUNTIMES, distance, expected, tree_logits

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.models.heads import native as native_heads
from outpace.models.llama.native import runtime as native_runtime
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded

PROMPTS = ("hello world hello world", "one two three four five six seven", "h")
NATIVE = {"dtype": "int8", "kv_dtype": "float32"}
pytestmark = pytest.mark.filterwarnings("error:the drafter.*failed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("joined")
    model_folder(folder, "target", num_hidden_layers=LAYERS, max_position_embeddings=512)
    write_eagle1(folder / "eagle1")
    write_mimo(folder)
    exact_joined(folder)
    return folder


@pytest.fixture(scope="module")
def targets(folder: Path) -> dict[tuple[str, str], Loaded]:
    """Every target, by its runtime and name."""
    dtypes = dict(zip(RUNTIMES, ("float32", "int8"), strict=True))
    names = ("target", "mimo", "exact", "mtp")
    return {(one, name): load_model(folder / name, dtype=dtypes[one]) for one in RUNTIMES for name in names}


def load(target: Loaded, path: Path | str, runtime: str = "llama") -> Any:
    return load_draft(path, target, **(NATIVE if runtime == "native" else {})).model


def check(model: Any, reference: JoinedReference, runtime: str) -> None:
    for seed, found in enumerate(tree_logits(model, [0, 1, 2])):
        wanted = expected(reference, seed)
        assert distance(found, wanted) < (1e-4 if runtime == "llama" else 0.3 * np.std(wanted))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_scores(layout: str, targets: Any, tmp_path: Path) -> None:
    target = targets["llama", "target"]
    one = tree_logits(load(target, write_eagle1(tmp_path / "one", "norms")), [0])[0]
    other = tree_logits(load(target, write_eagle1(tmp_path / "other", "norms", layout)), [0])[0]
    assert np.array_equal(one, other)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_eagle1_is_that_of_the_formulas(
    variant: str, runtime: str, targets: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, path = targets[runtime, "target"], write_eagle1(tmp_path / "head", variant)
    check(load(target, path, runtime), JoinedReference(folder / "target", joined_tensors(VARIANTS[variant])), runtime)
    if runtime == "native" and variant == "own embedding":  # nothing of it is the target's
        from outpace_kernels import emulation

        found = tree_logits(load(target, path, runtime), [0])
        monkeypatch.setattr(native_heads, "kernels", emulation)
        monkeypatch.setattr(native_runtime, "kernels", emulation)
        assert np.array_equal(found, tree_logits(load(target, path, runtime), [0]))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_an_mtp_layer_is_that_of_the_formulas(runtime: str, targets: Any, folder: Path) -> None:
    model = load(targets[runtime, "mimo"], "mtp", runtime)
    assert (model.spec.kind, model.spec.taps) == ("MTP of MiMo", (LAYERS,))
    check(model, JoinedReference(folder / "mimo", joined_tensors(MTP_TENSORS), is_mtp=True), runtime)


@pytest.mark.parametrize("mistake", JOINED_MISTAKES)
@pytest.mark.parametrize("name", ["target", "mimo"])
def test_a_mistake_in_the_forward_is_far_away(
    name: str, mistake: str, targets: Any, folder: Path, tmp_path: Path
) -> None:
    is_mtp = name == "mimo"
    model = load(targets["llama", name], "mtp" if is_mtp else write_eagle1(tmp_path / "head", "norms"))
    tensors = joined_tensors(MTP_TENSORS if is_mtp else VARIANTS["norms"])
    reference = JoinedReference(folder / name, tensors, mistake, is_mtp)
    assert distance(tree_logits(model, [0])[0], expected(reference, 0)) > 0.1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("name", "draft"), [("target", "eagle1"), ("mimo", "mtp")])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_text_is_that_of_plain_decoding(
    runtime: str, name: str, draft: str, temperature: float, targets: Any, folder: Path
) -> None:
    target = targets[runtime, name]
    head = load_draft("mtp" if draft == "mtp" else folder / draft, target)
    asked = {"max_tokens": 30, "temperature": temperature, "seed": 5, "ignore_eos": True}
    with LLM(target, head, method="speculative", profile=False) as llm:
        assert llm.build_options.drafter == "eagle"
        plain = [one.tokens for one in llm.generate([*PROMPTS], plain=True, **asked)]
        drafted = llm.generate([*PROMPTS], **asked)
    assert [one.tokens for one in drafted] == plain
    assert sum(one.figures.drafted for one in drafted) > 0


@pytest.mark.parametrize("options", [{}, {"graphs": "eager"}, {"dtype": "bfloat16"}, {"dtype": "int8"}], ids=str)
@pytest.mark.parametrize("name", ["exact", "mtp"])
def test_a_head_that_is_right_by_construction_is_accepted(name: str, options: dict[str, str], folder: Path) -> None:
    """Also by a request with the first one's text as its prefix."""
    target = load_model(folder / name, **({"dtype": "float32"} | options))
    head = load_draft("auto" if name == "mtp" else folder / "joined", target)
    prompt = target.tokenizer.encode(PROMPTS[1] * 6)
    with LLM(target, head, method="speculative", profile=False, draft_length=3, width=1) as llm:
        for asked in (prompt, [*prompt, *prompt[:7]]):
            [plain], [drafted] = (
                llm.generate([asked], plain=plain, max_tokens=40, ignore_eos=True) for plain in (True, False)
            )
            assert drafted.tokens == plain.tokens
            assert drafted.figures.mean_accepted_length > 3.6


@pytest.mark.parametrize("rule", ["rejection", "multi_round"])
def test_ratio_rules_judge_the_heads_draws(rule: str, targets: Any, folder: Path) -> None:
    target = targets["native", "exact"]
    with LLM(target, load_draft(folder / "joined", target), method="speculative", profile=False, rule=rule) as llm:
        [one] = llm.generate([PROMPTS[1]], max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    assert one.figures.accepted > 0.8 * one.figures.drafted or rule != "rejection"


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"bias": True}, {"fc.bias": None}, "holds no tensor 'fc.bias'"),
    ({"bias": False}, {}, "holds the tensor 'fc.bias', which its config.json does not call for"),
    (
        {},
        {"fc.weight": np.zeros((WIDTH, WIDTH), np.float32)},
        r"'fc.weight' has shape \[64, 64\], expected \[64, 128\]",
    ),
    ({}, {"layers.0.mlp.up_proj.weight": None}, "holds no tensor 'layers.0.mlp.up_proj.weight'"),
    ({"hidden_size": 128, "head_dim": 16}, {}, r"has shape \[64, 128\], expected \[128, 256\]"),
    ({"vocab_size": 4096}, {}, f"a head for 4096 tokens, and the target has {VOCAB} tokens in {VOCAB} rows"),
]


@pytest.mark.parametrize(("changes", "tensors", "said"), BAD)
def test_a_head_that_does_not_fit_is_refused(
    changes: dict[str, Any], tensors: dict[str, Any], said: str, targets: Any, tmp_path: Path
) -> None:
    whole = joined_tensors(VARIANTS["bias"]) | tensors
    held = {name: value for name, value in whole.items() if value is not None}
    path = write_folder(tmp_path / "head", EAGLE1_CONFIG | changes, held)
    with pytest.raises(UserError, match=said) as error:
        load(targets["llama", "target"], path)
    assert str(path) in str(error.value)


def test_more_layers_than_tensors_are_refused_at_once(targets: Any, tmp_path: Path) -> None:
    path = write_eagle1(tmp_path / "head", layout="speculators", num_hidden_layers=10**9)
    with pytest.raises(UserError, match="num_hidden_layers is 1000000000, but the weight files hold 10 tensors"):
        load(targets["llama", "target"], path)


def test_targets_without_what_is_needed_are_refused(targets: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="target has no MTP layer that outpace runs: checkpoints of MiMo-7B and"):
        load(targets["llama", "target"], "mtp")
    other = load_model(folder / "target", runtime="transformers", dtype="float32")
    with pytest.raises(UserError, match=r"reads the hidden states after layer 8, and TransformersModel .* layer 7"):
        load(other, folder / "eagle1")
    torn = write_mimo(tmp_path)
    kept = {name: one for name, one in load_file(torn / "model.safetensors").items() if "mtp" not in name}
    save_file(kept, torn / "model.safetensors")
    with pytest.raises(UserError, match="has no MTP layer that outpace runs"):
        load(load_model(torn, dtype="float32"), "mtp")
    config = json.loads((torn / "config.json").read_text())
    (torn / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UserError, match="has no MTP layer"):
        load(load_model(torn, dtype="float32"), "mtp")

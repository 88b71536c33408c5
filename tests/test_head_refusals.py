"""What a head gets that does not fit its target, its files or the method, and a target without what a head needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import block_heads
import heads
import joined_heads
import medusa_heads
import numpy as np
import pytest
import slot_heads
from heads import ROWS, VOCAB, WIDTH, write_folder
from safetensors.numpy import load_file, save_file
from test_head_kinds import WRITERS
from test_head_kinds import folder as folder
from test_head_kinds import targets as targets

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.models.load import load_draft, load_model

MANY = "a head for 4096 tokens, and the target has 272 tokens in 272 rows"
OTHER = {"verifier": {"name_or_path": "some/model", "architectures": ["Qwen3ForCausalLM"]}}
OF_DFLASH, TAPS = block_heads.CONFIG["dflash_config"], "eagle_aux_hidden_state_layer_ids"
OF_DSPARK = block_heads.block_tensors(block_heads.block_config(**block_heads.DSPARK))
OF_P_EAGLE: dict[str, Any] = heads.head_tensors(heads.head_config(**heads.P_EAGLE))
EAGLE3, BLOCK = heads.head_config(), block_heads.block_config()
WHOLE: dict[str, tuple[Mapping[str, Any], Mapping[str, np.ndarray]]] = {  # config and tensors that are taken
    "eagle3": (EAGLE3, heads.head_tensors(EAGLE3)),
    "block": (BLOCK, block_heads.block_tensors(BLOCK)),
    "eagle1": (joined_heads.EAGLE1_CONFIG, joined_heads.joined_tensors(joined_heads.VARIANTS["bias"])),
    "medusa": (medusa_heads.MEDUSA_CONFIG, medusa_heads.medusa_tensors()),
    "specformer": (slot_heads.CONFIG, slot_heads.slot_tensors(slot_heads.CONFIG)),
}
REFUSED: dict[str, list[tuple[dict[str, Any], dict[str, Any], str]]] = {  # changes of config and tensors; the sentence
    "eagle3": [
        (
            {TAPS: [2, 4]},
            {},
            r"fc.weight has 192 inputs, which are not 2 hidden states of width 64",
        ),
        ({TAPS: [2, 4, 9]}, {}, r"\[2, 4, 9\], it must be a list of layers from 0 to 8"),
        ({"eagle_config": {TAPS: [1, 3, 8]}}, {}, r"\[1, 3, 8\], .* layers from -1 to 7"),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            {},
            "eagle_config.use_aux_hidden_state False is not supported, only True",
        ),
        ({"target_hidden_size": 128}, {}, "fc.weight has 192 inputs"),
        (
            {"vocab_size": 4096},
            {"embed_tokens.weight": None},
            MANY,
        ),
        ({"num_hidden_layers": 2}, {}, "holds no tensor 'layers.1.input_layernorm.weight'"),
        ({"model_type": "qwen3"}, {}, "holds no tensor 'layers.0.self_attn.q_norm.weight'"),
        ({}, {"midlayer.hidden_norm.weight": None}, "holds no tensor 'layers.0.hidden_norm.weight'"),
        (
            {},
            {"midlayer.extra.weight": np.zeros(3, np.float32)},
            "'layers.0.extra.weight', which its config",
        ),
        ({}, {"lm_head.weight": np.zeros((ROWS, 32), np.float32)}, r"has shape \[128, 32\], expected \[128, 64\]"),
        ({}, {"d2t": np.full(ROWS, 200)}, "maps row 72 to token 272, outside of the vocabulary of 272 tokens"),
        ({}, {"d2t": -np.arange(ROWS)}, "maps 128 rows to token 0, a token may have one"),
        ({}, {"t2d": np.ones(VOCAB, bool)}, "t2d marks 272 tokens, and the output layer has 128 rows"),
        ({"rope_theta": "x"}, {}, "rope_theta is 'x'"),
        ({"eagle_config": "x"}, {}, "eagle_config is 'x', it must be an object"),
        ({}, {"norm.weight": np.ones(WIDTH, np.int64)}, "tensor 'norm.weight' has type I64, which is not supported"),
        ({}, {"norm.weight": np.ones(WIDTH, bool)}, "tensor 'norm.weight' has type BOOL, which is not supported"),
        ({}, {"d2t": np.zeros(ROWS, np.float32)}, "tensor 'd2t' has type F32, which is not supported"),
        (
            {},
            {"layers.0.hidden_norm.weight": np.ones(WIDTH, np.float32)},
            "holds both 'layers.0.hidden_norm.weight' and 'midlayer.hidden_norm.weight', two names of one tensor",
        ),
        (
            heads.P_EAGLE | {"architectures": ["PEagleDraftModel"]},
            OF_P_EAGLE | {"mask_hidden": None},
            "holds no tensor 'mask_hidden'",
        ),
        (heads.P_EAGLE | {"mask_token_id": 272}, OF_P_EAGLE, "mask_token_id is 272, it must be a token below 272"),
        ({"speculators_config": [3]}, {}, r"speculators_config is \[3\], it must be an object"),
        ({"speculators_config": {"verifier": 3}}, {}, "verifier is 3, it must be an object"),
        ({"speculators_model_type": "eagle3", "transformer_layer_config": "x"}, {}, "transformer_layer_config is 'x'"),
    ],
    "block": [
        (
            {"dflash_config": OF_DFLASH | {"mask_token_id": 300}},
            {},
            "mask_token_id is 300, it must be a token below",
        ),
        ({"dflash_config": OF_DFLASH | {"mask_token_id": None}}, {}, "mask_token_id is missing"),
        ({"block_size": None}, {}, "block_size is missing"),
        ({"block_size": 1}, {}, "block_size is 1, it must be between 2 and 65"),
        ({"block_size": 90}, {}, "block_size is 90, it must be between 2 and 65"),
        (
            {"dflash_config": OF_DFLASH | {"use_swa": True}},
            {},
            "use_swa True is not supported, only False",
        ),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 4]}},
            {},
            r"fc.weight has 192 inputs, which are not 2 hidden states of width 64 \(layers \[1, 4\]\)",
        ),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 4, 8]}},
            {},
            r"dflash_config.target_layer_ids is \[1, 4, 8\], it must be a list of layers from -1 to 7",
        ),
        (
            block_heads.DSPARK | {"markov_head_type": "other"},
            OF_DSPARK,
            "markov_head_type is 'other', it must be",
        ),
        (
            block_heads.DSPARK | {"markov_head_type": "gated"},
            OF_DSPARK,
            "no tensor 'markov_head.gate_proj.weight'",
        ),
    ],
    "eagle1": [
        ({"bias": True}, {"fc.bias": None}, "holds no tensor 'fc.bias'"),
        ({"bias": False}, {}, "holds the tensor 'fc.bias', which its config.json does not call for"),
        (
            {},
            {"fc.weight": np.zeros((WIDTH, WIDTH), np.float32)},
            r"'fc.weight' has shape \[64, 64\], expected \[64, 128\]",
        ),
        ({}, {"layers.0.mlp.up_proj.weight": None}, "holds no tensor 'layers.0.mlp.up_proj.weight'"),
        ({"hidden_size": 128, "head_dim": 16}, {}, r"has shape \[64, 128\], expected \[128, 256\]"),
        ({"vocab_size": 4096}, {}, MANY),
    ],
    "medusa": [
        ({"medusa_num_heads": 4}, {}, "holds no tensor 'lm_heads.3.weight'"),
        ({"medusa_num_heads": "x"}, {}, "medusa_num_heads is 'x'"),
        ({"medusa_num_layers": 3}, {}, r"holds no tensor 'blocks.0.layers.2.weight'"),
        ({"medusa_num_layers": 10**9}, {}, "medusa_num_layers is 1000000000, but the weight files hold 15 tensors"),
        ({}, {"0.2.weight": np.zeros(9, np.float32)}, r"'lm_heads.0.weight' has shape \[9\], it must be a matrix"),
        ({}, {"0.0.linear.bias": None}, r"holds no tensor 'blocks.0.layers.0.bias'"),
        ({}, {"0.2.weight": None}, r"holds no tensor 'lm_heads.0.weight'"),
        ({}, {"1.2.weight": np.zeros((9, WIDTH), np.float32)}, r"has shape \[9, 64\], expected \[272, 64\]"),
        (
            {},
            {"token_map": np.zeros(9, np.float32)},
            "holds the tensor 'token_map', which its config",
        ),
        ({}, medusa_heads.medusa_tensors(vocab=4096), MANY),
        ({}, medusa_heads.medusa_tensors(width=32), "reads hidden states of width 32, and the target's have 64"),
    ],
    "specformer": [
        ({"num_slots": None}, {}, "num_slots is missing"),
        ({"num_slots": 0}, {}, "num_slots is 0, it must be a whole number of at least 1"),
        ({"num_slots": 65}, {}, "num_slots is 65, it must be at most 64"),
        ({"num_slots": 5}, {}, r"'slots.weight' has shape \[256, 64\], expected \[320, 64\]"),
        ({"num_hidden_layers": 2}, {}, "num_hidden_layers is 2, and SpecFormer has one layer"),
        ({"aux_hidden_state_layer_ids": [0, 4, 8]}, {}, r"256 inputs, which are not 3 hidden states of width 64"),
        (
            {"aux_hidden_state_layer_ids": [0, 4, 8, 9]},
            {},
            r"is \[0, 4, 8, 9\], it must be a list of layers from 0",
        ),
        ({"hidden_size": 32}, {}, "hidden_size is 32, and the target's is 64"),
        ({"vocab_size": 4096}, {}, MANY),
        ({}, {"embed_norm.weight": None}, "holds no tensor 'embed_norm.weight'"),
        ({}, {"norm.weight": np.ones(WIDTH, np.float32)}, "holds the tensor 'norm.weight', which its config.json"),
        (
            {"speculators_config": OTHER},
            {},
            r"was trained for a Qwen3ForCausalLM \(some/model\), and the target is a LlamaForCausalLM",
        ),
    ],
}


@pytest.mark.parametrize(
    ("kind", "changes", "tensors", "said"), [(kind, *row) for kind, rows in REFUSED.items() for row in rows]
)
def test_a_head_that_does_not_fit_is_refused(
    kind: str, changes: dict[str, Any], tensors: dict[str, Any], said: str, targets: Any, tmp_path: Path
) -> None:
    config, whole = WHOLE[kind]
    held = {name: one for name, one in {**whole, **tensors}.items() if one is not None}
    path = write_folder(tmp_path / "head", {**config, **changes}, held)
    with pytest.raises(UserError, match=said) as error:
        load_draft(path, targets["llama", "target"])
    assert str(path) in str(error.value)


def test_more_layers_than_tensors_are_refused_at_once(targets: Any, tmp_path: Path) -> None:
    path = joined_heads.write_eagle1(tmp_path / "head", layout="speculators", num_hidden_layers=10**9)
    with pytest.raises(UserError, match="num_hidden_layers is 1000000000, but the weight files hold 10 tensors"):
        load_draft(path, targets["llama", "target"])


def test_targets_without_what_is_needed_are_refused(targets: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="target has no MTP layer that outpace runs: checkpoints of MiMo-7B"):
        load_draft("mtp", targets["llama", "target"])
    other = load_model(folder / "target", runtime="transformers", dtype="float32")
    for kind in ("eagle1", "specformer"):
        with pytest.raises(UserError, match=r"reads the hidden states after layer 8, and TransformersModel .* layer 7"):
            load_draft(WRITERS[kind](tmp_path / kind), other)
    torn = joined_heads.write_mimo(tmp_path)
    kept = {name: one for name, one in load_file(torn / "model.safetensors").items() if "mtp" not in name}
    save_file(kept, torn / "model.safetensors")
    with pytest.raises(UserError, match="has no MTP layer that outpace runs"):
        load_draft("mtp", load_model(torn, dtype="float32"))
    config = json.loads((torn / "config.json").read_text())
    (torn / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UserError, match="has no MTP layer"):
        load_draft("mtp", load_model(torn, dtype="float32"))


PASSES = "needs to see the target's passes, .* use method auto or speculative"
HEAD = "which is a trained head: use drafter"
REFUSED_OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("eagle3", {"method": "card"}, f"drafter eagle {PASSES}"),
    ("eagle3", {"method": "planned"}, "drafter eagle.* use method auto or speculative"),
    ("eagle3", {"drafter": "model"}, f"drafter model does not run .*, {HEAD} eagle"),
    ("eagle3", {"drafter": "eagle,model"}, "drafter model does not run"),
    ("eagle3", {"head_window": 1 << 31}, f"head_window is {1 << 31}, it must be between 0 and {1 << 30}"),
    ("dflash", {"method": "card"}, f"drafter block {PASSES}"),
    ("dflash", {"drafter": "eagle"}, f"drafter eagle does not run .*, {HEAD} block"),
    ("dflash", {"drafter": "model"}, f"drafter model does not run .*, {HEAD} block"),
    ("dflash", {"head_window": 1 << 31}, f"head_window is {1 << 31}, it must be between 0 and {1 << 30}"),
    ("specformer", {"method": "card"}, f"drafter specformer {PASSES}"),
    ("specformer", {"drafter": "eagle"}, f"drafter eagle does not run .*, {HEAD} specformer"),
]


@pytest.mark.parametrize(("kind", "options", "said"), REFUSED_OPTIONS)
def test_methods_and_drafters_that_cannot_run_a_head_are_refused(
    kind: str, options: dict[str, Any], said: str, targets: Any, tmp_path: Path
) -> None:
    target = targets["native", "target"]
    head = load_draft(WRITERS[kind](tmp_path / "head"), target)
    with pytest.raises(UserError, match=said):
        LLM(target, head, **{"method": "speculative", "profile": False} | options)


@pytest.mark.parametrize(
    ("drafter", "needs"),
    [
        ("eagle", "an EAGLE head for the target, or its MTP layer"),
        ("block", "a DFlash, DSpark or Medusa head for the target"),
        ("specformer", "a SpecFormer head for the target"),
    ],
)
def test_drafters_of_heads_need_one(drafter: str, needs: str, targets: Any, folder: Path) -> None:
    target = targets["native", "target"]
    with pytest.raises(UserError, match=f"drafter {drafter} needs {needs}"):
        LLM(target, drafter=drafter, method="speculative", profile=False)
    with pytest.raises(UserError, match=f"drafter {drafter} does not run .*is a draft model: use drafter model"):
        LLM(target, load_draft(folder / "target", target), drafter=drafter, profile=False)


def test_a_head_is_no_target_and_is_not_chosen_among_drafts(targets: Any, folder: Path, tmp_path: Path) -> None:
    head = heads.write_head(tmp_path / "head")
    with pytest.raises(UserError, match=r"is a trained head \(EAGLE-3\), which drafts for another model"):
        load_model(head)
    said = "needs drafter eagle, but only drafter model chooses among drafts: name it alone"
    with pytest.raises(UserError, match=said):
        LLM(targets["native", "target"], [str(head), str(folder / "target")], profile=False)

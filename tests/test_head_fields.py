"""What each field of a head's config.json does: honoured, without effect, refused, or named in a notice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import block_heads
import heads
import joined_heads
import medusa_heads
import numpy as np
import pytest
import transformers
from block_heads import block_config, block_tensors
from heads import LAYERS, ROWS, VOCAB, WIDTH, head_config, head_tensors, write_folder

from outpace.core.errors import UserError
from outpace.models.files.gguf.header import open_gguf_model
from outpace.models.heads import files as head_files
from outpace.models.heads.config import HeadConfig
from outpace.models.heads.files import open_head
from outpace.models.heads.reader import read_head

TARGET = {"hidden_size": WIDTH, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "architectures": ["LlamaForCausalLM"]}
TAPS, NESTED = "eagle_aux_hidden_state_layer_ids", {"mask_token_id": block_heads.MASK}
DFLASH = block_heads.CONFIG["dflash_config"]


def read(path: Path, **target: Any) -> HeadConfig:
    return read_head(open_head(path), TARGET | target, 256, LAYERS)


def eagle(folder: Path, drop: tuple[str, ...] = (), tensors: dict[str, Any] | None = None, **changes: Any) -> Path:
    whole = head_tensors(head_config()) | (tensors or {})
    return write_folder(folder / "head", head_config(**changes), {n: t for n, t in whole.items() if n not in drop})


def block(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    config = block_config(**changes)
    known = {name: value for name, value in config.items() if name not in ("markov_rank", "draft_vocab_size")}
    tensors = block_tensors(known | block_heads.DSPARK if config["architectures"] != ["DFlashDraftModel"] else known)
    return write_folder(folder / "head", config, {n: t for n, t in tensors.items() if n not in drop})


def said(head: HeadConfig) -> str:
    return "; ".join(head.notices)


LAYOUTS = [
    ({}, False),
    ({"sample_from_anchor": True}, True),
    ({"query_zero_predicts_next": True}, True),
    ({"dflash_config": DFLASH | {"sample_from_anchor": True}}, True),
    ({"dflash_config": DFLASH | {"query_zero_predicts_next": True}}, True),
    ({"dflash_config": DFLASH | {"shift_label": True}}, True),
    ({"dspark_bonus_anchor": False}, True),
    ({"query_zero_predicts_next": False, "dspark_bonus_anchor": True}, False),
    (block_heads.DSPARK, True),
    (block_heads.DSPARK | {"dflash_config": DFLASH | {"shift_label": False}}, False),
    (block_heads.DSPARK | {"dspark_bonus_anchor": True, "sample_from_anchor": False}, False),
]


@pytest.mark.parametrize(("changes", "expected"), LAYOUTS)
def test_every_name_of_the_layout_of_a_block_is_honoured(
    changes: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    head = read(block(tmp_path, **changes))
    assert head.from_anchor == expected
    assert head.num_drafted == block_heads.BLOCK - (not expected)
    assert head.notices == ()


EAGLE_LAYERS = [  # fields, the states that are read, and a part of the notice
    ({TAPS: [1, 4, 7]}, (1, 4, 7), ""),
    ({"eagle_config": {TAPS: [1, 3, 6]}}, (2, 4, 7), ""),
    ({"eagle_config": {TAPS: [0, 3, 6]}}, (1, 4, 7), f"eagle_config.{TAPS} is read as the states after 1, 4 and 7"),
    ({"eagle_config": {"layer_ids": [1, 4, 7]}}, (1, 4, 7), ""),
    ({"target_layer_ids": [0, 3, 6]}, (1, 4, 7), ""),  # of DeepSpec
    (
        {"aux_hidden_state_layer_ids": [1, 3, 6]},
        (1, 3, 6),
        "aux_hidden_state_layer_ids is read as the states after 1, 3",
    ),
    ({"layer_ids": [0, 4, 8]}, (0, 4, 8), "layer_ids is read as the states after 0, 4 and 8 layers"),
    ({"dflash_config": {"target_layer_ids": [1, 3, 6]}}, (2, 4, 7), "dflash_config.target_layer_ids is read as"),
    ({"aux_hidden_state": {"layer_ids": [1, 3, 6]}}, (1, 3, 6), "aux_hidden_state.layer_ids is read as"),
    ({TAPS: [2, 4, 7], "eagle_config": {TAPS: [1, 3, 6]}}, (2, 4, 7), ""),
    (
        {TAPS: None},
        (2, 4, 5),
        "no field names the target's layers that it reads, so it gets the states after 2, 4 and 5",
    ),
    ({"eagle_config": {TAPS: []}}, (2, 4, 5), "no field names the target's layers"),
]
BLOCK_LAYERS = [
    ({"dflash_config": DFLASH}, (2, 5, 7), ""),
    ({"dflash_config": NESTED, "target_layer_ids": [1, 4, 6]}, (2, 5, 7), ""),
    ({"dflash_config": NESTED, "dspark_target_layer_ids": [1, 4, 6]}, (2, 5, 7), ""),
    ({TAPS: [2, 5, 7]}, (2, 5, 7), ""),  # of Nemotron, which names both
    ({"dflash_config": NESTED, "layer_ids": [2, 5, 7]}, (2, 5, 7), "layer_ids is read as the states after 2, 5 and 7"),
    ({"dflash_config": NESTED | {"aux_hidden_state_layer_ids": [2, 5, 7]}}, (2, 5, 7), "layer_ids is read as"),
    ({"dflash_config": NESTED, "eagle_config": {TAPS: [1, 4, 6]}}, (2, 5, 7), f"eagle_config.{TAPS} is read as"),
    ({"dflash_config": NESTED, "num_hidden_layers": 3}, (2, 4, 6), "it gets the states after 2, 4 and 6 layers"),
]


@pytest.mark.parametrize(("changes", "taps", "notice"), EAGLE_LAYERS)
def test_layers_of_eagle_are_read_from_every_field(
    changes: dict[str, Any], taps: tuple[int, ...], notice: str, tmp_path: Path
) -> None:
    head = read(eagle(tmp_path, **changes))
    assert head.taps == taps
    assert notice in said(head)
    assert bool(notice) == bool(head.notices)


@pytest.mark.parametrize(("changes", "taps", "notice"), BLOCK_LAYERS)
def test_layers_of_a_block_are_read_from_every_field(
    changes: dict[str, Any], taps: tuple[int, ...], notice: str, tmp_path: Path
) -> None:
    head = read(block(tmp_path, **changes))
    assert head.taps == taps
    assert notice in said(head)
    assert bool(notice) == bool(head.notices)


CONTRADICTIONS = [  # a writer, changes of its config, and what the sentence says
    (
        block,
        {"sample_from_anchor": True, "query_zero_predicts_next": False},
        "sample_from_anchor is True, but query_zero",
    ),
    (block, {"sample_from_anchor": True, "dspark_bonus_anchor": True}, "is True, but dspark_bonus_anchor is True"),
    (block, {"dflash_config": DFLASH | {"shift_label": 1}}, "dflash_config.shift_label is 1, it must be true or false"),
    (block, {"dflash_config": DFLASH | {"block_size": 6}}, "block_size is 5, but dflash_config.block_size is 6"),
    (block, {"dspark_noise_token_id": 5}, "dspark_noise_token_id is 5, but dflash_config.mask_token_id is 271"),
    (block, {"target_layer_ids": [2, 5, 7]}, r"\[1, 4, 6\], but target_layer_ids is \[2, 5, 7\]"),
    (block, {TAPS: [1, 4, 6]}, rf"\[1, 4, 6\], but {TAPS} is \[1, 4, 6\]"),
    (
        block,
        {"is_causal": True, "dflash_config": DFLASH | {"causal": False}},
        "is True, but dflash_config.causal is False",
    ),
    (block, {"markov_rank": 8}, "markov_rank is 8, but the files hold no tensor 'markov_head.markov_w1.weight'"),
    (block, block_heads.DSPARK | {"markov_rank": 4}, "markov_rank is 4, but 'markov_head.markov_w1.weight' has rank 8"),
    (block, {"dflash_config": DFLASH | {"projector_type": "mlp"}}, "projector_type is 'mlp', it must be one of dflash"),
    (block, {"num_target_layers": 36}, "num_target_layers is 36, and the target has 8 layers"),
    (block, {"dflash_config": DFLASH | {"target_layer_ids": [6, 4, 1]}}, "it must be different layers in ascending"),
    (
        eagle,
        {TAPS: [2, 4, 5], "eagle_config": {TAPS: [2, 4, 5]}},
        rf"\[2, 4, 5\], but eagle_config.{TAPS} is \[2, 4, 5\]",
    ),
    (eagle, {TAPS: [2, 4, 5], "layer_ids": [1, 4, 5]}, rf"{TAPS} is \[2, 4, 5\], but layer_ids is \[1, 4, 5\]"),
    (eagle, {"layer_ids": [2, 4, 9]}, r"layer_ids is \[2, 4, 9\], it must be a list of layers from 0 to 8"),
    (
        eagle,
        {"target_layer_ids": [1, 3, 8]},
        r"target_layer_ids is \[1, 3, 8\], it must be a list of layers from -1 to 7",
    ),
    (eagle, {TAPS: ["2", "4", "5"]}, "it must be a list of layers from 0 to 8"),
    (eagle, {TAPS: [2, 2, 5]}, r"\[2, 2, 5\], it must be different layers in ascending order"),
    (eagle, {"num_aux_hidden_states": 3, "num_aux_layers": 5}, "num_aux_hidden_states is 3, but num_aux_layers is 5"),
    (
        eagle,
        {"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}},
        "but eagle_config.norm_before_fc is True",
    ),
    (eagle, {"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm False is not supported, only True"),
    (
        eagle,
        {"eagle_config": {"parallel_draft_step": 4}},
        "eagle_config.parallel_draft_step 4 is not supported, only 1",
    ),
    (eagle, {"is_neox_style": False}, "is_neox_style False is not supported, only True"),
    (eagle, {"is_causal": False}, "is_causal False is not supported$"),
    (eagle, {"sample_from_anchor": True}, "sample_from_anchor True is not supported: it is not known, and by its name"),
    (eagle, {"draft_position_shift": 1}, "draft_position_shift 1 is not supported: it is not known"),
    (eagle, {"capture_layers": [1, 2, 3]}, r"capture_layers \[1, 2, 3\] is not supported"),
    (
        block,
        {"dflash_config": DFLASH | {"block_layout": "anchor_first"}},
        "dflash_config.block_layout 'anchor_first' is not",
    ),
    (block, {"extra": {"deep": {"anchor_first": True}}}, "extra.deep.anchor_first True is not supported"),
    (block, {"aux_hidden_state_layer_offset": 1}, "aux_hidden_state_layer_offset 1 is not supported"),
    (block, {"dflash_config": DFLASH | {"output_multiplier": 0.2}}, "output_multiplier 0.2 is not supported, only 1"),
    (
        block,
        {"has_own_lm_head": True, "drop": ("lm_head.weight",)},
        "has_own_lm_head is True, but the files hold no tensor",
    ),
]


@pytest.mark.parametrize(("write", "changes", "expected"), CONTRADICTIONS)
def test_contradictions_are_refused_with_both_values(
    write: Any, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(UserError, match=expected) as error:
        read(path)
    assert str(path) in str(error.value)


NAMED = [
    (eagle, {"mystery": 3}, "mystery"),
    (eagle, {"scale_emb": 12, "eagle_config": {"residual_kind": "post"}}, "scale_emb, eagle_config.residual_kind"),
    (eagle, {"block_size": 5}, "block_size"),
    (eagle, {"mask_token_id": 3}, "mask_token_id"),
    (block, {"dflash_config": DFLASH | {"extra": {"deep": "x"}}}, "dflash_config.extra.deep"),
    (block, {"norm_before_fc": True}, "norm_before_fc"),
]


@pytest.mark.parametrize(("write", "changes", "names"), NAMED)
def test_an_unknown_field_is_named(write: Any, changes: dict[str, Any], names: str, tmp_path: Path) -> None:
    head = read(write(tmp_path, **{TAPS: [2, 5, 7]} | changes))
    assert said(head) == f"unknown fields of the head were ignored: {names}"


def test_an_unknown_field_that_is_off_says_nothing(tmp_path: Path) -> None:
    off = {"mystery": None, "other": False, "shift": 0, "empty": [], "object": {}, "_attn_implementation": "sdpa"}
    assert read(eagle(tmp_path, **{TAPS: [2, 4, 5]} | off)).notices == ()


OF_TRANSFORMERS: dict[str, Any] = {
    **{"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "torch_dtype": "bfloat16", "use_cache": True},
    **{"initializer_range": 0.02, "attention_dropout": 0.0, "transformers_version": "4.57.1", "hidden_act": "silu"},
    **{"max_window_layers": 36, "sliding_window": None, "rope_scaling": None, "use_sliding_window": False},
    **{"tie_word_embeddings": True, "attention_bias": False, "pretraining_tp": 1, "auto_map": {"AutoModel": "a.B"}},
}
MODELOPT = {
    **{"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True},
    **{"use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1, TAPS: [1, 3, 6]},
    "parallel_draft_heads_num_layers": 1,
}
OF_SPECFORGE = DFLASH | {
    **{"attention_mode": "gqa", "projector_type": "dspark", "markov_rank": 8, "markov_head_type": "vanilla"},
    **{"confidence_head_alpha": 1.0, "enable_confidence_head": True, "confidence_head_with_markov": True},
}
DSPARK = {name: value for name, value in block_heads.DSPARK.items() if name != "markov_rank"}
PUBLIC = {
    "EAGLE": (eagle, {TAPS: [2, 4, 5], "bias": True, "target_model_type": "llama"}),
    "ModelOpt": (eagle, {"mlp_bias": False, "eagle_config": MODELOPT}),
    "DeepSpec": (eagle, {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 3, 6]}),
    "z-lab": (block, {"num_target_layers": LAYERS, "layer_types": ["full_attention"] * 2}),
    "SpecForge's DSpark": (block, DSPARK | {"dflash_config": OF_SPECFORGE}),
    "DeepSpec's DSpark": (
        block,
        {
            **block_heads.DSPARK,
            **{"dflash_config": None, "mask_token_id": 271, "target_layer_ids": [1, 4, 6], "num_target_layers": 8},
        },
    ),
    "SGLang": (
        block,
        {"dflash_config": DFLASH | {"query_zero_predicts_next": True, "causal": False, "mask_token": "<m>"}},
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_all_fields_of_public_formats_are_known(name: str, tmp_path: Path) -> None:
    write, changes = PUBLIC[name]
    assert read(write(tmp_path, **OF_TRANSFORMERS | changes)).notices == ()


@pytest.mark.parametrize("layout", ["eagle3", "dspark", "dflash", "eagle"])
def test_all_fields_of_speculators_are_known(layout: str, tmp_path: Path) -> None:
    path = {
        "eagle3": lambda: heads.write_head(tmp_path / "head", "speculators"),
        "dspark": lambda: block_heads.write_block(
            tmp_path / "head", "speculators", **block_heads.DSPARK, sample_from_anchor=True
        ),
        "dflash": lambda: block_heads.write_block(tmp_path / "head", "speculators"),
        "eagle": lambda: joined_heads.write_eagle1(tmp_path / "head", "norms", "speculators"),
    }[layout]()
    config = json.loads((path / "config.json").read_text())
    verifier = config["speculators_config"]["verifier"] | {"hidden_size": 8, "max_position_embeddings": 9}
    config["speculators_config"] |= {"algorithm": layout, "default_proposal_method": "greedy", "verifier": verifier}
    config |= {"speculators_version": "0.9.0", "embed_requires_grad": True, "has_no_defaults_at_init": False}
    config |= {TAPS: [2, 4, 5]} if layout == "eagle3" else {}
    config["transformer_layer_config"] |= OF_TRANSFORMERS | {"architectures": ["Qwen3ForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config))
    assert read(path).notices == ()


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_all_fields_that_transformers_saves_are_known(kind: str, tmp_path: Path) -> None:
    sizes = {name: value for name, value in head_config(**{TAPS: [2, 4, 5]}).items() if name != "model_type"}
    whole = getattr(transformers, f"{kind}Config")(**sizes).to_dict()
    if kind == "Qwen3":
        head = heads.write_head(tmp_path / "head", model_type="qwen3", **{TAPS: [2, 4, 5]})
    else:
        head = eagle(tmp_path)
    (head / "config.json").write_text(json.dumps(whole))
    assert read(head).notices == ()


def test_guesses_that_programs_make_differently_are_named(tmp_path: Path) -> None:
    path = heads.write_head(tmp_path / "eagle3", "speculators")
    config = json.loads((path / "config.json").read_text())
    del config["norm_before_residual"]
    (path / "config.json").write_text(json.dumps(config | {TAPS: [2, 4, 5]}))
    assert said(read(path)) == "norm_before_residual is missing and taken as true, as vLLM does"
    for layout in ("speculators", "gguf"):
        path = block_heads.write_block(tmp_path / layout, layout, **block_heads.DSPARK)
        assert said(read(path)).startswith("sample_from_anchor is missing and taken as true")
    path = block_heads.write_block(tmp_path / "dflash", "speculators")
    config = json.loads((path / "config.json").read_text())
    config["speculators_config"]["proposal_methods"] = [{"speculative_tokens": 5}]
    (path / "config.json").write_text(json.dumps(config))
    assert said(read(path)) == "it recommends 5 tokens, and a block of 5 drafts 4"


def marks(*changes: tuple[int, bool]) -> np.ndarray:
    marked = head_tensors(head_config())["t2d"].copy()
    for token, is_in in changes:
        marked[token] = is_in
    return marked


IN, OUT = (int(np.flatnonzero(marks() == one)[7]) for one in (True, False))
MAPS = [
    ({"d2t": np.zeros(ROWS, np.int64)}, "d2t and t2d name different tokens, the first are 0 and"),
    ({"t2d": marks((IN, False), (OUT, True))}, "d2t and t2d name different tokens"),
    ({"t2d": marks((OUT, True))}, "t2d marks 129 tokens, and the output layer has 128 rows"),
    (
        {"t2d": np.append(marks((IN, False)), True)},
        "name different tokens, the first are",
    ),
    ({"d2t": np.zeros(ROWS - 1, np.int64)}, r"tensor 'd2t' has shape \[127\], expected \[128\]"),
    ({"d2t": head_tensors(head_config())["d2t"] - 300}, "d2t maps row 0 to token -.*, outside of the vocabulary"),
]


@pytest.mark.parametrize(("tensors", "expected"), MAPS)
def test_maps_that_contradict_each_other_are_refused(tensors: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=expected):
        read(eagle(tmp_path, tensors=tensors))


def test_a_map_of_a_head_without_one_must_mark_all_tokens(tmp_path: Path) -> None:
    left_out = ("d2t", "lm_head.weight")
    with pytest.raises(UserError, match="t2d marks 128 tokens, and the output layer has 272 rows"):
        read(eagle(tmp_path, left_out, draft_vocab_size=VOCAB))
    read(eagle(tmp_path / "all", left_out, {"t2d": np.ones(VOCAB, bool)}, draft_vocab_size=VOCAB))


@pytest.mark.parametrize("rows", [271, 260])
def test_a_mask_needs_a_row_of_the_embedding_that_is_used(rows: int, tmp_path: Path) -> None:
    """The target's embedding may have fewer rows than the head's vocabulary."""
    shared = block(tmp_path, ("embed_tokens.weight",))
    read(shared)
    with pytest.raises(
        UserError, match=rf"mask_token_id is 271, it must be a token below {rows}: the target's embedding"
    ):
        read(shared, vocab_size=rows)
    read(block(tmp_path / "own"), vocab_size=rows)
    parallel = heads.write_head(tmp_path / "parallel", drop=("embed_tokens.weight",), **heads.P_EAGLE)
    with pytest.raises(UserError, match="mask_token_id is 270, it must be a token below 260"):
        read(parallel, vocab_size=260)


def test_other_kinds_compare_their_fields_with_the_tensors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"vocab_size is 99, but tensor 'lm_heads.0.weight' has shape \[272, 64\]"):
        read(medusa_heads.write_medusa(tmp_path / "medusa", vocab_size=99))
    assert said(read(medusa_heads.write_medusa(tmp_path / "named", mystery=1))).endswith("were ignored: mystery")
    assert read(medusa_heads.write_medusa(tmp_path / "merged", "merged", vision={"shift": 1}), vision={}).notices == ()
    path = joined_heads.write_eagle1(tmp_path / "eagle1", **{TAPS: [2, 4, 5]})
    with pytest.raises(UserError, match="the states after 2, 4 and 5 layers, but EAGLE-1 reads the last one only"):
        read(path)
    path = joined_heads.write_eagle1(tmp_path / "layernorms", layernorms=True)
    with pytest.raises(UserError, match="layernorms is True, but the files hold no tensor 'embed_norm"):
        read(path)


def gguf(folder: Path, kind: str = "dflash", **metadata: Any) -> HeadConfig:
    """Read a .gguf head with further metadata of its architecture."""
    path = block_heads.write_block(folder, "gguf") if kind == "dflash" else heads.write_head(folder, "gguf")
    header = open_gguf_model(path)
    changed = {f"{kind}.{name.replace('__', '.')}": value for name, value in metadata.items()}
    return read_head(head_files._open_gguf(replace(header, metadata=header.metadata | changed)), TARGET, 256, LAYERS)


def test_metadata_of_a_gguf_head_are_honoured(tmp_path: Path) -> None:
    plain = gguf(tmp_path / "plain")
    assert (plain.from_anchor, plain.causal, plain.notices) == (False, (False, False), ())
    assert gguf(tmp_path / "anchor", sample_from_anchor=True).from_anchor
    assert gguf(tmp_path / "causal", attention__causal=True).causal == (True, True)
    slides = {"attention__sliding_window": 4, "attention__sliding_window_pattern": [True, False]}
    slid = gguf(tmp_path / "slides", **slides)
    assert (slid.layers.windows, slid.causal) == ((4, None), (True, False))
    silent = {"context_length": 9, "has_confidence_head": True, "rope__dimension_count": 16, "selector_top_k": 0}
    assert gguf(tmp_path / "silent", **silent).notices == ()
    assert gguf(tmp_path / "named", decoder_arch="laguna").notices == (
        "unknown fields of the head were ignored: dflash.decoder_arch",
    )
    assert gguf(tmp_path / "eagle3", "eagle3", block_size=3).notices[0].endswith("eagle3.block_size")


OF_GGUF = [
    ({"attention__sliding_window": 4}, "attention.sliding_window 4 needs a pattern of its layers"),
    ({"attention__scale": 0.5}, "dflash.attention.scale 0.5 is not supported"),
    ({"logit_scale": 0.5}, "dflash.logit_scale 0.5 is not supported, only 0.0 and 1.0"),
    ({"rope__dimension_count": 8}, "rope.dimension_count is 8, it must be attention.key_length, 16"),
    ({"extract_layers": [1, 4, 6]}, r"target_layers is \[2, 5, 7\], but extract_layers is \[1, 4, 6\]"),
    ({"mask_token_id": 3}, "tokenizer.ggml.mask_token_id is 271, but dflash.mask_token_id is 3"),
    ({"markov_rank": 8}, "markov_rank is 8, but the files hold no tensor"),
    ({"draft_offset": 1}, "dflash.draft_offset 1 is not supported: it is not known"),
]


@pytest.mark.parametrize(("metadata", "expected"), OF_GGUF)
def test_metadata_of_a_gguf_head_that_are_not_honoured_are_refused(
    metadata: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=expected) as error:
        gguf(tmp_path / "head", **metadata)
    assert "head.gguf" in str(error.value)


def test_a_gguf_head_of_the_first_converter_counts_from_0(tmp_path: Path) -> None:
    path = block_heads.write_block(tmp_path / "head", "gguf")
    header = open_gguf_model(path)
    held = {name: value for name, value in header.metadata.items() if name != "tokenizer.ggml.mask_token_id"}
    held |= {"dflash.mask_token_id": 271, "dflash.target_layers": [1, 4, 6]}
    head = read_head(head_files._open_gguf(replace(header, metadata=held)), TARGET, 256, LAYERS)
    assert head.taps == (2, 5, 7)
    assert "dflash.target_layers was read as outputs of layers that are counted from 0" in said(head)

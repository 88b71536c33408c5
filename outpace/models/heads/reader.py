"""Reads a `HeadConfig` from the files of a head, of every kind and layout.

A wrong layer, order or norm would not change the text, but would make every draft wrong. So everything that a file says
is checked against its tensors and the target when it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.models.heads.config import (
    BLOCKS,
    DSPARK,
    JOINED,
    MEDUSA,
    MTP,
    P_EAGLE,
    SPECFORMER,
    HeadConfig,
    check_kind,
    fields_of,
    head_kind,
    verifier_fields,
    verifier_of,
)
from outpace.models.heads.files import HeadFiles
from outpace.models.llama.config.fields import SLIDING, flag, number, size
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict

IGNORED_IN_LAYER = ("logit_scale", "architectures", "quantization_config", "tie_word_embeddings", "is_causal")
UNSUPPORTED = (  # of dflash_config
    "use_swa",
    "attention_sink_bias",
    "attention_value_scale",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
)
OF_MLP = ("mlp.", "post_attention_layernorm.")  # prefixes of a layer's tensors
MARKOV_KINDS = ("vanilla", "gated", "rnn")
MARKOV, CONFIDENCE = "markov_head.", "confidence_head.proj."  # prefixes of tensors
MOST_DRAFTED = 64  # tokens of a block
JOINED_NORMS = ("norm", "hidden_norm", "embed_norm")  # an MTP layer has all of them
MEDUSA_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.")
TAPS = "eagle_aux_hidden_state_layer_ids"
LAYER_IDS = "aux_hidden_state_layer_ids"
# An object in config.json ("": the config itself), its field, and what is added to get the number of layers completed:
# 1 where layers are counted from 0 and their output is read.
EAGLE_TAPS = (("", TAPS, 0), ("eagle_config", TAPS, 1), ("eagle_config", "layer_ids", 0))
BLOCK_TAPS = (
    ("", LAYER_IDS, 0),
    ("dflash_config", "target_layer_ids", 1),
    ("", "target_layer_ids", 1),
    ("", "dspark_target_layer_ids", 1),
)


def _draft_length(config: Mapping[str, Any]) -> int | None:
    """Return the draft length of the first proposal method; None if the config has none."""
    match fields_of(config, "speculators_config").get("proposal_methods"):
        case [{"speculative_tokens": int(length)}, *_]:
            return length
    return None


def read_head(files: HeadFiles, target: Mapping[str, Any], max_positions: int, num_layers: int) -> HeadConfig:
    """Read and check a head for a target with these config.json fields and this number of layers. Raise
    UserError with the file and the first thing that is wrong."""
    try:
        return _checked(files, target, max_positions, num_layers)
    except UserError as error:
        where = str(files.path)
        raise error if where in str(error) else UserError(f"{where}: {error}") from error


def _checked(files: HeadFiles, target: Mapping[str, Any], max_positions: int, num_layers: int) -> HeadConfig:
    config = files.config
    kind = str(head_kind(config, files.tensors.keys()))
    check_kind(kind, files.path)
    if kind == MEDUSA:
        head = _read_medusa(files, target, max_positions, num_layers)
        files.check_shapes(_medusa_shapes(head))
        _check_target(config, target, head)
        return head
    is_speculators = "speculators_model_type" in config
    own = fields_of(config, "transformer_layer_config") if is_speculators else config
    _check_count("num_hidden_layers", size(own, "num_hidden_layers", 1), files)
    layers = _layer_config(files, own, max_positions)
    width = size(config, "target_hidden_size", size(target, "hidden_size", layers.hidden_size))
    read = READERS.get(kind, _read_joined if kind in JOINED else _read_eagle)
    head = read(
        HeadConfig(
            kind=kind,
            layers=layers,
            taps=_taps(config, kind, layers.num_layers, num_layers, width, files),
            num_rows=size(config, "draft_vocab_size", layers.vocab_size),
            target_width=width,
            target_eps=number(target, "rms_norm_eps", layers.rms_norm_eps, 1.0),
            has_fc_bias="fc.bias" in files,
            logit_scale=number(config, "logit_scale", 1.0, 1e6),
            verifier=verifier_of(config),
            draft_length=_draft_length(config),
        ),
        config,
        files,
        is_speculators,
    )
    files.check_shapes(_shapes(head, files))
    _check_target(config, target, head)
    return head


def _read_medusa(files: HeadFiles, target: Mapping[str, Any], max_positions: int, num_layers: int) -> HeadConfig:
    """Read Medusa's heads. Their sizes are those of the tensors; config.json may say fewer heads than there are."""
    config, shape = files.config, files.shape("lm_heads.0.weight")
    if len(shape) != 2:
        raise UserError(f"tensor 'lm_heads.0.weight' has shape {list(shape)}, it must be a matrix")
    rows, hidden = shape
    places = [tuple(map(int, found.groups())) for name in files.tensors if (found := MEDUSA_BLOCK.match(name))]
    blocks = size(config, "medusa_num_layers", 1 + max((block for _, block in places), default=0))
    _check_count("medusa_num_layers", blocks, files)
    eps = number(target, "rms_norm_eps", 1e-6, 1.0)
    layers = LlamaConfig(rows, hidden, hidden, blocks, 1, 1, 2, eps, 1e4, max_positions, False, False, False)
    block = max(size(config, "medusa_num_heads", 1), *(1 + head for head, _ in places), 1)
    if block > MOST_DRAFTED:
        raise UserError(f"medusa_num_heads is {block}, it must be at most {MOST_DRAFTED}")
    return HeadConfig(MEDUSA, layers, (num_layers,), rows, hidden, eps, block=block, from_anchor=True)


def _check_count(name: str, count: int, files: HeadFiles) -> None:
    """Raise UserError for more layers than tensors, before a shape is made for each."""
    if count > len(files.tensors):
        raise UserError(f"{name} is {count}, but the weight files hold {len(files.tensors)} tensors")


def _medusa_shapes(head: HeadConfig) -> dict[str, tuple[int, ...]]:
    hidden = head.layers.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for one in range(head.block):
        shapes[f"lm_heads.{one}.weight"] = (head.num_rows, hidden)
        for block in range(head.layers.num_layers):
            name = f"blocks.{one}.layers.{block}."
            shapes |= {f"{name}weight": (hidden, hidden), f"{name}bias": (hidden,)}
    return shapes


def _read_eagle(head: HeadConfig, config: Mapping[str, Any], files: HeadFiles, is_speculators: bool) -> HeadConfig:
    """Read what describes EAGLE-3 and P-EAGLE heads."""
    nested = fields_of(config, "eagle_config")
    if not flag(nested, "use_aux_hidden_state", True):
        raise UserError("eagle_config.use_aux_hidden_state is false: such a head is not supported")
    norm_before_residual = flag(config, "norm_before_residual", default=is_speculators)
    return replace(
        head,
        layers=replace(head.layers, takes_features=True, norms_features=not norm_before_residual),
        norm_before_residual=norm_before_residual,
        norm_before_fc=flag(config, "norm_before_fc", flag(nested, "norm_before_fc")),
        fc_norm=flag(config, "fc_norm", flag(config, "use_aux_norm")),
        norm_output=flag(config, "norm_output"),
        mask_token=_mask_token(head, config, ("mask_token_id", "pard_token", "ptd_token_id"))
        if head.kind == P_EAGLE
        else None,
    )


def _read_joined(head: HeadConfig, config: Mapping[str, Any], files: HeadFiles, is_speculators: bool) -> HeadConfig:
    """Read what describes EAGLE-1 heads and MTP layers."""
    is_mtp, norm = head.kind == MTP, "layers.0.input_layernorm.weight"
    return replace(
        head,
        target_width=head.layers.hidden_size,  # a feature may also be an output of the head
        layers=replace(head.layers, norms_features=is_mtp or norm in files),
        has_fc_bias=flag(config, "fusion_bias" if is_speculators else "bias", head.has_fc_bias) and not is_mtp,
        norm_output=is_mtp,
    )


def _read_slots(head: HeadConfig, config: Mapping[str, Any], files: HeadFiles, is_speculators: bool) -> HeadConfig:
    """Read what describes SpecFormer heads."""
    slots = size(config, "num_slots")
    if slots > MOST_DRAFTED:
        raise UserError(f"num_slots is {slots}, it must be at most {MOST_DRAFTED}")
    if head.layers.hidden_size != head.target_width:
        raise UserError(f"hidden_size is {head.layers.hidden_size}, and the target's is {head.target_width}")
    if head.layers.num_layers > 1:
        raise UserError(f"num_hidden_layers is {head.layers.num_layers}, and SpecFormer has one layer across its slots")
    return replace(head, block=slots, from_anchor=True, fc_norm=True)


def _read_block(head: HeadConfig, config: Mapping[str, Any], files: HeadFiles, is_speculators: bool) -> HeadConfig:
    """Read what describes DFlash and DSpark heads."""
    nested = fields_of(config, "dflash_config")
    for name in UNSUPPORTED:
        if (value := nested.get(name)) not in (None, False) and (value is True or value != 1):  # 1: a factor of 1
            raise UserError(f"dflash_config.{name} is {value!r:.80}: such a head is not supported")
    if (files.path / "mask_embedding.pt").exists():
        raise UserError(
            "the folder holds mask_embedding.pt: a head with its own embedding of the mask is not supported"
        )
    whole, is_dspark = {**config, **nested}, head.kind == DSPARK
    default = "causal" in nested or "is_causal" in config
    is_causal = flag(config, "is_causal", flag(nested, "causal"))
    slides = not flag(config, "sliding_window_non_causal")
    markov = whole.get("markov_head_type") or MARKOV_KINDS[0]
    if markov not in MARKOV_KINDS:
        raise UserError(f"markov_head_type is {markov!r:.80}, it must be one of {', '.join(MARKOV_KINDS)}")
    windows = map(head.layers.window, range(head.layers.num_layers))
    block = size(whole, _first(whole, ("block_size", "dspark_block_size")), 8 if is_speculators else None)
    head = replace(
        head,
        mask_token=_mask_token(head, whole, ("mask_token_id", "dspark_noise_token_id")),
        block=block,
        from_anchor=flag(whole, "sample_from_anchor", is_dspark and not flag(whole, "dspark_bonus_anchor")),
        causal=tuple(is_causal if default else slides and window is not None for window in windows),
        markov=markov if "markov_head.markov_w1.weight" in files else None,
    )
    if not 1 <= head.num_drafted <= MOST_DRAFTED:
        least = 1 if head.from_anchor else 2
        raise UserError(f"block_size is {block}, it must be between {least} and {least + MOST_DRAFTED - 1}")
    return head


READERS = {**dict.fromkeys(BLOCKS, _read_block), SPECFORMER: _read_slots}


def _mask_token(head: HeadConfig, config: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the mask token, from the first of these fields that is there."""
    name = _first(config, names)
    token = size(config, name, smallest=0)
    if token >= head.layers.vocab_size:
        raise UserError(f"{name} is {token}, it must be a token below {head.layers.vocab_size}")
    return token


def _first(config: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the first of these fields that is there; if none is, the first."""
    return next((name for name in names if config.get(name) is not None), names[0])


def _layer_config(files: HeadFiles, own: Mapping[str, Any], max_positions: int) -> LlamaConfig:
    """Read the decoder layers. They have the biases that the file holds, and as many positions as the target."""
    fields = {name: value for name, value in own.items() if name not in IGNORED_IN_LAYER}
    fields.setdefault("num_hidden_layers", 1)
    fields["attention_bias"] = fields["mlp_bias"] = None
    if fields.get("sliding_window") is not None:
        fields["max_position_embeddings"] = max_positions
        if SLIDING in (fields.get("layer_types") or ()):
            fields.setdefault("use_sliding_window", True)
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    return replace(
        from_dict({**fields, "model_type": fields.get("model_type", "llama")}),
        max_positions=max_positions,  # the head's own number only sizes a table
        tie_embeddings=False,
        attention_bias=attention + "q_proj.bias" in files,
        output_bias=attention + "o_proj.bias" in files,
        mlp_bias=mlp + "gate_proj.bias" in files,
    )


def _taps(
    config: Mapping[str, Any], kind: str, own_layers: int, num_layers: int, width: int, files: HeadFiles
) -> tuple[int, ...]:
    """Return `HeadConfig.taps`. Several fields may hold them, and they count layers differently."""
    if kind in JOINED:
        return (num_layers,)
    fields = BLOCK_TAPS if kind in (*BLOCKS, SPECFORMER) else EAGLE_TAPS
    name, found, added = "the default of files without ids of layers", None, 0
    for outer, inner, counted_from in fields:
        holder = fields_of(config, outer) if outer else config
        if holder.get(inner) is not None:
            name, found, added = f"{outer}.{inner}" if outer else inner, holder[inner], counted_from
            break
    if found is None and kind in BLOCKS:
        last, steps = num_layers - 4, max(own_layers - 1, 1)
        found = (
            [round(1 + place * last / steps) for place in range(own_layers)] if own_layers > 1 else [num_layers // 2]
        )
        added = 1
    elif found is None:
        found = [2, num_layers // 2, num_layers - 3]
    is_valid = isinstance(found, list) and found and all(type(layer) is int for layer in found)
    if not is_valid or not all(0 <= layer + added <= num_layers for layer in found):
        allowed = f"layers from {-added} to {num_layers - added} of the target"
        raise UserError(f"{name} is {found!r:.80}, it must be a list of {allowed}")
    count = config.get("num_aux_hidden_states", config.get("num_aux_layers", len(found)))
    columns = files.shape("fc.weight")[-1] - width * (kind == SPECFORMER)  # whose fc also reads an embedding
    if columns != len(found) * width or count != len(found):
        raise UserError(
            f"fc.weight has {columns} inputs, which are not {len(found)} hidden states of width {width}"
            f" (layers {found}): the head is for another target, or reads another number of layers"
        )
    return tuple(layer + added for layer in found)


def _shapes(head: HeadConfig, files: HeadFiles) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that the head must have, and of the optional ones that it has."""
    layers, hidden, taps, rows = head.layers, head.layers.hidden_size, len(head.taps), head.num_rows
    norms: tuple[str, ...] = ("norm", "hidden_norm") if head.block else ("norm",)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, taps * head.target_width)}
    if head.kind == SPECFORMER:
        norms, shapes = (), slot_shapes(head)
    if head.kind in JOINED:
        shapes["fc.weight"] = (hidden, 2 * hidden)
        norms = tuple(name for name in JOINED_NORMS if head.kind == MTP or f"{name}.weight" in files)
    shapes |= {f"{name}.weight": (hidden,) for name in norms}
    if head.has_fc_bias:
        shapes["fc.bias"] = (hidden,)
    for layer in range(layers.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_shapes(layers, layer).items()}
    if head.norm_before_fc:
        shapes["input_norm.weight"] = (taps * head.target_width,)
    if head.fc_norm:
        shapes |= {f"fc_norm.{tap}.weight": (head.target_width,) for tap in range(taps)}
    if head.kind == P_EAGLE:
        shapes["mask_hidden"] = (1, 1, taps * head.target_width)
    if head.kind == DSPARK:
        shapes |= _markov_shapes(head, files)
    optional = {"embed_tokens.weight": (layers.vocab_size, hidden)}
    reduced = {"lm_head.weight": (rows, hidden), "d2t": (rows,)}
    is_reduced = rows != layers.vocab_size
    return shapes | {
        name: shape for name, shape in (optional | reduced).items() if name in files or (is_reduced and name in reduced)
    }


def slot_shapes(head: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a SpecFormer head's own tensors; `context.`: a layer without an MLP."""
    hidden, taps = head.layers.hidden_size, len(head.taps)
    layer = layer_shapes(head.layers, 0)
    shapes: dict[str, tuple[int, ...]] = {f"fc_norm.{tap}.weight": (head.target_width,) for tap in range(taps)}
    shapes |= {f"{name}.weight": (hidden,) for name in ("embed_norm", "hidden_norm")}
    shapes |= {"fc.weight": (hidden, hidden + taps * head.target_width), "slots.weight": (head.block * hidden, hidden)}
    shapes |= {f"context.{name}": shape for name, shape in layer.items() if not name.startswith(OF_MLP)}
    return shapes | {f"layers.0.{name}": shape for name, shape in layer.items()}


def layer_shapes(layers: LlamaConfig, number: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors."""
    hidden, intermediate, head_dim = layers.hidden_size, layers.intermediate_size, layers.head_dim
    queries, keys = layers.num_heads * head_dim, layers.num_kv_heads * head_dim
    takes_features = layers.takes_features and not number
    inputs = 2 * hidden if takes_features else hidden
    matrices = {
        "self_attn.q_proj": (queries, inputs, layers.attention_bias),
        "self_attn.k_proj": (keys, inputs, layers.attention_bias),
        "self_attn.v_proj": (keys, inputs, layers.attention_bias),
        "self_attn.o_proj": (hidden, queries, layers.output_bias),
        "mlp.gate_proj": (intermediate, hidden, layers.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, layers.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, layers.mlp_bias),
    }
    norms = ["input_layernorm"] if number or takes_features or layers.norms_features else []
    norms += ["post_attention_layernorm", *(["hidden_norm"] if takes_features else [])]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in norms}
    for name, (rows, columns, has_bias) in matrices.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if layers.head_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (head_dim,)
    return shapes


def _markov_shapes(head: HeadConfig, files: HeadFiles) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the Markov bias and of the confidence, which may read the embedding of the token before."""
    hidden, rank = head.layers.hidden_size, files.shape(f"{MARKOV}markov_w1.weight")[-1] if head.markov else 0
    shapes: dict[str, tuple[int, ...]] = {}
    if head.markov:
        shapes[f"{MARKOV}markov_w1.weight"] = (head.layers.vocab_size, rank)
        shapes[f"{MARKOV}markov_w2.weight"] = (head.num_rows, rank)
    if head.markov == "gated":
        shapes |= {f"{MARKOV}gate_proj.weight": (rank, hidden + rank), f"{MARKOV}gate_proj.bias": (rank,)}
    if head.markov == "rnn":
        shapes |= {f"{MARKOV}joint_proj.weight": (3 * rank, 2 * rank + hidden), f"{MARKOV}joint_proj.bias": (3 * rank,)}
    if f"{CONFIDENCE}weight" in files:
        reads_token = files.shape(f"{CONFIDENCE}weight")[-1] != hidden
        shapes |= {f"{CONFIDENCE}weight": (1, hidden + rank * reads_token), f"{CONFIDENCE}bias": (1,)}
    return shapes


def draft_ids(files: HeadFiles, head: HeadConfig) -> np.ndarray | None:
    """Return the target's token of each row of the head's output layer, int64 [rows]; None if row i is token i."""
    if "d2t" not in files:
        return None
    stored = files.array("d2t").astype(np.int64)
    ids = stored if files.has_absolute_ids else stored + np.arange(len(stored))
    vocab, where = head.layers.vocab_size, f"{files.path}: d2t"
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if len(outside):
        row = int(outside[0])
        raise UserError(f"{where} maps row {row} to token {int(ids[row])}, outside of the vocabulary of {vocab} tokens")
    tokens, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise UserError(
            f"{where} maps {int(counts.max())} rows to token {int(tokens[counts.argmax()])}, a token may have one"
        )
    if "t2d" in files and int(np.count_nonzero(files.array("t2d"))) != len(ids):
        found = int(np.count_nonzero(files.array("t2d")))
        raise UserError(f"{files.path}: t2d marks {found} tokens, and the output layer has {len(ids)} rows")
    return ids


def _check_target(config: Mapping[str, Any], target: Mapping[str, Any], head: HeadConfig) -> None:
    """Raise UserError if the files say that the head was trained for another target."""
    named, ours = verifier_fields(config).get("architectures"), target.get("architectures")
    if isinstance(named, list) and isinstance(ours, list) and named and ours and named[0] != ours[0]:
        raise UserError(f"the head was trained for a {named[0]} ({head.verifier}), and the target is a {ours[0]}")
    wanted, width = head.target_width, target.get("hidden_size")
    if isinstance(width, int) and width != wanted:
        raise UserError(f"the head reads hidden states of width {wanted}, and the target's have {width}")

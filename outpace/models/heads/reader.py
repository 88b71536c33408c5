"""Reads a `HeadConfig` from the files of a head, of every kind and layout.

A wrong layer, order or norm would not change the text, but would make every draft wrong. So everything that a file says
is checked against its tensors and the target when it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.models.heads.config import (
    MTP_LAYERS,
    HeadConfig,
    check_kind,
    fields_of,
    head_class,
    head_kind,
    verifier_fields,
    verifier_of,
)
from outpace.models.heads.fields import agreed, check_unread, within
from outpace.models.heads.files import HeadFiles
from outpace.models.llama.config.fields import OTHER_RUNTIME, SLIDING, ReadFields, number, size
from outpace.models.llama.config.llama_config import LlamaConfig, expert_shapes, from_dict

IGNORED_IN_LAYER = ("logit_scale", "architectures", "quantization_config", "tie_word_embeddings", "is_causal")
MAX_DRAFTED = 64  # tokens of a block
TAPS, LAYER_IDS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
# Fields of the formats that name layers, and what is added to get the number of layers completed: 1 where layers are
# counted from 0 and their output is read.
EAGLE_TAPS = {TAPS: 0, f"eagle_config.{TAPS}": 1, "eagle_config.layer_ids": 0, "target_layer_ids": 1}
BLOCK_TAPS = {
    **{LAYER_IDS: 0, "dflash_config.target_layer_ids": 1, "target_layer_ids": 1, "dspark_target_layer_ids": 1},
    TAPS: 0,
}
ANY_TAPS = {TAPS: 0, LAYER_IDS: 0, "layer_ids": 0, "target_layer_ids": 1}  # the same in any object, with a notice
MASKS = ("mask_token_id", "pard_token", "ptd_token_id", "dspark_noise_token_id")


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
        where, said = str(files.path), str(error).removesuffix(OTHER_RUNTIME)
        raise UserError(said if where in said else f"{where}: {said}") from error


def _checked(files: HeadFiles, target: Mapping[str, Any], max_positions: int, num_layers: int) -> HeadConfig:
    config = ReadFields(files.config)
    kind = str(head_kind(config, files.tensors.keys()))
    check_kind(kind, files.path)
    cls = head_class(kind)
    head: HeadConfig = cls.read(kind, config, files, target, max_positions, num_layers)
    files.check_shapes(cls.shapes(head, files))
    draft_ids(files, head)
    _check_target(config, target, head)
    unknown = check_unread(
        config, files.tensors.keys(), target.keys() if cls.shares_config or kind in MTP_LAYERS else ()
    )
    named = (f"unknown fields of the head were ignored: {', '.join(unknown)}",) if unknown else ()
    return replace(head, notices=files.notices + head.notices + named)


def read_layers(
    cls: Any,
    kind: str,
    config: ReadFields,
    files: HeadFiles,
    target: Mapping[str, Any],
    max_positions: int,
    num_layers: int,
) -> HeadConfig:
    """Read a head of decoder layers of this class, with what all kinds have."""
    is_speculators = "speculators_model_type" in config
    own = fields_of(config, "transformer_layer_config") if is_speculators else config
    check_count("num_hidden_layers", size(own, "num_hidden_layers", 1), files)
    layers = _layer_config(files, own, max_positions, kind, cls.is_block)
    width = size(config, "target_hidden_size", size(target, "hidden_size", layers.hidden_size))
    taps, notice = _taps(cls, config, kind, layers.num_layers, num_layers, width, files)
    stated = agreed(config, within("dflash_config", "num_target_layers"), size)
    if stated and stated[1] not in (num_layers, len(taps)):  # vLLM counts the taps
        raise UserError(f"{stated[0]} is {stated[1]}, and the target has {num_layers} layers: it is for another target")
    return HeadConfig(
        kind=kind,
        layers=layers,
        taps=taps,
        num_rows=size(config, "draft_vocab_size", layers.vocab_size),
        target_width=width,
        target_eps=number(target, "rms_norm_eps", layers.rms_norm_eps, 1.0),
        has_fc_bias="fc.bias" in files,
        logit_scale=number(config, "logit_scale", 1.0, 1e6),
        verifier=verifier_of(config),
        draft_length=_draft_length(config),
        notices=(notice,) if notice else (),
    )


def check_count(name: str, count: int, files: HeadFiles) -> None:
    """Raise UserError for more layers than tensors, before a shape is made for each."""
    if count > len(files.tensors):
        raise UserError(f"{name} is {count}, but the weight files hold {len(files.tensors)} tensors")


def read_mask(head: HeadConfig, config: ReadFields, files: HeadFiles, target: Mapping[str, Any]) -> int:
    """Return the mask token, which must have a row in the embedding that the head uses."""
    name, token = agreed(config, within("dflash_config", *MASKS), partial(size, smallest=0)) or (MASKS[0], None)
    token, rows = size({name: token}, name, smallest=0), head.layers.vocab_size
    whose = "the head's vocabulary"
    if "embed_tokens.weight" not in files and (held := size(target, "vocab_size", rows)) < rows:
        rows, whose = held, "the target's embedding, which the head uses,"
    if token >= rows:
        raise UserError(f"{name} is {token}, it must be a token below {rows}: {whose} has {rows} rows")
    return token


def _layer_config(
    files: HeadFiles, own: Mapping[str, Any], max_positions: int, kind: str, is_block: bool
) -> LlamaConfig:
    """Read the decoder layers. They have the biases that the file holds, and as many positions as the target."""
    fields = {name: value for name, value in own.items() if name not in IGNORED_IN_LAYER}
    if not is_block:  # whose class reads it
        fields["is_causal"] = own.get("is_causal")
    fields.setdefault("num_hidden_layers", 1)
    fields["attention_bias"] = fields["mlp_bias"] = None
    if fields.get("sliding_window") is not None:
        fields["max_position_embeddings"] = max_positions
        if SLIDING in (fields.get("layer_types") or ()):
            fields.setdefault("use_sliding_window", True)
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    found = from_dict(
        {**fields, "model_type": own.get("model_type", "llama")}, own.asked if isinstance(own, ReadFields) else None
    )
    return replace(
        found,
        norm_offset=0.0 if kind in MTP_LAYERS else found.norm_offset,  # `open_mtp` has added it
        max_positions=max_positions,  # the head's own number only sizes a table
        tie_embeddings=False,
        attention_bias=attention + "q_proj.bias" in files,
        output_bias=attention + "o_proj.bias" in files,
        mlp_bias=mlp + "gate_proj.bias" in files,
    )


def _taps(
    cls: Any, config: ReadFields, kind: str, own_layers: int, num_layers: int, width: int, files: HeadFiles
) -> tuple[tuple[int, ...], str | None]:
    """Return `HeadConfig.taps`, and a notice if the files do not fix them. Fields count layers differently."""

    def completed(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
        found, added = fields[name], added_by[name]
        is_valid = isinstance(found, list) and found and all(type(layer) is int for layer in found)
        if not is_valid or not all(0 <= layer + added <= num_layers for layer in found):
            allowed = f"layers from {-added} to {num_layers - added} of the target"
            raise UserError(f"{name} is {found!r:.80}, it must be a list of {allowed}")
        if found != sorted(set(found)):
            raise UserError(f"{name} is {found!r:.80}, it must be different layers in ascending order")
        return tuple(layer + added for layer in found)

    own = cls.tap_fields
    objects = [f"{name}." for name, value in config.items() if isinstance(value, ReadFields)]
    anywhere = {outer + name: added for outer in ("", *objects) for name, added in ANY_TAPS.items()}
    others = anywhere | EAGLE_TAPS | BLOCK_TAPS
    added_by = own | {name: added for name, added in others.items() if name not in own}  # its own fields come first
    name, taps = agreed(config, [*added_by], completed) or ("", ())
    if cls.reads_last:
        if taps not in ((), (num_layers,)):
            raise UserError(f"{name} names the states after {listed(taps)} layers, but {kind} reads the last one only")
        return (num_layers,), None
    notice, first = None, f"eagle_config.{TAPS}"
    if not taps:
        taps = cls.usual_taps(own_layers, num_layers)
        if taps[0] < 0 or taps[-1] > num_layers or [*taps] != sorted(set(taps)):
            raise UserError(f"no field names the target's layers that it reads, and it has too few for {taps}")
        notice = f"no field names the target's layers that it reads, so it gets the states after {listed(taps)} layers"
    elif name not in own or (name == first and taps[0] != 2):  # where layer 1 is the first, all programs agree
        notice = f"{name} is read as the states after {listed(taps)} layers, but other programs may count differently"
    stated = agreed(config, within("eagle_config", "num_aux_hidden_states", "num_aux_layers"), size)
    columns = files.shape("fc.weight")[-1] - width * cls.joins_embedding
    if columns != len(taps) * width or (stated and stated[1] != len(taps)):
        raise UserError(
            f"fc.weight has {columns} inputs, which are not {len(taps)} hidden states of width {width}"
            f" (layers {[tap - added_by.get(name, 0) for tap in taps]}): the head is for another target, or reads"
            " another number of layers"
        )
    return taps, notice


def listed(numbers: Sequence[int]) -> str:
    """Return numbers as in a sentence."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} and {last}" if others else last


def base_shapes(head: HeadConfig, files: HeadFiles, norms: Sequence[str] = ("norm",)) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a head of decoder layers with these norms outside of them."""
    layers, hidden, taps, rows = head.layers, head.layers.hidden_size, len(head.taps), head.num_rows
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, taps * head.target_width)}
    shapes |= {f"{name}.weight": (hidden,) for name in norms}
    if head.has_fc_bias:
        shapes["fc.bias"] = (hidden,)
    for layer in range(layers.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_shapes(layers, layer).items()}
    if head.norm_before_fc:
        shapes["input_norm.weight"] = (taps * head.target_width,)
    if head.fc_norm:
        shapes |= {f"fc_norm.{tap}.weight": (head.target_width,) for tap in range(taps)}
    optional = {"embed_tokens.weight": (layers.vocab_size, hidden)}
    reduced = {"lm_head.weight": (rows, hidden), "d2t": (rows,)}
    is_reduced = rows != layers.vocab_size
    return shapes | {
        name: shape for name, shape in (optional | reduced).items() if name in files or (is_reduced and name in reduced)
    }


def layer_shapes(layers: LlamaConfig, number: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors."""
    hidden, intermediate, head_dim = layers.hidden_size, layers.intermediate_size, layers.head_dim
    queries, keys = layers.num_heads * head_dim, layers.num_kv_heads * head_dim
    takes_features = layers.takes_features and not number
    inputs = 2 * hidden if takes_features else hidden
    matrices = {
        "self_attn.q_proj": (queries * (1 + layers.output_gate), inputs, layers.attention_bias),
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
    if layers.has_experts(number):
        matrices = {name: one for name, one in matrices.items() if not name.startswith("mlp.")}
        shapes |= expert_shapes(layers)
    for name, (rows, columns, has_bias) in matrices.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if layers.head_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (head_dim,)
    return shapes


def draft_ids(files: HeadFiles, head: HeadConfig) -> np.ndarray | None:
    """Return the target's token of each row of the head's output layer, int64 [rows]; None if row i is token i."""
    vocab, where = head.layers.vocab_size, f"{files.path}: d2t"
    ids = None if "d2t" not in files else files.array("d2t").astype(np.int64)
    if ids is not None and not files.is_gguf:  # a GGUF file holds tokens, other files their distances from the row
        ids = ids + np.arange(len(ids))
    known = np.arange(vocab) if ids is None else ids
    outside = np.flatnonzero((known < 0) | (known >= vocab))
    if len(outside):
        row = int(outside[0])
        raise UserError(f"{where} maps row {row} to token {known[row]}, outside of the vocabulary of {vocab} tokens")
    tokens, counts = np.unique(known, return_counts=True)
    if (counts > 1).any():
        raise UserError(
            f"{where} maps {int(counts.max())} rows to token {int(tokens[counts.argmax()])}, a token may have one"
        )
    if "t2d" in files:
        marked = np.flatnonzero(files.array("t2d"))
        if len(marked) != len(tokens):
            raise UserError(
                f"{files.path}: t2d marks {len(marked)} tokens, and the output layer has {len(tokens)} rows"
            )
        if (differs := np.flatnonzero(marked != tokens)).size:
            ours, theirs = int(tokens[differs[0]]), int(marked[differs[0]])
            raise UserError(
                f"{where} and t2d name different tokens, the first are {ours} and {theirs}: d2t[i] + i must be the"
                " tokens that t2d marks"
            )
    return ids


def _check_target(config: Mapping[str, Any], target: Mapping[str, Any], head: HeadConfig) -> None:
    """Raise UserError if the files say that the head was trained for another target."""
    named, ours = verifier_fields(config).get("architectures"), target.get("architectures")
    if isinstance(named, list) and isinstance(ours, list) and named and ours and named[0] != ours[0]:
        raise UserError(f"the head was trained for a {named[0]} ({head.verifier}), and the target is a {ours[0]}")
    wanted, width = head.target_width, target.get("hidden_size")
    if isinstance(width, int) and width != wanted:
        raise UserError(f"the head reads hidden states of width {wanted}, and the target's have {width}")

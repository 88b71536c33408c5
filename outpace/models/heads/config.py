"""Recognises trained heads by their config.json and tensors, and reads a `HeadConfig` from every layout.

EAGLE-3: Li et al., arXiv:2503.01840. A wrong layer, order or norm would not change the text, it would only make every
draft wrong. Therefore everything that a file says is checked against its tensors and the target when it is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.models.heads.files import HeadFiles
from outpace.models.llama.config.fields import flag, number, size
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict

EAGLE3 = "EAGLE-3"
EAGLE4 = "EAGLE-4"
SPECULATORS = {  # speculators_model_type: the kind
    "eagle3": EAGLE3,
    "peagle": "P-EAGLE",
    "dflash": "DFlash",
    "dflash2": "DFlash2",
    "dspark": "DSpark",
    "mtp": "MTP",
    "eagle": "EAGLE-1",
    "mlp": "MLP speculator",
}
ARCHITECTURES = (  # part of architectures[0], in lower case: the kind
    ("eagle4", EAGLE4),
    ("peagle", "P-EAGLE"),
    ("eagle3", EAGLE3),
    ("domino", "Domino"),
    ("dspark", "DSpark"),
    ("xpress", "XPress"),
    ("lilicorr", "LiLiCorr"),
    ("dflash", "DFlash"),
    ("eagle", "EAGLE-1"),
    ("medusa", "Medusa"),
)
FIELDS = (("dflash_config", "DFlash"), ("medusa_num_heads", "Medusa"))  # config.json's field: the kind
IGNORED_IN_LAYER = ("logit_scale", "architectures", "quantization_config", "tie_word_embeddings")


@dataclass(frozen=True)
class HeadConfig:
    """The architecture of a head.

    Attributes:
        kind: name of the method, as in SPECULATORS.
        layer: its decoder layer, with the target's vocabulary.
        taps: the target's hidden states that it reads, in the order of concatenation: each is the number of layers
            after which the state is taken.
        num_rows: number of rows of its output layer.
        target_width: size of the target's hidden states.
        norm_before_residual: whether the residual is the feature after its norm.
        norm_before_fc: whether the concatenated hidden states are normed before `fc`.
        fc_norm: whether each hidden state is normed before `fc`.
        norm_output: whether the output that the next draft step reads is normed.
        has_fc_bias: whether `fc` has a bias.
        logit_scale: factor of the logits.
        verifier: the target that it was trained for; None if the file does not say.
        draft_length: draft length that the file recommends; None if it does not say.
    """

    kind: str
    layer: LlamaConfig
    taps: tuple[int, ...]
    num_rows: int
    target_width: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    has_fc_bias: bool = False
    logit_scale: float = 1.0
    verifier: str | None = None
    draft_length: int | None = None


def head_kind(config: Mapping[str, Any], names: Collection[str] = ()) -> str | None:
    """Return the kind of head that a config.json, and the names of the tensors if they are known, describe; None for
    anything else."""
    kind = config.get("speculators_model_type")
    if isinstance(kind, str):
        return SPECULATORS.get(kind, kind)
    listed = config.get("architectures")
    name = str(listed[0]).lower() if isinstance(listed, list) and listed else ""
    nested = config.get("dflash_config")
    projector = (nested if isinstance(nested, Mapping) else config).get("projector_type", config.get("projector_type"))
    for part, kind in ARCHITECTURES:
        if part in name or part == projector:
            return kind
    if "selector_rank" in config:
        return "DFlash2"
    for field, kind in FIELDS:
        if field in config:
            return kind
    if "mask_hidden" in names:
        return "P-EAGLE"
    is_single = config.get("num_hidden_layers") == 1
    if is_single and "draft_vocab_size" in config:
        return EAGLE3
    if "fc.weight" in names:
        return EAGLE3 if "layers.0.hidden_norm.weight" in names else "EAGLE-1"
    return None


def check_kind(kind: str, where: object) -> None:
    """Raise UserError for a kind of head that is not supported; `where` is its file or folder."""
    if kind == EAGLE4:
        raise UserError(
            f"{where} is an EAGLE-4 head, whose licence forbids other implementations: outpace does not run it; use a"
            " head of another kind or a draft model"
        )
    if kind != EAGLE3:
        raise UserError(
            f"{where} is a trained head ({kind}) that is not supported yet: outpace runs EAGLE-3 heads, also in"
            " speculators' format, and draft models"
        )


def verifier_of(config: Mapping[str, Any]) -> str | None:
    """Return the target that a head in the format of speculators names; None if it names none."""
    verifier = _verifier(config).get("name_or_path")
    return verifier if isinstance(verifier, str) and verifier else None


def fields_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object in a field, empty if the field is missing or null; UserError for anything else."""
    found = config.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise UserError(f"{name} is {found!r:.80}, it must be an object")
    return found or {}


def _verifier(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return fields_of(fields_of(config, "speculators_config"), "verifier")


def _draft_length(config: Mapping[str, Any]) -> int | None:
    """Return the length of drafts that the first proposal method names, None if there is none."""
    match fields_of(config, "speculators_config").get("proposal_methods"):
        case [{"speculative_tokens": int(length)}, *_]:
            return length
    return None


def read_head(files: HeadFiles, target: Mapping[str, Any], max_positions: int, num_layers: int) -> HeadConfig:
    """Read and check an EAGLE-3 head for a target with these config.json fields and this number of layers. Raise
    UserError with the file and the first thing that is wrong."""
    try:
        return _checked(files, target, max_positions, num_layers)
    except UserError as error:
        where = str(files.path)
        raise error if where in str(error) else UserError(f"{where}: {error}") from error


def _checked(files: HeadFiles, target: Mapping[str, Any], max_positions: int, num_layers: int) -> HeadConfig:
    config = files.config
    kind = head_kind(config, files.tensors.keys())
    check_kind(str(kind), files.path)
    is_speculators = "speculators_model_type" in config
    own = fields_of(config, "transformer_layer_config") if is_speculators else config
    nested = fields_of(config, "eagle_config")
    if not flag(nested, "use_aux_hidden_state", True):
        raise UserError("eagle_config.use_aux_hidden_state is false: such a head is not supported")
    layer = _layer_config(files, own, max_positions)
    width = size(config, "target_hidden_size", size(target, "hidden_size", layer.hidden_size))
    taps = _taps(config, nested, num_layers, width, files)
    num_rows = size(config, "draft_vocab_size", layer.vocab_size)
    norm_before_residual = flag(config, "norm_before_residual", default=is_speculators)
    head = HeadConfig(
        kind=EAGLE3,
        layer=replace(layer, takes_features=True, norms_features=not norm_before_residual),
        taps=taps,
        num_rows=num_rows,
        target_width=width,
        norm_before_residual=norm_before_residual,
        norm_before_fc=flag(config, "norm_before_fc", flag(nested, "norm_before_fc")),
        fc_norm=flag(config, "fc_norm", flag(config, "use_aux_norm")),
        norm_output=flag(config, "norm_output"),
        has_fc_bias="fc.bias" in files,
        logit_scale=number(config, "logit_scale", 1.0, 1e6),
        verifier=verifier_of(config),
        draft_length=_draft_length(config),
    )
    files.check_shapes(_shapes(head, files))
    _check_target(config, target, head)
    return head


def _layer_config(files: HeadFiles, own: Mapping[str, Any], max_positions: int) -> LlamaConfig:
    """Read the decoder layer. It has the biases that the file holds, and as many positions as the target."""
    fields = {name: value for name, value in own.items() if name not in IGNORED_IN_LAYER}
    fields.setdefault("num_hidden_layers", 1)
    fields["attention_bias"] = fields["mlp_bias"] = None
    layer = from_dict({**fields, "model_type": fields.get("model_type", "llama")})
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    if layer.num_layers != 1:
        raise UserError(f"num_hidden_layers is {layer.num_layers}, EAGLE-3 heads of one layer are supported")
    return replace(
        layer,
        max_positions=max_positions,  # the head's own number only sizes a table
        tie_embeddings=False,
        attention_bias=attention + "q_proj.bias" in files,
        output_bias=attention + "o_proj.bias" in files,
        mlp_bias=mlp + "gate_proj.bias" in files,
    )


def _taps(
    config: Mapping[str, Any], nested: Mapping[str, Any], num_layers: int, width: int, files: HeadFiles
) -> tuple[int, ...]:
    """Return `HeadConfig.taps`. Three fields may hold them, and they count layers differently."""
    key = "eagle_aux_hidden_state_layer_ids"
    name, found, added = key, config.get(key), 0
    if found is None and nested.get(key) is not None:
        name, found, added = f"eagle_config.{key}", nested[key], 1  # layers counted from 0, whose output is read
    if found is None and nested.get("layer_ids") is not None:
        name, found, added = "eagle_config.layer_ids", nested["layer_ids"], 0
    if found is None:
        name, found = "the default of files without ids of layers", [2, num_layers // 2, num_layers - 3]
    is_valid = isinstance(found, list) and found and all(type(layer) is int for layer in found)
    if not is_valid or not all(0 <= layer + added <= num_layers for layer in found):
        allowed = f"layers from {-added} to {num_layers - added} of the target"
        raise UserError(f"{name} is {found!r:.80}, it must be a list of {allowed}")
    count = config.get("num_aux_hidden_states", config.get("num_aux_layers", len(found)))
    columns = files.shape("fc.weight")[-1]
    if columns != len(found) * width or count != len(found):
        raise UserError(
            f"fc.weight has {columns} inputs, which are not {len(found)} hidden states of width {width}"
            f" (layers {found}): the head is for another target, or reads another number of layers"
        )
    return tuple(layer + added for layer in found)


def _shapes(head: HeadConfig, files: HeadFiles) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that the head must have, and of the optional ones that it has."""
    layer, hidden, taps = head.layer, head.layer.hidden_size, len(head.taps)
    intermediate, head_dim = layer.intermediate_size, layer.head_dim
    queries, keys = layer.num_heads * head_dim, layer.num_kv_heads * head_dim
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    outputs = {
        attention + "q_proj": (queries, 2 * hidden, layer.attention_bias),
        attention + "k_proj": (keys, 2 * hidden, layer.attention_bias),
        attention + "v_proj": (keys, 2 * hidden, layer.attention_bias),
        attention + "o_proj": (hidden, queries, layer.output_bias),
        mlp + "gate_proj": (intermediate, hidden, layer.mlp_bias),
        mlp + "up_proj": (intermediate, hidden, layer.mlp_bias),
        mlp + "down_proj": (hidden, intermediate, layer.mlp_bias),
        "fc": (hidden, taps * head.target_width, head.has_fc_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (hidden,)}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"layers.0.{name}.weight"] = (hidden,)
    for name, (rows, columns, has_bias) in outputs.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if layer.head_norm:
        shapes[attention + "q_norm.weight"] = shapes[attention + "k_norm.weight"] = (head_dim,)
    if head.norm_before_fc:
        shapes["input_norm.weight"] = (taps * head.target_width,)
    if head.fc_norm:
        shapes |= {f"fc_norm.{tap}.weight": (head.target_width,) for tap in range(taps)}
    optional = {"embed_tokens.weight": (layer.vocab_size, hidden)}
    reduced = {"lm_head.weight": (head.num_rows, hidden), "d2t": (head.num_rows,)}
    is_reduced = head.num_rows != layer.vocab_size
    return shapes | {
        name: shape for name, shape in (optional | reduced).items() if name in files or (is_reduced and name in reduced)
    }


def draft_ids(files: HeadFiles, head: HeadConfig) -> np.ndarray | None:
    """Return the target's token of each row of the head's output layer, int64 [rows]; None if row i is token i."""
    if "d2t" not in files:
        return None
    stored = files.array("d2t").astype(np.int64)
    ids = stored if files.has_absolute_ids else stored + np.arange(len(stored))
    vocab, where = head.layer.vocab_size, f"{files.path}: d2t"
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
    named, ours = _verifier(config).get("architectures"), target.get("architectures")
    if isinstance(named, list) and isinstance(ours, list) and named and ours and named[0] != ours[0]:
        raise UserError(f"the head was trained for a {named[0]} ({head.verifier}), and the target is a {ours[0]}")
    wanted, width = head.target_width, target.get("hidden_size")
    if isinstance(width, int) and width != wanted:
        raise UserError(f"the head reads hidden states of width {wanted}, and the target's have {width}")

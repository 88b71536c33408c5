"""Prepares a layer's weights for the native kernels: fused, padded to whole groups, and int8 or in a file's format.

The kernels store panels of 32 outputs in one format and pad inputs to whole groups. A file's matrix that does not fit
this without requantisation goes the slower way by float32; rounded to int8, both ways give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from outpace.core.arrays import torch
from outpace.core.errors import UserError
from outpace.models.llama.config import gemma, gemma4
from outpace.models.llama.config.draft_vocab import checked_ids
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.weight_sources import FLOATS, Q4_1, StoredMatrix
from outpace.models.options import AUTO, FILE, INT4, INT8

if TYPE_CHECKING:
    from torch import Tensor

PANEL = 32  # outputs that the kernels pack together
INT8_MAX = 127 * 65504.0  # the largest weight in int8: the largest scale is that of half precision
Weight: TypeAlias = "Tensor | np.ndarray | StoredMatrix"


class Packing:
    """Creates the kernels' matrices of one model in memory that all of them share. Several threads may use it.

    Alone, each matrix would end within a large page, and all would exist twice while a layer is assembled.
    """

    def __init__(self, kernels: Any, threads: int = 1) -> None:
        self.kernels, self._threads = kernels, threads
        self._lock = Lock()
        self.arena = kernels.WeightArena()

    def of_floats(self, weights: np.ndarray, bias: Sequence[float] = ()) -> Any:
        """Round float32 [outputs, inputs] to int8; UserError for weights that int8 cannot hold."""
        try:
            return self.kernels.Matrix(weights, bias, arena=self.arena)
        except ValueError as error:
            shape = " x ".join(map(str, weights.shape))
            raise UserError(f"a matrix of {shape} weights does not fit int8, {error}: use --dtype float32") from error

    def of_file(self, parts: Sequence[tuple[str, np.ndarray]], rows: np.ndarray, inputs: int, **options: Any) -> Any:
        """Pack rows of tensors in a file's formats: ggml's name and the bytes of each.

        ValueError for values that are not finite or, in int8, too large. All threads work on one matrix at a time, so
        that only one matrix's part of the file is in memory.
        """
        order = np.ascontiguousarray(rows, np.int32)
        options = {"threads": self._threads, **options, "arena": self.arena}
        return self.alone(lambda: self.kernels.Matrix.stored(parts, order, inputs, **options))

    def alone(self, pack: Callable[[], Any]) -> Any:
        """Call `pack` while no other thread packs."""
        with self._lock:
            return pack()


class Fetch:
    """Fetches weights by name. A call returns contiguous float32."""

    def __init__(self, weight: Callable[[str], Weight], formats: Collection[str], weights: str) -> None:
        """`formats`: the formats that the kernels read. `weights`: see `NativeOptions`."""
        self._weight, self._formats, self.rounded = weight, formats, weights == INT8
        self._expected = FLOATS if weights in (AUTO, INT4) else ()  # rounding these needs no notice
        self._to_four = weights == INT4  # round the layers' floats to four bits
        self._has_four_bits = False
        self._has_blocks = False
        self._slow = set[str]()  # formats that went by way of float32

    @property
    def precision(self) -> str:
        """Format of the model whose matrices were fetched here: int8, int4 or file."""
        return FILE if self._has_blocks else INT4 if self._has_four_bits else INT8

    @property
    def notice(self) -> str | None:
        """A notice about formats that were not kept although all should be."""
        slow = ", ".join(sorted(self._slow))
        return None if self.rounded or not slow else f"rounded to int8, for the kernels do not take them so: {slow}"

    def __call__(self, name: str) -> np.ndarray:
        return self._floats(self._weight(name))

    def _floats(self, weight: Weight) -> np.ndarray:
        if isinstance(weight, StoredMatrix):
            self._note_rounded(weight.kind)
            values = weight.values()
            weight.forget()
            weight = values
        if not isinstance(weight, np.ndarray):
            weight = weight.to(device="cpu", dtype=torch.float32).numpy()
        return np.ascontiguousarray(weight, np.float32)

    def _note_rounded(self, *kinds: str) -> None:
        self._slow.update(kind for kind in kinds if kind not in self._expected)

    def stored_rows(self, name: str) -> tuple[str, np.ndarray, int]:
        """Return a matrix's format, rows of bytes, and number of columns: as the file has it or, if the kernels do not
        read its format, in half precision."""
        weight = self._weight(name)
        if isinstance(weight, StoredMatrix) and weight.kind in self._formats:
            return weight.kind, weight.data, weight.columns
        rows = self._floats(weight).astype(np.float16)
        return "F16", rows.view(np.uint8), rows.shape[1]

    def matrices(self, *names: str) -> Matrices:
        """Fetch matrices: blocks in a file's formats, and floats that the kernels round as they read them."""
        weights = [self._weight(name) for name in names]
        blocks = [one for one in weights if isinstance(one, StoredMatrix) and one.kind in self._formats]
        kinds = {one.kind for one in blocks}
        if len(blocks) < len(weights) or (len(kinds) > 1 and kinds.intersection(FLOATS)):
            return Matrices(weights, [], self._floats)
        self._note_rounded(*kinds.intersection(FLOATS))
        self._has_blocks |= bool(kinds.difference(FLOATS)) and not self.rounded
        return Matrices(weights, blocks, self._floats)

    def layer_matrices(self, packing: Packing, *names: str) -> Matrices:
        """Fetch matrices of a layer; floats become four bits if `weights` says so."""
        found = self.matrices(*names)
        if not self._to_four or not all(map(_is_float, found.weights)):
            return found
        floats = found.floats()
        rounded = [round_to_four_bits(packing.kernels, *named) for named in zip(names, floats, strict=True)]
        blocks = [one for one in rounded if one] if all(rounded) else []
        self._has_four_bits |= bool(blocks)
        return Matrices([*floats], blocks, self._floats)


@dataclass(frozen=True)
class Matrices:
    """Matrices that are packed together. `blocks`: all of them in formats that the kernels read, or none."""

    weights: list[Weight]
    blocks: list[StoredMatrix]
    _floats: Callable[[Weight], np.ndarray]

    def floats(self) -> list[np.ndarray]:
        """Return all as contiguous float32. Call it once: the originals are released."""
        return [self._floats(self.weights.pop(0)) for _ in range(len(self.weights))]


def _is_float(weight: Weight) -> bool:
    return not isinstance(weight, StoredMatrix) or weight.kind in FLOATS


def native_heads(kernels: Any, config: LlamaConfig, kv_dtype: str, layer: int | None = None) -> Any:
    """Build the kernels' sizes of attention, of all layers or of one; `config` has the layer's own sizes."""
    options: dict[str, Any] = {"scale": config.query_scale} if config.query_scale else {}
    options |= {"gated": True} if config.output_gate else {}
    options |= {"cap": config.score_cap} if config.score_cap else {}
    options |= {"norms_values": True} if config.norms_values else {}
    if layer is not None:
        options["projected"] = 0 if not config.stores(layer) else 1 if config.joins_values(layer) else 2
    sizes = config.num_heads, config.num_kv_heads, config.head_dim
    return kernels.Heads(*sizes, kv_dtype, config.rms_norm_eps, **options)


def build_layer(packing: Packing, config: LlamaConfig, number: int, fetch: Fetch, experts: Any, kv_dtype: str) -> Any:
    """Build the kernels' layer with these experts of the kernels, or None."""
    config = config if number == 0 else replace(config, takes_features=False, norms_features=True)
    config = config.of_layer(number)
    prefix = f"model.layers.{number}."
    if config.is_recurrent(number):
        return _load_recurrent_layer(packing, config, prefix, fetch, experts)
    attention = prefix + "self_attn."

    def norm(name: str, is_there: bool) -> list[float]:
        return _norm(config, fetch, prefix + name).tolist() if is_there else []

    own: dict[str, Any] = {}
    if config.full_heads:
        own["heads"] = native_heads(packing.kernels, config, kv_dtype, number)
    if not config.stores(number):
        own["keys_of"] = config.kv_layer(number)
    if config.scales_layers:
        own["scale"] = float(fetch(prefix + "layer_scalar")[0])
    if config.embedding_width:
        gate, output = (matrix_of_rows(packing, fetch, f"{prefix}{name}.weight") for name in gemma4.BRANCH)
        own["embedding"] = packing.kernels.EmbeddingBranch(gate, output, norm(gemma4.PROJECTION_NORM, True))
    if config.experts and config.experts.beside_mlp:
        router = fetch(prefix + "mlp.gate.scale") * np.float32(config.hidden_size**-0.5)
        after_mlp, before, after = (norm(name, True) for name in gemma4.BRANCH_NORMS)
        own["branch_norms"] = packing.kernels.BranchNorms(router.tolist(), after_mlp, before, after)
    layer = packing.kernels.Layer(
        _state_norm(config, fetch, prefix),
        _norm(config, fetch, prefix + config.mlp_norm),
        _qkv(packing, config, number, attention, fetch),
        _padded_inputs(packing, fetch, attention + "o_proj", config.head_dim, config.output_bias),
        *_mlp(packing, config, prefix, fetch, experts is not None),
        query_norm=norm("self_attn.q_norm", config.head_norm),
        key_norm=norm("self_attn.k_norm", config.head_norm and config.stores(number)),
        rotates=config.rotates(number),
        rotation=config.rotation(number) or 0,
        window=config.window(number) or 0,
        attention_output_norm=norm(gemma.ATTENTION_NORM, config.sandwich_norms),
        mlp_output_norm=norm(gemma.MLP_OUTPUT_NORM, config.sandwich_norms),
        experts=experts,
        sinks=fetch(attention + "sinks").tolist() if config.sinks else [],
        **({"token_norm": norm("input_layernorm", True)} if config.takes_features else {}),
        **own,
    )
    layer.is_causal = config.is_causal(number)
    return layer


def _load_recurrent_layer(packing: Packing, config: LlamaConfig, prefix: str, fetch: Fetch, experts: Any) -> Any:
    """Build a layer with a delta net or a short convolution."""
    sizes, norms = (
        config.recurrence,
        [_norm(config, fetch, prefix + name) for name in ("input_layernorm", config.mlp_norm)],
    )
    assert sizes is not None
    part, inputs, chunk = prefix + "conv.", [""], sizes.channels
    if sizes.is_delta_net:
        part, inputs, chunk = prefix + "linear_attn.", ["_qkv", "_z"], sizes.value_depth
    kernel = fetch(part + ("conv1d.weight" if sizes.is_delta_net else "conv.weight"))
    weights: dict[str, Any] = {"filters": np.ascontiguousarray(kernel.reshape(sizes.channels, -1).T)}
    if sizes.is_delta_net:
        rates = -np.exp(fetch(part + "A_log").astype(np.float64))
        weights |= {
            "strengths": _stacked(packing, fetch, [f"{part}in_proj{name}" for name in ("_b", "_a")]),
            "rates": rates.astype(np.float32).tolist(),
            "time_bias": fetch(part + "dt_bias").tolist(),
            "norm": fetch(part + "norm.weight").tolist(),
        }
    return packing.kernels.Layer.recurrent(
        *norms,
        _stacked(packing, fetch, [f"{part}in_proj{name}" for name in inputs]),
        _padded_inputs(packing, fetch, part + "out_proj", chunk, False),
        *_mlp(packing, config, prefix, fetch, experts is not None),
        experts=experts,
        **weights,
    )


def _stacked(packing: Packing, fetch: Fetch, names: Sequence[str]) -> Any:
    """Pack the rows of matrices without biases, one matrix after the other."""
    found = fetch.layer_matrices(packing, *(name + ".weight" for name in names))
    packed = stack_stored(packing, found.blocks, [], fetch.rounded) if found.blocks else None
    return packed or packing.of_floats(np.concatenate(found.floats()))


def _state_norm(config: LlamaConfig, fetch: Fetch, prefix: str) -> np.ndarray:
    """Fetch the norm of the hidden state before attention; empty if the state is normed already."""
    if not config.norms_features:
        return np.zeros(0, np.float32)
    return _norm(config, fetch, prefix + ("hidden_norm" if config.takes_features else "input_layernorm"))


def _norm(config: LlamaConfig, fetch: Fetch, name: str) -> np.ndarray:
    return fetch(name + ".weight") + np.float32(config.norm_offset)


def padded_width(kernels: Any, width: int) -> int:
    """Return an MLP's width in whole groups; the added channels compute silu(0) * 0."""
    return -(-width // kernels.GROUP) * int(kernels.GROUP)


def interleaved(kernels: Any, parts: Sequence[np.ndarray], width: int, missing: int = 0) -> np.ndarray:
    """Return 16 rows of the first part, 16 of the second, and so on, each padded with `missing` to `width` rows."""
    padded = [_padded(part, 0, width - len(part), missing) for part in parts]
    both = np.stack([part.reshape(-1, kernels.LANES, *part.shape[1:]) for part in padded], axis=1)
    return both.reshape(len(parts) * width, *parts[0].shape[1:])


def _qkv(packing: Packing, config: LlamaConfig, layer: int, prefix: str, fetch: Fetch) -> Any:
    parts = "q" if not config.stores(layer) else "qk" if config.joins_values(layer) else "qkv"
    names = [f"{prefix}{name}_proj" for name in parts]
    bias = np.concatenate([fetch(name + ".bias") for name in names]).tolist() if config.attention_bias else []
    gates = [f"{prefix}output_gate.weight"] if config.output_gate else []
    found = fetch.layer_matrices(packing, *(name + ".weight" for name in names), *gates)
    padding = -config.hidden_size % packing.kernels.GROUP if config.takes_features else 0  # of each half of the inputs
    packed = stack_stored(packing, found.blocks, bias, fetch.rounded) if found.blocks and not padding else None
    if packed:
        return packed
    weight = np.concatenate(found.floats())
    if padding:
        weight = _padded(weight.reshape(len(weight), 2, -1), 2, padding).reshape(len(weight), -1)
    return packing.of_floats(weight, bias)


def _padded_inputs(packing: Packing, fetch: Fetch, name: str, chunk: int, has_bias: bool) -> Any:
    """Pack a projection with every `chunk` inputs padded to whole groups, so that a head, or the MLP's activations, can
    be rounded once computed."""
    bias = fetch(name + ".bias").tolist() if has_bias else []
    found = fetch.layer_matrices(packing, name + ".weight")
    packed = pad_stored(packing, found.blocks[0], chunk, bias, fetch.rounded) if found.blocks else None
    if packed:
        return packed
    weight = found.floats()[0]
    padded = _padded(weight.reshape(len(weight), -1, chunk), 2, -chunk % packing.kernels.GROUP)
    return packing.of_floats(padded.reshape(len(weight), -1), bias)


def _mlp(packing: Packing, config: LlamaConfig, prefix: str, fetch: Fetch, has_experts: bool) -> tuple[Any, Any]:
    """Return the matrices of an MLP, or of the shared expert, None without one: 16 gates, then the 16 ups that they
    gate, and so on, so that both are in one panel; then the outputs."""
    width, has_bias, part = config.intermediate_size, config.mlp_bias, prefix + "mlp."
    if has_experts and config.experts and not config.experts.beside_mlp:
        width, has_bias, part = config.experts.shared_width, False, prefix + "mlp.shared_expert."
        if not width:
            return None, None
    padded = padded_width(packing.kernels, width)
    names = [f"{part}{name}_proj" for name in ("gate", "up")]
    biases = [fetch(name + ".bias") for name in names] if has_bias else []
    bias = interleaved(packing.kernels, biases, padded).tolist() if biases else []
    found = fetch.layer_matrices(packing, *(name + ".weight" for name in names))
    packed = interleave_stored(packing, found.blocks, padded, bias, fetch.rounded) if found.blocks else None
    if not packed:
        packed = packing.of_floats(interleaved(packing.kernels, found.floats(), padded), bias)
    return packed, _padded_inputs(packing, fetch, part + "down_proj", width, has_bias)


def _padded(weight: np.ndarray, axis: int, count: int, missing: int = 0) -> np.ndarray:
    """Append `count` times `missing` along an axis; mostly none are needed, and the same array is returned."""
    if not count:
        return weight
    widths = [(0, count if place == axis else 0) for place in range(weight.ndim)]
    return np.pad(weight, widths, constant_values=missing)


def matrix_of_rows(
    packing: Packing, fetch: Fetch, name: str, rows: np.ndarray | None = None, bias: Sequence[float] = ()
) -> Any:
    """Pack a matrix, or only some of its rows."""
    found = fetch.matrices(name)
    if found.blocks:
        part = found.blocks[0] if rows is None else replace(found.blocks[0], order=found.blocks[0].order[rows])
        return stack_stored(packing, [part], bias, fetch.rounded)
    [weight] = found.floats()
    return packing.of_floats(weight if rows is None else np.ascontiguousarray(weight[rows]), bias)


@dataclass(frozen=True)
class EmbeddingAndHead:
    """Embedding, final norm and output layer. `kept` [rows]: the output layer's tokens, rising; None: all. `by_layer`:
    the tokens' embeddings for each layer, or None."""

    embedding: Any
    norm: np.ndarray
    head: Any
    kept: np.ndarray | None
    by_layer: Any = None

    @classmethod
    def load(
        cls, packing: Packing, config: LlamaConfig, fetch: Fetch, head_ids: np.ndarray | Tensor | None
    ) -> EmbeddingAndHead:
        """Build them from Hugging Face weight names; an output layer that is the embedding is stored once."""
        name, kept = "model.embed_tokens.weight", None
        embedding, norm = matrix_of_rows(packing, fetch, name), _norm(config, fetch, "model.norm")
        by_layer = _load_by_layer(packing, config, fetch) if config.embedding_width else None
        if config.tie_embeddings and head_ids is None:
            return cls(embedding, norm, embedding, None, by_layer)
        if head_ids is not None:
            kept = np.sort(checked_ids(head_ids, config.vocab_size))
        head = matrix_of_rows(packing, fetch, name if config.tie_embeddings else "lm_head.weight", kept)
        return cls(embedding, norm, head, kept, by_layer)


def _load_by_layer(packing: Packing, config: LlamaConfig, fetch: Fetch) -> Any:
    """Build the tokens' embeddings for each layer; the table stays in its file if the kernels read its format."""
    projection = matrix_of_rows(packing, fetch, gemma4.MODEL_PROJECTION)
    kind, table, columns = fetch.stored_rows(gemma4.TABLE)
    norm = _norm(config, fetch, gemma4.MODEL_NORM).tolist()
    return packing.kernels.TokenEmbeddings(kind, table, columns, projection, norm)


def round_to_four_bits(kernels: Any, name: str, weights: np.ndarray) -> StoredMatrix | None:
    """Round float32 [rows, columns] to Q4_1: 32 weights share a scale and a minimum. None for partial blocks."""
    rows, columns = weights.shape
    if columns % Q4_1.values:
        return None
    data = np.empty((rows, columns // Q4_1.values * Q4_1.bytes), np.uint8)
    kernels.round_to_q4_1(weights, data)
    order = np.arange(rows, dtype=np.int32)
    return StoredMatrix(Path(name), name, Q4_1.name, data, order, columns, lambda: weights, lambda: None)


def stack_stored(packing: Packing, parts: Sequence[StoredMatrix], bias: Sequence[float], rounded: bool) -> Any:
    """Pack the rows of all parts, one part after the other; None if a panel would have two formats."""
    ends = np.cumsum([len(part.order) for part in parts])
    kinds = [part.kind for part in parts]
    for end, one, other in zip(ends, kinds, kinds[1:], strict=False):
        if one != other and end % PANEL:
            return None
    firsts = [0, *np.cumsum([len(part.data) for part in parts])]
    rows = np.concatenate([part.order + first for part, first in zip(parts, firsts, strict=False)])
    return _pack_stored(packing, parts, rows, parts[0].columns, bias=bias, rounded=rounded)


def interleave_stored(
    packing: Packing, parts: Sequence[StoredMatrix], width: int, bias: Sequence[float], rounded: bool
) -> Any:
    """Pack 16 rows of the first part, 16 of the second, and so on, each part padded with zeros to `width` rows.

    None if they have two formats.
    """
    if len({part.kind for part in parts}) > 1:
        return None
    first, orders = 0, []
    for part in parts:
        orders.append(part.order + first)
        first += len(part.data)
    rows = interleaved(packing.kernels, orders, width, missing=-1)
    return _pack_stored(packing, parts, rows, parts[0].columns, bias=bias, rounded=rounded)


def fits_padded(kernels: Any, part: StoredMatrix, chunk: int) -> bool:
    """Return whether every `chunk` inputs can be padded to whole groups without cutting a block."""
    unit = kernels.FORMATS.get(part.kind, 1)  # values in a block; 1 for floats
    return not chunk % kernels.GROUP or not (unit > kernels.GROUP or chunk % unit)


def pad_stored(packing: Packing, part: StoredMatrix, chunk: int, bias: Sequence[float], rounded: bool) -> Any:
    """Pack a matrix with every `chunk` inputs padded to whole groups; None if a block would have to be cut."""
    if not fits_padded(packing.kernels, part, chunk):
        return None
    inputs = part.columns // chunk * padded_width(packing.kernels, chunk)
    return _pack_stored(packing, [part], part.order, inputs, chunk=chunk, bias=bias, rounded=rounded)


def _pack_stored(packing: Packing, parts: Sequence[StoredMatrix], rows: np.ndarray, inputs: int, **options: Any) -> Any:
    data = [(part.kind, part.data) for part in parts]
    try:
        return packing.of_file(data, rows, inputs, **options)
    except ValueError as error:  # about a scale or a float: everything else was checked
        if options["rounded"] or parts[0].kind in FLOATS:
            _check_sizes(parts)
        names = " or ".join(repr(part.name) for part in parts)
        raise UserError(f"{parts[0].path} is damaged: tensor {names} holds values that are not finite") from error
    finally:
        for part in parts:
            part.forget()


def _check_sizes(parts: Sequence[StoredMatrix]) -> None:
    """Raise UserError for a value that is too large for int8; `values` itself finds those that are not finite."""
    for part in parts:
        largest = float(np.abs(part.values()).max())
        if INT8_MAX < largest < np.inf:
            raise UserError(
                f"{part.path}: tensor {part.name!r} holds a weight of size {largest:.3g}, and int8 holds at most"
                f" {INT8_MAX:.3g}: use --dtype float32"
            )

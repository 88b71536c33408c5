"""Lays the weights of a layer out for the native kernels: fused, padded to whole groups, and rounded to int8 unless
they are taken as the file has them (stored.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from outpace.core.errors import UserError
from outpace.core.lazy import torch
from outpace.models.llama.config import gemma
from outpace.models.llama.config.draft_vocab import checked_ids
from outpace.models.llama.config.footprint import FLOATS
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.weight_sources import Q4_1, StoredMatrix
from outpace.models.options import AUTO, FILE, INT4, INT8

if TYPE_CHECKING:
    from torch import Tensor


class Packing:
    """Makes the matrices of one model. Several threads may use it."""

    def __init__(self, kernels: Any, threads: int = 1) -> None:
        self.kernels, self._threads = kernels, threads
        self._packing = Lock()
        self._room = {"room": kernels.Room()} if hasattr(kernels, "Room") else {}  # kernels of before know none

    def of_floats(self, weights: np.ndarray, bias: Sequence[float] = ()) -> Any:
        """float32 [outputs, inputs], rounded to int8; UserError for what that does not hold."""
        try:
            return self.kernels.Matrix(weights, bias, **self._room)
        except ValueError as error:
            shape = " x ".join(map(str, weights.shape))
            raise UserError(f"a matrix of {shape} weights does not fit int8, {error}: use --dtype float32") from error

    def of_file(self, parts: Sequence[tuple[str, np.ndarray]], rows: np.ndarray, inputs: int, **options: Any) -> Any:
        """Rows of tensors in a file's formats: ggml's name and bytes of each; ValueError for what is not finite
        or, in int8, too large.

        By all threads together and one matrix after the other, so that one matrix's part of the file is in memory."""
        order, more = np.ascontiguousarray(rows, np.int32), {"threads": self._threads, **options, **self._room}
        with self._packing:
            return self.kernels.Matrix.stored(parts, order, inputs, **more)


PANEL = 32  # outputs that the kernels pack together
INT8_MOST = 127 * 65504.0  # by the largest scale in half precision
Weight: TypeAlias = "Tensor | np.ndarray | StoredMatrix"


class Fetch:
    """Weights by name. A call gives float32, row by row in memory."""

    def __init__(self, weight: Callable[[str], Weight], formats: Collection[str], weights: str) -> None:
        """`formats`: the names of those that the kernels take. `weights`: as the runtime's options have it."""
        self._weight, self._formats, self.rounded = weight, formats, weights == INT8
        self._expected = FLOATS if weights in (AUTO, INT4) else ()  # nobody is told that these are rounded
        self._to_four = weights == INT4  # what comes in float in a layer
        self._in_four = False  # a matrix is held so
        self._kept = False  # a matrix is held as its file has it
        self._slow = set[str]()  # formats of those that went by way of float32

    @property
    def precision(self) -> str:
        """Of a model whose matrices were asked for here: int8, int4, or as the file has them."""
        return FILE if self._kept else INT4 if self._in_four else INT8

    @property
    def notice(self) -> str | None:
        """What was not kept, where all should be."""
        slow = ", ".join(sorted(self._slow))
        return None if self.rounded or not slow else f"rounded to int8, for the kernels do not take them so: {slow}"

    def __call__(self, name: str) -> np.ndarray:
        return self._floats(self._weight(name))

    def _floats(self, held: Weight) -> np.ndarray:
        if isinstance(held, StoredMatrix):
            self._note_rounded(held.kind)
            values = held.values()
            held.forget()
            held = values
        if not isinstance(held, np.ndarray):
            held = held.to(device="cpu", dtype=torch.float32).numpy()
        return np.ascontiguousarray(held, np.float32)

    def _note_rounded(self, *kinds: str) -> None:
        self._slow.update(kind for kind in kinds if kind not in self._expected)

    def stored(self, *names: str) -> Matrices:
        """The matrices, their blocks as a file has them, or its floats, which the kernels round as they read them."""
        held = [self._weight(name) for name in names]
        blocks = [one for one in held if isinstance(one, StoredMatrix) and one.kind in self._formats]
        kinds = {one.kind for one in blocks}
        if len(blocks) < len(held) or (len(kinds) > 1 and kinds.intersection(FLOATS)):
            return Matrices(held, [], self._floats)
        self._note_rounded(*kinds.intersection(FLOATS))
        self._kept |= bool(kinds.difference(FLOATS)) and not self.rounded
        return Matrices(held, blocks, self._floats)

    def of_layer(self, packing: Packing, *names: str) -> Matrices:
        """The matrices of a layer as `stored`, or in four bits where floats are to be held so."""
        found = self.stored(*names)
        if not self._to_four or not all(map(_is_float, found.held)):
            return found
        floats = found.floats()
        rounded = [round_to_four_bits(packing.kernels, *named) for named in zip(names, floats, strict=True)]
        blocks = [one for one in rounded if one] if all(rounded) else []
        self._in_four |= bool(blocks)
        return Matrices([*floats], blocks, self._floats)


@dataclass(frozen=True)
class Matrices:
    """Matrices that go together, each fetched once. `blocks`: all of them in formats that the kernels take; none unless
    all can be."""

    held: list[Weight]
    blocks: list[StoredMatrix]
    _floats: Callable[[Weight], np.ndarray]

    def floats(self) -> list[np.ndarray]:
        """float32, row by row in memory. To be asked for once: nothing is held here behind it."""
        return [self._floats(self.held.pop(0)) for _ in range(len(self.held))]


def _is_float(held: Weight) -> bool:
    return not isinstance(held, StoredMatrix) or held.kind in FLOATS


def load_layer(packing: Packing, config: LlamaConfig, number: int, fetch: Fetch) -> Any:
    """Layer `number` from Hugging Face weight names, as the kernels hold it."""
    prefix = f"model.layers.{number}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    names = ("q_norm", "k_norm") if config.head_norm else ()
    norms = [_norm(config, fetch, attention + name).tolist() for name in names] or [[], []]
    return packing.kernels.Layer(
        _norm(config, fetch, prefix + "input_layernorm"),
        _norm(config, fetch, prefix + config.mlp_norm),
        _qkv(packing, config, attention, fetch),
        _output(packing, config, attention, fetch),
        _gate_up(packing, config, mlp, fetch),
        _down(packing, config, mlp, fetch),
        query_norm=norms[0],
        key_norm=norms[1],
        turns=config.rotates(number),
        **_of_layer(config, number, prefix, fetch),
    )


def _of_layer(config: LlamaConfig, number: int, prefix: str, fetch: Fetch) -> dict[str, Any]:
    """What sets layer `number` apart from Llama's, of which older kernels know nothing."""
    found: dict[str, Any] = {"rotation": 1} if config.rotation(number) else {}
    if config.window(number):
        found["window"] = config.window(number)
    if config.sandwich_norms:
        names = {"mixed_norm": gemma.ATTENTION_NORM, "fed_norm": gemma.MLP_OUTPUT_NORM}
        found |= {place: _norm(config, fetch, prefix + name).tolist() for place, name in names.items()}
    return found


def _norm(config: LlamaConfig, fetch: Fetch, name: str) -> np.ndarray:
    """A norm's weights."""
    return fetch(name + ".weight") + np.float32(config.norm_offset)


def middle_size(kernels: Any, config: LlamaConfig) -> int:
    """The MLP's width in whole groups; what is added computes silu(0) * 0."""
    return -(-config.intermediate_size // kernels.GROUP) * kernels.GROUP


def _qkv(packing: Packing, config: LlamaConfig, prefix: str, fetch: Fetch) -> Any:
    names = [f"{prefix}{name}_proj" for name in "qkv"]
    weights = [name + ".weight" for name in names]
    bias = np.concatenate([fetch(name + ".bias") for name in names]).tolist() if config.attention_bias else []
    found = fetch.of_layer(packing, *weights)
    made = stack_stored(packing, found.blocks, bias, fetch.rounded) if found.blocks else None
    return made or packing.of_floats(np.concatenate(found.floats()), bias)


def _output(packing: Packing, config: LlamaConfig, prefix: str, fetch: Fetch) -> Any:
    """Each head's inputs are padded to whole groups, so that a head can be rounded as soon as it is computed."""
    bias = fetch(prefix + "o_proj.bias").tolist() if config.output_bias else []
    found = fetch.of_layer(packing, prefix + "o_proj.weight")
    made = pad_stored(packing, found.blocks[0], config.head_dim, bias, fetch.rounded) if found.blocks else None
    if made:
        return made
    weight = found.floats()[0].reshape(config.hidden_size, config.num_heads, config.head_dim)
    padded = _padded(weight, 2, -config.head_dim % packing.kernels.GROUP).reshape(config.hidden_size, -1)
    return packing.of_floats(padded, bias)


def _gate_up(packing: Packing, config: LlamaConfig, prefix: str, fetch: Fetch) -> Any:
    """16 gates, then the 16 ups that they gate, and so on: both lie in one panel."""
    middle = middle_size(packing.kernels, config)

    def woven(parts: Sequence[np.ndarray]) -> np.ndarray:
        padded = [_padded(part, 0, middle - len(part)) for part in parts]
        both = np.stack([part.reshape(-1, packing.kernels.LANES, *part.shape[1:]) for part in padded], axis=1)
        return both.reshape(2 * middle, *parts[0].shape[1:])

    names = [f"{prefix}{name}_proj" for name in ("gate", "up")]
    bias = woven([fetch(name + ".bias") for name in names]).tolist() if config.mlp_bias else []
    found = fetch.of_layer(packing, *(name + ".weight" for name in names))
    made = interleave_stored(packing, found.blocks, middle, bias, fetch.rounded) if found.blocks else None
    return made or packing.of_floats(woven(found.floats()), bias)


def _down(packing: Packing, config: LlamaConfig, prefix: str, fetch: Fetch) -> Any:
    bias = fetch(prefix + "down_proj.bias").tolist() if config.mlp_bias else []
    found, size = fetch.of_layer(packing, prefix + "down_proj.weight"), config.intermediate_size
    made = pad_stored(packing, found.blocks[0], size, bias, fetch.rounded) if found.blocks else None
    if made:
        return made
    weight = _padded(found.floats()[0], 1, middle_size(packing.kernels, config) - size)
    return packing.of_floats(weight, bias)


def _padded(weight: np.ndarray, axis: int, count: int) -> np.ndarray:
    """With so many zeros behind an axis; the same array where there are none, which mostly is so."""
    if not count:
        return weight
    return np.pad(weight, [(0, count if place == axis else 0) for place in range(weight.ndim)])


def of_rows(packing: Packing, fetch: Fetch, name: str, rows: np.ndarray | None = None) -> Any:
    """A matrix without a bias, or those rows of it alone."""
    found = fetch.stored(name)
    if found.blocks:
        part = found.blocks[0] if rows is None else replace(found.blocks[0], order=found.blocks[0].order[rows])
        return stack_stored(packing, [part], [], fetch.rounded)
    [weight] = found.floats()
    return packing.of_floats(weight if rows is None else np.ascontiguousarray(weight[rows]))


@dataclass(frozen=True)
class EmbeddingAndHead:
    """What stands before and behind the layers. `held` [rows]: the output layer's tokens, rising; None: all."""

    embedding: Any
    norm: np.ndarray
    head: Any
    held: np.ndarray | None

    @classmethod
    def load(
        cls, packing: Packing, config: LlamaConfig, fetch: Fetch, head_ids: np.ndarray | Tensor | None
    ) -> EmbeddingAndHead:
        """From Hugging Face weight names; an output layer that is the embedding is held once."""
        name, held = "model.embed_tokens.weight", None
        embedding, norm = of_rows(packing, fetch, name), _norm(config, fetch, "model.norm")
        if config.tie_embeddings and head_ids is None:
            return cls(embedding, norm, embedding, None)
        if head_ids is not None:
            held = np.sort(checked_ids(head_ids, config.vocab_size))
        head = of_rows(packing, fetch, name if config.tie_embeddings else "lm_head.weight", held)
        return cls(embedding, norm, head, held)


def round_to_four_bits(kernels: Any, name: str, weights: np.ndarray) -> StoredMatrix | None:
    """float32 [rows, columns] in the form of Q4_1: 32 weights share a scale and a smallest value. None for rows that
    are not whole blocks."""
    rows, columns = weights.shape
    if columns % Q4_1.values:
        return None
    data = np.empty((rows, columns // Q4_1.values * Q4_1.bytes), np.uint8)
    kernels.round_to_q4_1(weights, data)
    order = np.arange(rows, dtype=np.int32)
    return StoredMatrix(Path(name), name, Q4_1.name, data, order, columns, lambda: weights, lambda: None)


def stack_stored(packing: Packing, parts: Sequence[StoredMatrix], bias: Sequence[float], rounded: bool) -> Any:
    """The rows of all parts; None where a panel would have two formats."""
    ends = np.cumsum([len(part.order) for part in parts])
    kinds = [part.kind for part in parts]
    for end, one, other in zip(ends, kinds, kinds[1:], strict=False):
        if one != other and end % PANEL:
            return None
    firsts = [0, *np.cumsum([len(part.data) for part in parts])]
    rows = np.concatenate([part.order + first for part, first in zip(parts, firsts, strict=False)])
    return _stored_matrix(packing, parts, rows, parts[0].columns, bias=bias, rounded=rounded)


def interleave_stored(
    packing: Packing, parts: Sequence[StoredMatrix], middle: int, bias: Sequence[float], rounded: bool
) -> Any:
    """16 rows of the first part, 16 of the second, and so on, each part with zeros up to `middle` rows; None where they
    have two formats."""
    if len({part.kind for part in parts}) > 1:
        return None
    first, orders = 0, []
    for part in parts:
        orders.append(np.pad(part.order + first, (0, middle - len(part.order)), constant_values=-1))
        first += len(part.data)
    rows = np.stack([order.reshape(-1, packing.kernels.LANES) for order in orders], axis=1).reshape(-1)
    return _stored_matrix(packing, parts, rows, parts[0].columns, bias=bias, rounded=rounded)


def pad_stored(packing: Packing, part: StoredMatrix, chunk: int, bias: Sequence[float], rounded: bool) -> Any:
    """Every `chunk` inputs padded to whole groups; None where a block would have to be cut."""
    padding = -chunk % packing.kernels.GROUP
    unit = packing.kernels.FORMATS.get(part.kind, 1)  # of floats, one
    if padding and (unit > packing.kernels.GROUP or chunk % unit):
        return None
    inputs = part.columns // chunk * (chunk + padding)
    return _stored_matrix(packing, [part], part.order, inputs, chunk=chunk, bias=bias, rounded=rounded)


def _stored_matrix(
    packing: Packing, parts: Sequence[StoredMatrix], rows: np.ndarray, inputs: int, **options: Any
) -> Any:
    data = [(part.kind, part.data) for part in parts]
    try:
        return packing.of_file(data, rows, inputs, **options)
    except ValueError as error:  # of a scale or a float: all else was checked
        if options["rounded"] or parts[0].kind in FLOATS:
            _check_sizes(parts)
        names = " or ".join(repr(part.name) for part in parts)
        raise UserError(f"{parts[0].path} is damaged: tensor {names} holds values that are not finite") from error
    finally:
        for part in parts:
            part.forget()


def _check_sizes(parts: Sequence[StoredMatrix]) -> None:
    """UserError where a value is not finite, which `values` finds, or too large for int8."""
    for part in parts:
        most = float(np.abs(part.values()).max())
        if INT8_MOST < most < np.inf:
            raise UserError(
                f"{part.path}: tensor {part.name!r} holds a weight of size {most:.3g}, and int8 holds at most"
                f" {INT8_MOST:.3g}: use --dtype float32"
            )

"""Prepares a layer's weights for the torch runtime: fused, interleaved for rotation, packed, with norms folded in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.models.llama.config import gemma, gemma4
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.torch.experts import ExpertWeights, load_experts
from outpace.models.llama.torch.linear import Linear, pack
from outpace.models.llama.torch.recurrent import RecurrentWeights

FetchTensor = Callable[[str], Tensor]


class Normed(NamedTuple):
    """A product whose input is normed first. `norm` [inputs] is the norm's weight times sqrt(inputs).

    In float32 the norm is folded into the product, and None here; half precisions keep the stored weights, because
    folding would round them once more.
    """

    linear: Linear
    norm: Tensor | None


@dataclass(frozen=True)
class LayerWeights:
    """One layer's weights. `qkv` computes queries, keys and values side by side, rotation pairs as neighbours, then
    the gates of the heads if they have any; in a recurrent layer, all inputs of its state side by side.

    `head_norm` [heads + 2 kv_heads, head_dim]: the weights of queries' and keys' own norms times sqrt(head_dim), and 1
    for values; None if heads are not normed. `bounds` [heads + 2 kv_heads, 2]: for any input, the largest norm of each
    rotated query and key head, and the largest entry of each value head; the second column is 1 for value heads.
    `output_norm`, `down_norm` [hidden]: weights, times sqrt(hidden), of the norms after attention and MLP. In a layer
    with `experts`, `gate_up` is the router, in float32, and there is no `down`. `sinks` [heads]: scores that take a
    share of each head's softmax and add nothing. `scale` [1]: a factor of the state after the layer.
    Gemma 4's layers may have an MLP besides their experts, and add an embedding of each token.
    """

    qkv: Normed
    output: Linear
    gate_up: Normed
    down: Linear | None
    head_norm: Tensor | None
    bounds: Tensor
    output_norm: Tensor | None = None
    down_norm: Tensor | None = None
    recurrent: RecurrentWeights | None = None
    experts: ExpertWeights | None = None
    sinks: Tensor | None = None
    beside: BesideMlp | None = None
    embedding: EmbeddingBranch | None = None
    scale: Tensor | None = None


@dataclass(frozen=True)
class BesideMlp:
    """The MLP of a layer that adds experts too, and the norms [hidden] after both, times sqrt(hidden)."""

    gate_up: Normed
    down: Linear
    mlp_norm: Tensor
    experts_norm: Tensor


@dataclass(frozen=True)
class EmbeddingBranch:
    """What adds a token's embedding for its layer: a gate of the state, and a product that is normed."""

    gate: Linear
    output: Linear
    norm: Tensor


@dataclass(frozen=True)
class TokenEmbeddings:
    """Each token's embeddings for all layers: a table [vocab, layers * width], mapped from its file, and a product of
    the first state, normed by layer. `norm` [width]: its weights times sqrt(width)."""

    table: Tensor
    projection: Linear
    norm: Tensor

    def rows(self, tokens: Tensor) -> Tensor:
        """Return the tokens' rows of the table: float32 [rows, layers, width]"""
        found = self.table[tokens.to(self.table.device)].to(tokens.device).float()
        return found.unflatten(1, (-1, len(self.norm)))


def load_embeddings(config: LlamaConfig, fetch: FetchTensor, mapped: FetchTensor) -> TokenEmbeddings | None:
    """Build the tokens' embeddings for layers, if there are any. `mapped` returns tensors as the file has them."""
    if not config.embedding_width:
        return None
    projection = pack(fetch(gemma4.MODEL_PROJECTION))
    return TokenEmbeddings(mapped(gemma4.TABLE), projection, _scaled(_norm(config, fetch, gemma4.MODEL_NORM)))


def load_layer(config: LlamaConfig, number: int, fetch: FetchTensor) -> LayerWeights:
    """Build layer `number` from Hugging Face weight names."""
    config = config if number == 0 else replace(config, takes_features=False)
    config, prefix = config.of_layer(number), f"model.layers.{number}."
    input_norm, mlp_norm = _input_norm(config, fetch, prefix), _norm(config, fetch, prefix + config.mlp_norm)

    def norm_after(name: str) -> Tensor | None:
        return _scaled(_norm(config, fetch, prefix + name)) if config.sandwich_norms else None

    def linear(name: str, has_bias: bool) -> Linear:
        return pack(fetch(f"{prefix}{name}.weight"), fetch(f"{prefix}{name}.bias") if has_bias else None)

    def dense() -> tuple[Normed, Linear]:
        names = [f"{prefix}mlp.{name}_proj" for name in ("gate", "up")]
        bias = torch.cat([fetch(f"{name}.bias") for name in names]) if config.mlp_bias else None
        gate_up = _normed(torch.cat([fetch(f"{name}.weight") for name in names]), bias, mlp_norm)
        return gate_up, linear("mlp.down_proj", config.mlp_bias)

    experts = down = beside = embedding = None
    if config.experts and config.has_experts(number):
        bias = fetch(f"{prefix}mlp.gate.bias") if config.experts.has_biases else None
        router_norm = experts_norm = mlp_norm
        if config.experts.beside_mlp:
            router_norm = fetch(f"{prefix}mlp.gate.scale") * config.hidden_size**-0.5
            after_mlp, experts_norm, after = (_norm(config, fetch, prefix + name) for name in gemma4.BRANCH_NORMS)
            beside = BesideMlp(*dense(), _scaled(after_mlp), _scaled(after))
        gate_up = _normed(fetch(f"{prefix}mlp.gate.weight"), bias, router_norm)
        experts = load_experts(config.experts, f"{prefix}mlp.", _scaled(experts_norm), fetch)
    else:
        gate_up, down = dense()
    if config.embedding_width:
        output = linear(gemma4.PROJECTION, False)
        embedding = EmbeddingBranch(
            linear(gemma4.GATE, False), output, _scaled(_norm(config, fetch, prefix + gemma4.PROJECTION_NORM))
        )
    if config.recurrence and config.is_recurrent(number):
        part = "linear_attn." if config.recurrence.is_delta_net else "conv."
        inputs = [fetch(f"{prefix}{part}in_proj{end}.weight") for end in _RECURRENT_INPUTS[part]]
        qkv, output = _normed(torch.cat(inputs), None, input_norm), linear(f"{part}out_proj", False)
        recurrent = _load_recurrent(prefix + part, fetch)
        return LayerWeights(qkv, output, gate_up, down, None, torch.empty(0, 2), recurrent=recurrent, experts=experts)
    weight, bias = _fused_qkv(config, number, prefix + "self_attn.", fetch)
    head_norm = _head_norm(config, number, prefix + "self_attn.", fetch) if config.head_norm else None
    gates = [fetch(f"{prefix}self_attn.output_gate.weight")] if config.output_gate else []
    return LayerWeights(
        qkv=_normed(torch.cat([weight, *gates]), bias, input_norm),
        output=linear("self_attn.o_proj", config.output_bias),
        gate_up=gate_up,
        down=down,
        head_norm=head_norm,
        bounds=_bounds(config, number, weight, input_norm, bias, head_norm),
        output_norm=norm_after(gemma.ATTENTION_NORM),
        down_norm=norm_after(gemma.MLP_OUTPUT_NORM),
        experts=experts,
        sinks=fetch(f"{prefix}self_attn.sinks") if config.sinks else None,
        beside=beside,
        embedding=embedding,
        scale=fetch(f"{prefix}layer_scalar") if config.scales_layers else None,
    )


# By the part of a recurrent layer: the ends of the names of its input matrices, in the order of the product's outputs.
_RECURRENT_INPUTS = {"linear_attn.": ("_qkv", "_b", "_a", "_z"), "conv.": ("",)}


def _load_recurrent(prefix: str, fetch: FetchTensor) -> RecurrentWeights:
    if prefix.endswith("conv."):
        return RecurrentWeights(_filter(fetch(f"{prefix}conv.weight")))
    return RecurrentWeights(
        _filter(fetch(f"{prefix}conv1d.weight")),
        -fetch(f"{prefix}A_log").double().exp(),
        fetch(f"{prefix}dt_bias").double(),
        fetch(f"{prefix}norm.weight").float(),
    )


def _filter(weight: Tensor) -> Tensor:
    """Lay out a filter [channels, 1, filter_length] as [filter_length, channels], in float32."""
    return weight.float()[:, 0].t().contiguous()


def load_keys_and_values(config: LlamaConfig, number: int, norm: Tensor, fetch: FetchTensor) -> Normed:
    """Build the product that computes keys and values of layer `number` from an input with a norm of its own."""
    prefix = f"model.layers.{number}.self_attn."

    def fused(kind: str) -> Tensor:
        return torch.cat(
            [_interleave(fetch(f"{prefix}k_proj.{kind}"), config.head_dim), fetch(f"{prefix}v_proj.{kind}")]
        )

    return _normed(fused("weight"), fused("bias") if config.attention_bias else None, norm)


def load_head(config: LlamaConfig, embedding: Tensor, rows: Tensor | None, fetch: FetchTensor) -> Normed:
    """Build the final norm and the output layer, which may be the embedding; only `rows` [kept] of it, if given."""
    weight = embedding if config.tie_embeddings else fetch("lm_head.weight")
    return _normed(weight if rows is None else weight[rows], None, _norm(config, fetch, "model.norm"))


def _norm(config: LlamaConfig, fetch: FetchTensor, name: str) -> Tensor:
    """Fetch a norm's weights; in float32 if they are stored minus an offset."""
    weight = fetch(name + ".weight")
    return weight.float() + config.norm_offset if config.norm_offset else weight


def _input_norm(config: LlamaConfig, fetch: FetchTensor, prefix: str) -> Tensor:
    """Fetch the norm before attention: of the hidden state, or of an embedding and a feature, concatenated.

    Each half is normed by itself, but `_scaled` multiplies by the square root of the size of both; this divides by
    sqrt(2) to correct it. A feature that is normed already gets a factor of 1.
    """
    norm = _norm(config, fetch, prefix + "input_layernorm")
    if not config.takes_features:
        return norm
    feature = _norm(config, fetch, prefix + "hidden_norm") if config.norms_features else len(norm) ** -0.5
    return torch.cat([norm, torch.ones_like(norm) * feature]).float() / math.sqrt(2)


def _normed(weight: Tensor, bias: Tensor | None, norm: Tensor) -> Normed:
    if weight.dtype == torch.float32:
        return Normed(pack(_folded(weight, norm), bias), None)
    return Normed(pack(weight, bias), _scaled(norm))


def _folded(weight: Tensor, norm: Tensor) -> Tensor:
    """Fold a norm's weights and sqrt(inputs) into W, so that its input has norm 1 at most. float32"""
    return weight.float() * _scaled(norm)


def _scaled(norm: Tensor) -> Tensor:
    return norm.float() * math.sqrt(len(norm))


def _fused_qkv(config: LlamaConfig, layer: int, prefix: str, fetch: FetchTensor) -> tuple[Tensor, Tensor | None]:
    def fused(kind: str) -> Tensor:
        query = _interleave(fetch(f"{prefix}q_proj.{kind}"), config.head_dim)
        if not config.stores(layer):
            return query
        key = fetch(f"{prefix}k_proj.{kind}")
        value = key if config.joins_values(layer) else fetch(f"{prefix}v_proj.{kind}")
        return torch.cat([query, _interleave(key, config.head_dim), value])

    return fused("weight"), fused("bias") if config.attention_bias else None


def _interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Make the rows (i, i + d/2) of every head, which rotate together, neighbours; dot products do not change."""
    split = weight.unflatten(0, (-1, 2, head_dim // 2))  # [heads, halves, pairs, ...]
    return split.transpose(1, 2).flatten(0, 2)


def _head_norm(config: LlamaConfig, layer: int, prefix: str, fetch: FetchTensor) -> Tensor:
    counts = {"q": config.num_heads} | ({"k": config.num_kv_heads} if config.stores(layer) else {})
    rows = []
    for name, count in counts.items():  # [1, head_dim], or of a joint norm [heads, head_dim]
        weights = _scaled(_interleave(_norm(config, fetch, f"{prefix}{name}_norm"), config.head_dim))
        rows.append(weights.view(-1, config.head_dim).expand(count, -1))
    value = math.sqrt(config.head_dim) if config.norms_values else 1.0
    return torch.cat([*rows, *(torch.full_like(keys, value) for keys in rows[1:])])


def _bounds(
    config: LlamaConfig, number: int, weight: Tensor, norm: Tensor, bias: Tensor | None, head_norm: Tensor | None
) -> Tensor:
    """Bound each head's output: the normed input has norm 1 at most, so |w x + b| <= |w| + |b| for every output row.

    A normed head has norm 1 at most before its weights.
    """
    rows = _folded(weight, norm).double().norm(dim=1)  # [outputs]
    if bias is not None:
        rows = rows + bias.double().abs()
    heads = rows.unflatten(0, (-1, config.head_dim)).cpu()  # [heads + 2 kv_heads, head_dim]
    lengths = heads.norm(dim=1) if head_norm is None else head_norm.double().abs().amax(dim=1).cpu()
    lengths *= config.gain(number)
    lengths[: config.num_heads] *= config.attention_scale  # the queries' factors include it
    is_value = torch.arange(len(heads)) >= config.num_heads + config.num_kv_heads
    largest = (
        head_norm.double().abs().amax(dim=1).cpu()
        if head_norm is not None and config.norms_values
        else heads.amax(dim=1)
    )
    slack = 1.001 + 8 * torch.finfo(weight.dtype).eps  # covers the rounding of inputs and products
    return torch.stack([torch.where(is_value, largest, lengths) * slack, is_value.double()], dim=1)

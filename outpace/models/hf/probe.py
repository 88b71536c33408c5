"""Finds out by trying how a transformers model takes tokens back and whether it takes trees: twelve short passes.

The model's own passes over whole texts, without a cache, are what everything is held against. How much they differ
from one another by the shape of the pass alone says how much rounding is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outpace.core.errors import UserError
from outpace.core.tree import PREFIX
from outpace.models.base import Part, chain

if TYPE_CHECKING:
    from outpace.models.hf.cache import Plan
    from outpace.models.hf.model import TransformersModel

PARENTS = (PREFIX, 0, 0, 1, 2)  # two branches, so that slots and positions differ
BRANCHES = ((0,), (0, 1), (0, 2), (0, 1, 3), (0, 2, 4))
BEFORE = 4  # tokens of prefix


class Found(NamedTuple):
    """`width` of a score row, `token_bytes` of keys and values, and why trees cannot go through one forward."""

    width: int
    token_bytes: int
    objection: str | None


def probe(model: TransformersModel, plan: Plan) -> Found:
    """UserError for a model that is not causal or cannot take a token back; where trees do not go, it says why."""
    prefix, nodes = _tokens(model)
    fresh = torch.stack([model.plain([*prefix, *(nodes[n] for n in branch)])[-1] for branch in BRANCHES]).float()
    most = _most(model, fresh)
    whole = model.plain([*prefix, *(nodes[n] for n in BRANCHES[3])])[BEFORE:].float()
    rounding = _distance(whole, fresh[[0, 1, 3]])
    if not rounding <= most:
        raise UserError(f"{type(model.module).__name__} is not causal: a token's scores change with those after it")
    session = model.open(BEFORE + len(nodes), BEFORE + len(nodes))
    model.score([chain(session, prefix)])
    if not all(layer.stored for layer in session.layers):
        name = type(model.module).__name__
        raise UserError(
            f"{name} stores nothing in the cache that it is given, so drafted tokens could not be taken back"
        )
    token_bytes = sum(part[..., :1, :].nbytes for layer in session.layers for part in layer.stored)
    limit = min(most, 8 * rounding + 64 * torch.finfo(torch.float32).eps * fresh.abs().max().item())
    off = _distance(_tree(model, prefix, nodes), fresh)
    if not off <= most:
        raise UserError(
            f"{type(model.module).__name__} scores differently with its cache than without (by {off:.2g}), so drafted"
            " tokens could not be taken back"
        )
    return Found(fresh.shape[-1], token_bytes, plan.objection or _objection(model, fresh, limit))


def _objection(model: TransformersModel, fresh: Tensor, limit: float) -> str | None:
    """Why a tree does not go through one forward, None where it does."""
    prefix, nodes = _tokens(model)
    if "position_ids" not in model.arguments:
        return "the model takes no positions"
    model.trees = True
    try:
        off = _distance(_tree(model, prefix, nodes), fresh)
    except Exception as error:  # what a model does with a mask that it does not know is its own
        return f"the model takes no mask of a tree ({type(error).__name__})"
    finally:
        model.trees = False
    if not off <= limit:
        return f"the model does not follow the mask of a tree (scores off by {off:.2g}, rounding is {limit:.2g})"
    return None


def _tree(model: TransformersModel, prefix: list[int], nodes: list[int]) -> Tensor:
    """The small tree's scores behind the prefix. [nodes, vocab]"""
    session = model.open(BEFORE + len(nodes), BEFORE + len(nodes))
    model.score([chain(session, prefix)])
    part = Part(session, nodes, PARENTS, range(len(nodes)), range(BEFORE))
    return model.score([part]).float()


def _tokens(model: TransformersModel) -> tuple[list[int], list[int]]:
    """Ids that differ and are not special: some models treat padding apart."""
    special = [getattr(model.config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos")]
    plain = [token for token in range(min(model.vocab_size, 64)) if token not in special]
    some = [plain[(3 + 5 * number) % len(plain)] for number in range(BEFORE + len(PARENTS))]
    return some[:BEFORE], some[BEFORE:]


def _most(model: TransformersModel, fresh: Tensor) -> float:
    """The largest difference that rounding may make: more, and something else is wrong."""
    eps = torch.finfo(model.dtype).eps
    if getattr(model.module.config, "quantization_config", None) is not None:
        eps = max(eps, torch.finfo(torch.float16).eps)
    spread = (fresh - fresh.mean(-1, keepdim=True)).abs().max().item()
    return 2 * math.sqrt(eps) * spread + 64 * torch.finfo(torch.float32).eps * fresh.abs().max().item()


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference; nan where a score is."""
    width = min(one.shape[-1], other.shape[-1])
    return (one[..., :width] - other[..., :width].to(one.device)).abs().max().item()

"""Bounds on rounding errors, for tests that compare results of floating-point sums.

Two correct programs add the same terms in different orders: the order follows the CPU's vector width, the tile sizes
and the use of fused multiply-add. So a test must allow what rounding can give, and a fixed tolerance that holds on one
CPU may fail on another. The bounds here hold in every order. With unit roundoff u, a sum of n products has an error of
at most n u / (1 - n u) times the sum of the products' absolute values (Higham, Accuracy and Stability of Numerical
Algorithms, 2nd edition, section 3.1).
"""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(operations: int, dtype: torch.dtype = torch.float32) -> float:
    """The largest relative error of successive rounded operations, or of a sum of positive terms, by their number."""
    unit = operations * torch.finfo(dtype).eps / 2
    assert unit < 0.5, f"{operations} operations in {dtype} may leave no correct digit"
    return unit / (1 - unit)


def assert_within(got: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    """Fail if an element of `got` differs from `expected`, computed in float64, by more than its element of `bound`."""
    assert got.shape == expected.shape
    assert bool(torch.isfinite(got).all()), "infinite or NaN where the expected values are finite"
    error = (got.double() - expected.double()).abs()
    excess = float((error / torch.as_tensor(bound, dtype=torch.float64).clamp(min=1e-300)).max())
    assert excess <= 1, f"off by {float(error.max()):.3g} at most, {excess:.3g} times what rounding can give"


def attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Grouped-query attention in float64, and a bound on the error of a computation in float32.

    `query` [batch * nodes, heads, d] is scaled already; `keys` and `values` [batch, kv_heads, slots, d]; `mask`
    [batch, nodes, slots] is added to the scores. Both results are [batch * nodes, heads * d].

    If every score is off by at most e, each softmax weight is off by a factor between exp(-2 e) and exp(2 e).
    """
    batch, groups, slots, width = keys.shape
    nodes = len(query) // batch
    query = query.double().view(batch, nodes, groups, -1, width)
    keys, values, mask = keys.double(), values.double(), mask.double()[:, :, None, None]
    weights = (torch.einsum("bngrd,bgsd->bngrs", query, keys) + mask).softmax(-1)
    sizes = torch.einsum("bngrd,bgsd->bngrs", query.abs(), keys.abs()).masked_fill(mask < 0, 0).amax(-1, keepdim=True)
    of_scores = relative_error(width + 8) * sizes  # the product, less the maximum, times log2(e)
    of_weights = torch.expm1(2 * of_scores) + relative_error(2 * slots + 32)  # exp, both sums, the division
    results = torch.einsum("bngrs,bgsd->bngrd", weights, values)
    bounds = of_weights * torch.einsum("bngrs,bgsd->bngrd", weights, values.abs())
    return results.reshape(batch * nodes, -1), bounds.reshape(batch * nodes, -1)

"""The kernels' mixtures of experts in numpy: a router in float32, and sums in the order of the experts' numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outpace_kernels.emulated_matrices import Matrix, WeightArena
from outpace_kernels.emulated_numbers import LANES, F, exponential, fma, sigmoid, sum_lanes

FileMatrix = Sequence[tuple[str, np.ndarray]]


class Experts:
    """The experts of a layer, with the kernels' signature. They are packed when they are first chosen."""

    def __init__(
        self,
        router: np.ndarray,
        used: int,
        gate_up: Sequence[FileMatrix],
        gate_up_rows: np.ndarray,
        down: Sequence[FileMatrix],
        down_rows: np.ndarray,
        chunk: int,
        arena: WeightArena | None = None,
        bias: Sequence[float] = (),
        correction: Sequence[float] = (),
        sigmoid: bool = False,
        norms: bool = False,
        epsilon: float = 0.0,
        scale: float = 1.0,
        gates_shared: bool = False,
        rounded: bool = False,
        mapped: bool = False,
        gate_up_bias: np.ndarray | None = None,
        down_bias: np.ndarray | None = None,
        scales: Sequence[float] = (),
    ) -> None:
        """`router` [experts, inputs], with one more row for the gate of the shared expert if there is one."""
        self.router, self.used, self.count, self.gates_shared = router, used, len(gate_up), gates_shared
        self.bias, self.correction, self.scales = (np.array(one, F) for one in (bias, correction, scales))
        self.is_sigmoid, self.norms, self.epsilon, self.scale = sigmoid, norms, F(epsilon), F(scale)
        inputs = -(-chunk // 64) * 64
        biases = [
            np.zeros((self.count, 0), F) if one is None else one.reshape(self.count, -1)
            for one in (gate_up_bias, down_bias)
        ]
        self._make: list[tuple[Callable[[], Matrix], Callable[[], Matrix]]] = [
            (
                lambda parts=gate_up[n], own=biases[0][n]: Matrix.stored(  # type: ignore[misc]
                    parts, gate_up_rows, router.shape[1], bias=own, rounded=rounded
                ),
                lambda parts=down[n], own=biases[1][n]: Matrix.stored(  # type: ignore[misc]
                    parts, down_rows, inputs, chunk, own, rounded
                ),
            )
            for n in range(self.count)
        ]
        self._packed: dict[int, tuple[Matrix, Matrix]] = {}
        self.held, self.expert_bytes, self.num_distinct = self.count, 0, 0

    def hold(self, count: int) -> None:
        """Do nothing: the emulation holds all."""

    def pack(self) -> None:
        """Pack all experts."""
        for number in range(self.count):
            self.matrices(number)

    @property
    def num_packed(self) -> int:
        return len(self._packed)

    def matrices(self, number: int) -> tuple[Matrix, Matrix]:
        """Return an expert's matrices."""
        if number not in self._packed:
            make_gate_up, make_down = self._make[number]
            self._packed[number] = make_gate_up(), make_down()
        return self._packed[number]

    def choose(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the experts of normed rows, rising, their weights, and the weight of the shared expert."""
        scores = np.zeros((len(x), len(self.router)), F)
        for entry in range(x.shape[1]):
            scores = fma(x[:, entry, None], self.router[None, :, entry], scores)
        gate = sigmoid(scores[:, -1]) if self.gates_shared else np.ones(len(x), F)
        scores = scores[:, : self.count]
        scores = scores + self.bias if len(self.bias) else scores
        if self.is_sigmoid:
            scores = sigmoid(scores)
        keys = scores + self.correction if len(self.correction) else scores
        chosen = np.sort(np.argsort(-keys, axis=1, kind="stable")[:, : self.used], axis=1)
        if not self.is_sigmoid:
            scores = exponential(scores - scores.max(axis=1, keepdims=True))
        inverse = F(1) if self.is_sigmoid else (F(1) / sum_lanes(scores))[:, None]
        weights = np.take_along_axis(scores, chosen, 1) * inverse
        if self.norms:
            total = np.zeros(len(x), F)
            for column in weights.T:
                total = total + column
            weights = weights / (total + self.epsilon)[:, None]
        weights = weights * self.scale
        return chosen, weights * self.scales[chosen] if len(self.scales) else weights, gate

    def apply(
        self,
        x: np.ndarray,
        gated: Callable[[np.ndarray], np.ndarray],
        shared: tuple[Matrix, Matrix] | None,
        routed: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return the mixture of normed rows. `gated` joins gates and ups [rows, groups, 2, LANES]. `routed`: what the
        router reads instead of them."""
        chosen, weights, gate = self.choose(x if routed is None else routed)
        self.num_distinct = len(np.unique(chosen))
        size = max(self.matrices(chosen[0, 0])[0].shared, shared[0].shared if shared else 0)

        def expert(matrices: tuple[Matrix, Matrix], rows: np.ndarray) -> np.ndarray:
            both = matrices[0](rows, size).reshape(len(rows), -1, 2, LANES)
            return matrices[1](gated(both).reshape(len(rows), -1))

        total = np.zeros((len(x), self.matrices(chosen[0, 0])[1].outputs), F)
        for rank in range(self.used):
            for row, number in enumerate(chosen[:, rank]):
                out = expert(self.matrices(number), x[row : row + 1])[0]
                total[row] = fma(weights[row, rank], out, total[row])
        return total if shared is None else fma(gate[:, None], expert(shared, x), total)

"""The kernels of captured passes, by Triton's interpreter on a CPU: against torch's own operations."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the kernels themselves are tried here, by test_cuda.py", allow_module_level=True)

import graph_rules
import reference
import rounding
from passes import TINIES, build, tiny
from rounding import assert_within, relative_error
from turns import in_turn, one_of

from outpace.core import fused_noise, noise
from outpace.models import runtimes
from outpace.models.base import Part, chain
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.cuda import captures, triton_kernels
from outpace.models.llama.cuda.fused_runtime import FusedLlama
from outpace.models.llama.cuda.runtime import ExactGraphLlama, GraphLlama
from outpace.models.llama.torch.attention import attend_batch, tree_mask
from outpace.models.options import LoadOptions

WORDS = 4


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter computes by numpy, which a capture's stand-in takes for a read of the host's."""
    monkeypatch.setattr(captures, "EagerCapture", graph_rules.EagerCapture)


@pytest.mark.parametrize("width", [1, 16, 100, 576])
@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm(width: int, has_weight: bool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, width).to(dtype), torch.randn(width) if has_weight else None
    floor = torch.tensor(0.3)
    wide = x.double()
    expected = wide / torch.hypot(wide.norm(dim=-1, keepdim=True), floor.double())
    expected = expected if weight is None else expected * weight
    got = triton_kernels.norm(x, weight, 0.3)
    assert got.dtype == dtype
    stored = 0 if dtype == torch.float32 else relative_error(2, dtype)  # Triton's interpreter truncates to bfloat16
    relative = relative_error(width + 8) + stored
    assert_within(got, expected, relative * expected.abs())


@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize("width", [3, 64, 1536])
def test_gate(width: int, is_gelu: bool) -> None:
    both = torch.randn(3, 2 * width) * 2
    gate, up = both.double().chunk(2, -1)
    expected = F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)
    # GELU's 1 + tanh(...) cancels, so the error is relative to the gate, which is larger than the activation
    assert_within(triton_kernels.gated(both, is_gelu), expected * up, relative_error(16) * (gate * up).abs())


def test_empty_inputs_give_empty_results() -> None:
    assert triton_kernels.norm(torch.empty(0, 8), None, 1.0).shape == (0, 8)
    assert triton_kernels.gated(torch.empty(0, 8)).shape == (0, 4)
    assert fused_noise.noise(torch.empty(0, 2, dtype=torch.int32), 9, False).shape == (0, 9)


def test_noise_has_the_bits_of_every_other_device() -> None:
    words = torch.randint(-(2**31), 2**31, (7, 2), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    assert torch.equal(fused_noise.noise(words, 5000, False), noise.exponential_from_words(words, 5000))
    assert torch.equal(fused_noise.noise(words, 5000, True), noise.gumbel_from_words(words, 5000))
    trial = torch.tensor([noise.TRIAL_KEY], dtype=torch.int32)  # its bits are known where the kernels are tried
    found = noise.exponential_from_words(trial, noise.TRIAL_VOCAB)
    assert int(found.view(torch.int32).long().sum()) == noise.TRIAL_SUM


def fused(config: LlamaConfig = reference.TINY, **options: Any) -> FusedLlama:
    """A model whose kernels run: if one fails, another model is returned."""
    model = build(FusedLlama, config, is_eager=True, exact=False, **options)
    assert isinstance(model, FusedLlama), model.notice
    return model


class Trees:
    """Random trees of several sessions below texts of different lengths, with keys and values of a pool."""

    def __init__(self, batch: int, nodes: int, groups: int, width: int, slots: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.kv = torch.randn(2, batch, groups, slots + 8, width, generator=torch.Generator().manual_seed(seed))
        lengths = torch.tensor([max(0, slots - nodes - 37 * number) for number in range(batch)])
        bits, below = torch.zeros(batch, nodes, WORDS, dtype=torch.int64), torch.zeros(batch, 64 * WORDS).long()
        depths = torch.zeros(batch, nodes, dtype=torch.int64)
        for session in range(batch):
            seen: list[set[int]] = []
            for node in range(nodes):
                above = rng.randrange(-1, node) if node else -1
                seen.append((seen[above] if above >= 0 else set()) | {node})
                depths[session, node] = below[session, node] = len(seen[-1]) - 1
                for number in seen[-1]:
                    bits[session, node, number // 64] |= torch.tensor(1) << (number % 64)
        self.given = {"bits": bits, "lengths": lengths, "depths": depths, "below": below}
        self.slots = lengths[:, None] + torch.arange(nodes)
        self.positions = lengths[:, None] + depths


SHAPES = [  # batch, nodes, heads, key heads, width, slots
    (1, 1, 9, 3, 64, 64),
    (2, 3, 9, 3, 64, 128),
    (3, 8, 8, 2, 80, 256),
    (1, 40, 8, 2, 32, 512),
    (2, 70, 4, 4, 16, 512),
]


@pytest.mark.parametrize(("shape", "window"), in_turn(SHAPES, [None, 1, 40]))
def test_attention(shape: tuple[int, ...], window: int | None) -> None:
    batch, nodes, heads, groups, width, slots = shape
    trees = Trees(batch, nodes, groups, width, slots)
    query = torch.randn(batch * nodes, heads, width, generator=torch.Generator().manual_seed(1))
    mask = tree_mask(*trees.given.values(), slots, window)
    held = trees.kv[:, :, :, :slots].contiguous()
    expected, bound = rounding.attention(query, held[0], held[1], mask)
    assert_within(attend_batch(query, held[0], held[1], mask), expected, bound)
    assert_within(triton_kernels.attend(query, trees.kv, trees.given, slots, window), expected, bound)


def test_what_is_stored_is_finite() -> None:
    mixed = torch.tensor([[1.0, 2.0, math.inf, -math.inf, math.nan, 3.0]])  # one head, width 2
    kv = torch.zeros(2, 1, 1, 4, 2)
    triton_kernels.rotate_and_store(mixed, None, 0.0, None, torch.zeros(1, 1).long(), torch.ones(1, 1).long(), kv, 1.0)
    most = torch.finfo(torch.float32).max
    assert kv[:, 0, 0, 1].tolist() == [[most, -most], [0.0, 3.0]]


@pytest.mark.parametrize(
    "name", ["mixed", *(pytest.param(name, marks=pytest.mark.long) for name in TINIES if name != "mixed")]
)
def test_every_kind_of_layer(name: str) -> None:
    config = TINIES[name]
    model, slow = fused(config), tiny(config, exact=False)
    words = [number % config.vocab_size for number in range(1, 71)]
    parents = [-1, 0, 0, 1, 2]
    rows = []
    for runtime in (model, slow):
        first, second = (runtime.open(200, 80) for _ in range(2))
        runtime.score([chain(first, words[:6])])
        tree = Part(first, words[6:11], parents, range(5), keep=range(6))
        rows.append(runtime.score([tree, chain(second, words[:2], range(2))]))
        rows.append(runtime.score([chain(first, words[20:22], range(2), keep=[0, 2, 4])]))
    for got, expected in zip(rows[:2], rows[2:], strict=True):
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("count", "is_captured"), [(18, True), pytest.param(90, True, marks=pytest.mark.long), (270, False)]
)
def test_a_short_prompt_is_captured_and_a_long_one_is_not(count: int, is_captured: bool) -> None:
    model, slow = fused(), tiny(exact=False)
    words, before = [number % reference.TINY.vocab_size for number in range(1, count + 1)], model.captures.count
    rows = [one.score([chain(one.open(400, 300), words, [count // 2, count - 1])]) for one in (model, slow)]
    assert (model.captures.count > before) is is_captured
    torch.testing.assert_close(*rows, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_keys_and_values_in_fewer_bits_are_left_to_torch(kv_dtype: str) -> None:
    models = fused(kv_dtype=kv_dtype), tiny(exact=False, kv_dtype=kv_dtype)
    rows = [model.score([chain(model.open(40, 9), list(range(1, 10)), range(9))]) for model in models]
    torch.testing.assert_close(*rows, atol=1e-2, rtol=1e-2)


def test_a_model_whose_kernels_do_not_compile_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(triton_kernels, "attend", fails)
    model = build(FusedLlama, is_eager=True, exact=False)
    assert not isinstance(model, FusedLlama)
    assert "two times as long as they could: RuntimeError: PassManager::run failed" in str(model.notice)
    rows = [one.score([chain(one.open(9, 9), [1, 2, 3], [2])]) for one in (model, tiny(exact=False))]
    torch.testing.assert_close(*rows, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("arguments", [["--short"], pytest.param([], marks=pytest.mark.long)], ids=["short", "all"])
def test_the_kernels_compile_for_gpus_that_are_not_here(arguments: list[str], tmp_path: Path) -> None:
    here = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(here / "compile_kernels.py"), *arguments]
    done = subprocess.run(command, env=environment, cwd=here.parent, capture_output=True, text=True, timeout=600)
    assert done.stdout == "compiled\n", done.stderr[-2000:]


@pytest.mark.parametrize("dtype", one_of(2, [torch.float16, torch.float32]))
def test_logits_are_in_float32(dtype: torch.dtype) -> None:
    model, wide = fused(dtype=dtype), tiny(exact=False)
    rows = [one.score([chain(one.open(9, 9), [1, 2, 3], [0, 2])]) for one in (model, wide)]
    assert rows[0].dtype == torch.float32
    torch.testing.assert_close(*rows, atol=2e-2, rtol=2e-2)
    nothing = model.score([chain(model.open(9, 9), [1], [])])
    assert (nothing.shape, nothing.dtype) == ((0, reference.TINY.vocab_size), torch.float32)


def test_which_runtime_a_gpu_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    options = LoadOptions(device="cuda", graphs="cuda")
    for why, kind in ((None, FusedLlama), ("there is no compiler", GraphLlama)):
        monkeypatch.setattr(noise, "unavailable_reason", lambda device, why=why: why)
        chosen, notice = runtimes._captured(options)
        assert chosen is kind
        assert (notice is None) if why is None else str(notice).endswith("there is no compiler")
    assert runtimes._captured(replace(options, exact=True))[0] is ExactGraphLlama


def test_kernels_are_refused_elsewhere_and_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "are for CUDA, not for cpu" in str(noise.unavailable_reason(torch.device("cpu")))
    monkeypatch.setattr(noise.importlib.util, "find_spec", lambda name: None)
    assert noise._refusal.__wrapped__(0) == "the package triton is not installed"
    monkeypatch.undo()
    assert noise._refusal.__wrapped__(0)  # no GPU is here

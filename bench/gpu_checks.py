"""Comparisons of each fast path with a slow one on the measured device; bench/gpu.py runs them first."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.core.noise import unavailable_reason
from outpace.core.tree import PREFIX
from outpace.models.base import Part, chain
from outpace.models.llama.config.llama_config import LlamaConfig, tensor_shapes
from outpace.models.llama.cuda.runtime import ExactGraphLlama, GraphLlama
from outpace.models.llama.torch.runtime import Llama

TOLERANCE = {
    torch.float64: 1e-3,
    torch.float32: 1e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}  # relative to the largest logit
NODES = 24
CHECKED = LlamaConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_positions=2048,
    tie_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
)
Row = dict[str, Any]


def random_weights(config: LlamaConfig, device: str, dtype: torch.dtype) -> Callable[[str], Tensor]:
    """Weights of a random model by name, made where they are to lie; the same whatever was asked for before."""
    shapes = tensor_shapes(config)
    names = list(shapes)

    def tensor(name: str) -> Tensor:
        generator = torch.Generator(device).manual_seed(names.index(name))
        made = torch.randn(shapes[name], generator=generator, device=device, dtype=dtype)
        return made * shapes[name][-1] ** -0.5 if len(shapes[name]) > 1 else 1 + 0.1 * made

    return tensor


def kinds(device: str, is_eager: bool = False) -> tuple[str, ...]:
    """Return the kinds of attention that captured passes support on this device."""
    is_fused = not is_eager and torch.device(device).type == "cuda" and unavailable_reason(torch.device(device)) is None
    return ("matmul", "fused") if is_fused else ("matmul",)


def captured(kind: str, *given: Any, **more: Any) -> GraphLlama:
    """Build a captured model with this kind of attention. Raise AssertionError if its kernels fail."""
    if kind != "fused":
        return GraphLlama.from_tensors(*given, **more)
    from outpace.models.llama.cuda.fused_runtime import FusedLlama  # imports Triton

    model = FusedLlama.from_tensors(*given, **more)
    assert isinstance(model, FusedLlama), model.notice
    return model


def tokens(count: int, seed: int) -> list[int]:
    """Return `count` random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(CHECKED.vocab_size) for _ in range(count)]


def parents(count: int, seed: int) -> list[int]:
    """Return the parents of a random tree with one root."""
    rng = random.Random(seed)
    return [PREFIX, *(rng.randrange(max(0, node - 6), node) for node in range(1, count))]


def branch(tree: Sequence[int], node: int) -> list[int]:
    """Return the path from the root to `node`."""
    path = []
    while node != PREFIX:
        path.append(node)
        node = tree[node]
    return path[::-1]


def fed(model: Llama, prompt: Sequence[int]) -> Any:
    """Open a session and prefill the prompt."""
    session = model.open(len(prompt) + 300, 100)
    for start in range(0, len(prompt), 64):
        model.score([chain(session, prompt[start : start + 64], keep=range(session.pending))])
    session.keep(range(session.pending))
    return session


def compared(name: str, dtype: torch.dtype, got: Tensor, expected: Tensor) -> Row:
    """Compare by the largest difference relative to the largest value, against the tolerance of the dtype."""
    error = float((got.double() - expected.double()).abs().max() / expected.double().abs().max())
    return {"check": name, "error": error, "passed": error <= TOLERANCE[dtype]}


def of_forwards(device: str, dtype: torch.dtype, is_eager: bool) -> list[Row]:
    """Compare graph with eager, tree with paths, `keep` with a fresh prefill, a batch with single sessions."""
    found = []
    for kind in kinds(device, is_eager):
        tensor = random_weights(CHECKED, device, dtype)
        given: dict[str, Any] = {"device": device, "dtype": dtype}
        model = captured(kind, CHECKED, tensor, is_eager=is_eager, **given)
        found += _rows(
            f"{kind}, {str(dtype).removeprefix('torch.')}",
            model,
            Llama.from_tensors(CHECKED, tensor, exact=False, **given),
        )
    return found


def of_exact(device: str, dtype: torch.dtype, is_eager: bool) -> list[Row]:
    """Do the same in exact mode, where results must be equal bit for bit, except to those of the slow runtime."""
    given: dict[str, Any] = {"device": device, "dtype": dtype}
    label = f"exact, {str(dtype).removeprefix('torch.')}"
    tensor = random_weights(CHECKED, device, dtype)
    try:
        model = ExactGraphLlama.from_tensors(CHECKED, tensor, is_eager=is_eager, exact=True, **given)
    except UserError as unavailable_reason:  # the products of this device do not allow exact mode
        return [{"check": f"exact mode ({label})", "note": str(unavailable_reason)}]
    assert isinstance(model, GraphLlama)
    rows = _rows(label, model, Llama.from_tensors(CHECKED, tensor, exact=False, **given))
    return [*rows[:2], *(row | {"passed": row["error"] == 0} for row in rows[2:])]


def _rows(label: str, model: GraphLlama, twin: Llama) -> list[Row]:
    prompt, tree, drafted, dtype = tokens(150, 1), parents(NODES, 2), tokens(NODES, 3), model.dtype

    def scored(runtime: Llama) -> tuple[Any, Any, Any]:
        session, nodes = fed(runtime, prompt), range(NODES)
        part, layers = Part(session, drafted, tree, nodes, hidden_rows=nodes), (0, 1, CHECKED.num_layers)
        return session, *runtime.score_hidden([part], layers)[:2]

    (session, got, hidden), (_, expected, its_hidden) = scored(model), scored(twin)
    path = branch(tree, NODES - 1)
    text = [*prompt, *(drafted[node] for node in path)]
    after = model.score([chain(session, [5], [0], keep=path)])  # first: a later capture would move slots
    alone = model.score([chain(fed(model, text[:-1]), text[-1:], [0])])
    kept, fresh = session.read(len(text)), fed(model, text)
    again = model.score([chain(fresh, [5], [0])])
    sessions = [fed(model, prompt[: 20 * number]) for number in range(1, 6)]
    batch = model.score([chain(one, [7, 8], [1]) for one in sessions])
    singles = [fed(model, prompt[: 20 * number]) for number in range(1, 6)]
    one_by_one = torch.cat([model.score([chain(one, [7, 8], [1])]) for one in singles])
    return [
        compared(f"captured against the slow runtime ({label})", dtype, got, expected),
        compared(f"hidden states against the slow runtime ({label})", dtype, hidden, its_hidden),
        compared(f"tree against its path alone ({label})", dtype, got[-1:], alone),
        compared(f"scores after keep against a fresh prefill ({label})", dtype, after, again),
        compared(f"keys and values after keep ({label})", kept.dtype, kept, fresh.read(len(text))),
        compared(f"batch against one by one ({label})", dtype, batch, one_by_one),
    ]


def of_texts(llm: LLM, prompts: Sequence[str], count: int, method: str = "") -> list[Row]:
    """Compare texts with those of plain decoding; without exact mode near ties may flip."""
    found, label = [], f"{method} against plain decoding" if method else "text against plain decoding"
    asked = asked_of(llm.target, prompts)
    for sampling in _samplings(count):
        plain = llm.generate(asked, plain=True, **sampling)
        found.append(_alike(label, llm.target, sampling, plain, llm.generate(asked, **sampling)))
    return found


def of_plain(target: Any, slow: Any, prompts: Sequence[str], count: int) -> list[Row]:
    """Compare plain decoding by captured passes with plain decoding by the runtime without captures."""
    found = []
    with LLM(target, None, method="autoregressive") as ours, LLM(slow, None, method="autoregressive") as other:
        for sampling in _samplings(count):
            texts = [llm.generate(asked_of(target, prompts), **sampling) for llm in (other, ours)]
            found.append(_alike("captured passes against uncaptured ones", target, sampling, *texts))
    return found


def asked_of(target: Any, prompts: Sequence[str]) -> list[Any]:
    """Format prompts as chats if the tokenizer has a template."""
    if not getattr(target.tokenizer, "has_template", False):
        return list(prompts)
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


def _samplings(count: int) -> list[dict[str, Any]]:
    return [{"max_tokens": count, "temperature": temperature, "seed": 1} for temperature in (0.0, 0.8)]


def _alike(label: str, target: Any, sampling: dict[str, Any], plain: Sequence[Any], ours: Sequence[Any]) -> Row:
    """Count differing answers per million tokens written up to the first difference."""
    written = differing = 0
    for one, other in zip(plain, ours, strict=True):
        same = next(
            (n for n, pair in enumerate(zip(one.tokens, other.tokens, strict=False)) if pair[0] != pair[1]), None
        )
        written += len(one.tokens) if same is None else same + 1
        differing += same is not None
    mode = f"{target.precision}{', exact' if target.model.exact else ''}"
    return {
        "check": f"{label}, temperature {sampling['temperature']:g} ({mode})",
        "differing_per_million": 1e6 * differing / written,
        "tokens": written,
        "passed": differing == 0 or not (target.model.exact or target.precision == "float32"),
    }

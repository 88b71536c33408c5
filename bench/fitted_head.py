"""Fit an EAGLE-3 head to the shipped model by least squares, without training, and measure its acceptance.

    python bench/fitted_head.py --head fitted-head [--lengths 512 2048 8000] [--prompts 8] [--tokens 64]

If the folder exists, the head in it is measured instead, of any kind and whatever made it.

The head's layer is the target's last block. Its MLP and norms are copied. Its input, the hidden state of the next
position before that block, is not known when the head runs: a linear map of the next token's embedding and the last
position's final hidden state estimates it. Some of its attention heads are the block's, applied to the estimates; the
others attend only to their own slot and compute a second linear map, by which the output projection corrects the sum.
Both maps are fitted on greedy answers of the target to built-in prompts.

Prints a line of JSON for each text length: accepted length (tokens per pass of the target) of chains, trees and `auto`,
on held-out prompts that follow a text of that length, with and without --window; and the speed of `auto` as a multiple
of plain decoding's, the median over the prompts, without prefill.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from prompts import chat_tokens
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from outpace.api.llm import LLM
from outpace.core.stats import merge_stats
from outpace.distill.prompts import builtin_prompts, is_held_out
from outpace.models.base import chain
from outpace.models.files.find import open_source
from outpace.models.load import Loaded, load_draft, load_model

TEXTS, ANSWER, EVERY, AT_ONCE = 160, 192, 29, 16  # at most TEXTS prompts, every EVERY-th, with answers of ANSWER tokens
RIDGE = 1e-3  # ridge penalty, as a fraction of the inputs' mean sum of squares
GAP = 20.0  # by which the score of a slot's own key exceeds all others
SETTINGS: dict[str, dict[str, Any]] = {
    "chain": {"method": "speculative", "draft_length": 4, "width": 1, "nodes": 5},
    "tree": {"method": "speculative", "draft_length": 4, "width": 4, "nodes": 24},
    "auto": {"method": "auto"},
}


class Block:
    """The target's last block, computed by torch on a whole text."""

    def __init__(self, target: Loaded) -> None:
        self.config = target.model.config
        assert target.files is not None
        with open_source(target.files()) as source:
            prefix = f"model.layers.{self.config.num_layers - 1}."
            names = ("input_layernorm", "post_attention_layernorm")
            names += tuple(f"self_attn.{part}_proj" for part in "qkvo")
            names += tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down"))
            self.weights = {name: source.tensor(f"{prefix}{name}.weight").float() for name in names}
            self.final_norm = source.tensor("model.norm.weight").float()

    def norm(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return normed if weight is None else normed * weight

    def attend(self, x: Tensor) -> Tensor:
        """Return the outputs of all heads on the block's normed inputs: [rows, heads * head_dim]"""
        config = self.config
        group = config.num_heads // config.num_kv_heads
        query, key, value = (
            (x @ self.weights[f"self_attn.{part}_proj"].T).unflatten(1, (-1, config.head_dim)).transpose(0, 1)
            for part in "qkv"
        )
        key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        heads = F.scaled_dot_product_attention(self._rotate(query), self._rotate(key), value, is_causal=True)
        return heads.transpose(0, 1).flatten(1)

    def _rotate(self, x: Tensor) -> Tensor:
        depth = self.config.head_dim
        rates = self.config.rope_theta ** (-torch.arange(0, depth, 2) / depth)
        angles = torch.arange(x.shape[1])[:, None] * rates
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def texts_of(llm: LLM) -> list[list[int]]:
    """Return prompts with the target's greedy answers, as tokens."""
    asked = [text for text in islice(builtin_prompts(), 0, None, EVERY) if not is_held_out(text)][:TEXTS]
    prompts, found = [chat_tokens(llm.target, text) for text in asked], []
    for start in track(range(0, len(prompts), AT_ONCE), "answers", console=Console(stderr=True)):
        some = prompts[start : start + AT_ONCE]
        written = llm.generate(some, plain=True, max_tokens=ANSWER)
        found += [[*prompt, *answer.tokens] for prompt, answer in zip(some, written, strict=True)]
    return found


def hidden_states(target: Loaded, text: Sequence[int], layers: Sequence[int]) -> Tensor:
    """Return the target's hidden states of all positions of a text: [layers, positions, width]"""
    part = chain(target.model.open(len(text), 1), text)._replace(hidden_rows=range(len(text)))
    return torch.as_tensor(target.model.score_hidden([part], layers).hidden).float()


def solve(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
    """Return the ridge regression from rows of inputs to rows of outputs: [outputs, inputs]"""
    products = sum(x.double().T @ x.double() for x in inputs)
    targets = sum(x.double().T @ y.double() for x, y in zip(inputs, outputs, strict=True))
    assert isinstance(products, Tensor)
    products += RIDGE * products.diagonal().mean() * torch.eye(len(products))
    return torch.linalg.solve(products, targets).T.float()


def fit(target: Loaded, texts: Sequence[Sequence[int]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and tensors of the fitted head."""
    block = Block(target)
    config, weights = block.config, block.weights
    last = config.num_layers
    inputs, features, before, wanted = [], [], [], []
    for text in track(texts, "hidden states", console=Console(stderr=True)):
        embedded, entering, final = hidden_states(target, text, (0, last - 1, last))
        # a slot reads the next token's embedding and its position's final state, both normed
        inputs.append(torch.cat([block.norm(embedded[1:]), block.norm(final[:-1])], 1))
        features.append(final[:-1])
        normed = block.norm(entering, weights["input_layernorm"])
        before.append(normed[1:])
        wanted.append((entering + block.attend(normed) @ weights["self_attn.o_proj"].T)[1:])  # the MLP's input
    entering_map = solve(inputs, before)
    both = [torch.cat([x, block.attend(x @ entering_map.T)], 1) for x in inputs]
    sums = solve(both, [y - f for y, f in zip(wanted, features, strict=True)])
    width, heads, depth = config.hidden_size, config.num_heads, config.head_dim
    own = width // depth  # heads that attend to their own slot
    group = heads // config.num_kv_heads
    projections = {part: weights[f"self_attn.{part}_proj"] @ entering_map for part in "qkv"}
    for part in "kv":
        projections[part] = projections[part].unflatten(0, (-1, depth)).repeat_interleave(group, 0).flatten(0, 1)
    linear, of_heads = sums.split([2 * width, heads * depth], 1)
    silent = torch.zeros(own * depth, 2 * width)
    bias = torch.cat([torch.zeros(heads * depth), own_slot_bias(config).repeat(own)])
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    tensors = {
        "fc.weight": torch.eye(width),
        "norm.weight": block.final_norm,
        "midlayer.input_layernorm.weight": torch.ones(width),
        "midlayer.hidden_norm.weight": torch.ones(width),
        "midlayer.post_attention_layernorm.weight": weights["post_attention_layernorm"],
        attention + "q_proj.weight": torch.cat([projections["q"], silent]),
        attention + "k_proj.weight": torch.cat([projections["k"], silent]),
        attention + "v_proj.weight": torch.cat([projections["v"], linear]),
        attention + "o_proj.weight": torch.cat([of_heads, torch.eye(width)], 1),
        attention + "q_proj.bias": bias,
        attention + "k_proj.bias": bias.clone(),
        attention + "v_proj.bias": torch.zeros_like(bias),
        **{f"{mlp}{part}_proj.weight": weights[f"mlp.{part}_proj"] for part in ("gate", "up", "down")},
    }
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads + own,
        "num_key_value_heads": heads + own,
        "head_dim": depth,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.vocab_size,
        "eagle_aux_hidden_state_layer_ids": [last],
    }
    return fields, {name: value.contiguous() for name, value in tensors.items()}


def own_slot_bias(config: Any) -> Tensor:
    """Return the constant query and key [head_dim] with which a slot's own score exceeds all others by GAP."""
    depth = config.head_dim
    rates = config.rope_theta ** (-torch.arange(0, depth, 2) / depth)
    scores = (torch.arange(config.max_positions)[:, None] * rates).cos().sum(1) / depth**0.5
    size = (GAP / (scores[0] - scores[1:].max())) ** 0.5
    return torch.cat([size.expand(depth // 2), torch.zeros(depth // 2)])


def measure(
    target: Loaded, head: Path, questions: Sequence[Sequence[int]], tokens: int, options: dict[str, Any]
) -> tuple[float, float]:
    """Return the mean accepted length over greedy answers, each checked against plain decoding, and the speedup."""
    draft = load_draft(head, target)
    with LLM(target, draft, drafter=draft.drafter, profile=False, **options) as llm:
        asked: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
        drafted = [llm.generate([one], **asked)[0] for one in questions]
        plain = [llm.generate([one], plain=True, **asked)[0] for one in questions]
    if [one.tokens for one in drafted] != [one.tokens for one in plain]:
        raise SystemExit("a text differs from that of plain decoding")
    speedup = statistics.median(
        one.tokens_per_second / other.tokens_per_second for one, other in zip(drafted, plain, strict=True)
    )
    return merge_stats([one.figures for one in drafted]).mean_accepted_length, speedup


def main() -> None:
    """Fit the head unless its folder exists, and measure it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, default=Path("fitted-head"))
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2048, 8000])
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    target = load_model(None)
    if not args.head.exists():
        with LLM(target, method="autoregressive", profile=False) as llm:
            texts = texts_of(llm)
        fields, tensors = fit(target, texts)
        args.head.mkdir(parents=True)
        save_file(tensors, args.head / "model.safetensors")
        (args.head / "config.json").write_text(json.dumps(fields, indent=1))
    asked = [text for text in builtin_prompts() if is_held_out(text)]
    asked = asked[:: max(1, len(asked) // args.prompts)][: args.prompts]
    before = target.tokenizer.encode("\n\n".join(text for text in builtin_prompts() if not is_held_out(text)))
    for length in args.lengths:
        questions = [chat_tokens(target, text) for text in asked]
        questions = [[*before[: max(0, length - len(one) - args.tokens)], *one] for one in questions]
        row: dict[str, Any] = {"length": length}
        for name, shape in SETTINGS.items():
            for label, window in ((name, 0), (f"{name}, window {args.window}", args.window)):
                found, speedup = measure(target, args.head, questions, args.tokens, {**shape, "head_window": window})
                row[label] = round(found, 2)
                if name == "auto":
                    row[f"{label}: speedup"] = round(speedup, 3)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

"""Cut the MLPs of Qwen2.5 into experts, to measure speculation on a mixture of experts that writes real text.

Run: python bench/cut_into_experts.py MODEL.gguf OUT.gguf --data DIR --work DIR [--tokens 20000] [--chosen 8]
     [--experts 28] [--shared 7] [--check 4,8,12]
In each layer, of parts of equal width, the --shared most used go to a shared expert; the other neurons are clustered by
how they fire together. Routers are fitted by least squares to how much each expert adds, on text that the model wrote
for prompts of instructions.jsonl in DIR. Weights are equal, so with all experts chosen OUT computes what MODEL does.
--chosen is how many OUT uses; run again to change it. --work keeps finished layers. --check compares logits on problems
of gsm8k.jsonl with MODEL's, for all experts and for these numbers of chosen ones. The last line is JSON.
"""

from __future__ import annotations

import mmap
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from common import finish, numbers, parse, read_rows, run, show
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from outpace import LLM, SamplingParams
from outpace.models.base import chain
from outpace.models.files.gguf.header import GgufHeader, open_gguf
from outpace.models.files.gguf.source import GgufCheckpoint
from outpace.models.load import load_model

LENGTH = 256  # tokens of a fitted text, and rows of a checked pass
CLUSTERED = 2048  # tokens by which neurons are clustered
ROUNDS = 12  # of clustering
HELD_OUT = 0.1  # part of the tokens that routers are not fitted to
RIDGE = 1e-3  # of the inputs' mean square
SCALE = 1e-3  # of logits, so that all weights are nearly equal
CHECKED = 2  # problems whose logits are compared
USED, KIND = b"qwen2moe.expert_used_count", gguf.GGMLQuantizationType


def read_texts(args: Any, file: Path) -> np.ndarray:
    """Return texts [texts, LENGTH] that the model wrote itself, prompts included."""
    if not file.exists():
        with LLM(str(args.model), method="autoregressive") as llm:
            found: list[int] = []
            asked = iter(read_rows(args.data / "instructions.jsonl"))
            while len(found) < args.tokens:
                some = [llm.tokenizer.encode_prompt(next(asked)["turns"][0]) for _ in range(32)]
                some = [prompt for prompt in some if len(prompt) < LENGTH]
                for prompt, answer in zip(some, llm.generate(some, SamplingParams(max_tokens=128)), strict=True):
                    found += [*prompt, *answer.token_ids]
                print(len(found), "tokens of text", file=sys.stderr)
        np.save(file, np.array(found[: len(found) // LENGTH * LENGTH]).reshape(-1, LENGTH))
    return np.load(file)[: max(1, args.tokens // LENGTH)]


def cluster(fired: torch.Tensor, count: int) -> torch.Tensor:
    """Return the neurons of `fired` [neurons, tokens] in `count` clusters of equal size: [count, size]"""
    fired = F.normalize(fired - fired.mean(1, keepdim=True), dim=1)
    size = len(fired) // count
    centres = fired[torch.randperm(len(fired), generator=torch.Generator().manual_seed(0))[:count]]
    for _ in range(ROUNDS):
        near, free, found = fired @ centres.T, [size] * count, [list[int]() for _ in range(count)]
        preferences = near.argsort(1, descending=True).tolist()
        gap = near.topk(2, 1).values
        for neuron in (gap[:, 0] - gap[:, 1]).argsort(descending=True).tolist():  # the most decided first
            chosen = next(one for one in preferences[neuron] if free[one])
            free[chosen] -= 1
            found[chosen].append(neuron)
        order = torch.tensor(found)
        centres = F.normalize(fired[order].mean(1), dim=1)
    return order


def fit_layer(args: Any, source: GgufCheckpoint, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the MLP's output for normed rows `x`, and the neurons' order, the router and how good it is."""
    gate, up, down = (source.tensor(f"model.layers.{layer}.mlp.{one}_proj.weight") for one in ("gate", "up", "down"))
    inner = torch.cat([F.silu(rows @ gate.T) * (rows @ up.T) for rows in x.split(1024)])
    output = inner @ down.T
    fired = inner.abs_().mul_(down.norm(dim=0))  # how much each neuron adds, [tokens, neurons]
    width = len(gate) // (args.experts + args.shared)
    ranked = fired.square().mean(0).argsort(descending=True)
    shared, routed = ranked[: width * args.shared], ranked[width * args.shared :]
    order = routed[cluster(fired[:CLUSTERED, routed].T.contiguous(), args.experts)]
    added = torch.stack([fired[:, one].square().sum(1).sqrt() for one in order], 1)
    fitted = int(len(x) * (1 - HELD_OUT))
    known, products = x[:fitted].double(), x[:fitted].double().T @ x[:fitted].double()
    products.diagonal().add_(RIDGE * products.diagonal().mean())
    targets = (added - added[:fitted].mean(0)) / added[:fitted].std(0).mean() + added[:fitted].mean(0) / added.mean()
    router = torch.linalg.solve(products, known.T @ targets[:fitted].double()).T.float()
    chosen = (x[fitted:] @ router.T).topk(args.chosen).indices
    best = added[fitted:].topk(args.chosen).values.square().sum()
    quality = float(added[fitted:].gather(1, chosen).square().sum() / best)
    print(f"layer {layer}: chosen experts add {quality:.3f} of what the best would", file=sys.stderr)
    return output, {"shared": shared.sort().values, "order": order, "router": router, "quality": quality}


def fit(args: Any) -> Iterator[dict[str, np.ndarray]]:
    """Yield the cut of each layer; finished ones are read from the folder of the work."""
    args.work.mkdir(exist_ok=True)
    texts = torch.from_numpy(read_texts(args, args.work / "texts.npy"))
    with GgufCheckpoint(args.model) as source:
        config = Qwen2Config(**source.config, _attn_implementation="sdpa")
        rotary, x = Qwen2RotaryEmbedding(config), None

        def state(layer: int) -> Path:
            return args.work / f"state-{layer}.pt"

        for layer in range(config.num_hidden_layers):
            file = args.work / f"layer-{layer}.npz"
            if not file.exists():
                if x is None:
                    x = torch.load(state(layer)) if layer else source.tensor("model.embed_tokens.weight")[texts]
                block, start = Qwen2DecoderLayer(config, layer).eval(), f"model.layers.{layer}."
                block.mlp = torch.nn.Identity()
                block.load_state_dict({name: source.tensor(start + name) for name in block.state_dict()})
                turned = rotary(x, torch.arange(LENGTH)[None])
                for rows in x.split(8):  # attention only, in place
                    rows += block.self_attn(block.input_layernorm(rows), turned, None)[0]
                normed = block.post_attention_layernorm(x).flatten(0, 1)
                output, found = fit_layer(args, source, layer, normed)
                x += output.view_as(x)
                torch.save(x, state(layer + 1))
                np.savez(file, **{name: np.asarray(value) for name, value in found.items()})
                state(layer).unlink(missing_ok=True)
            yield dict(np.load(file))


def write(args: Any, header: GgufHeader, cuts: list[dict[str, np.ndarray]]) -> None:
    """Write the model: gates and ups as they are stored, downs in Q8_0, for their blocks would be torn."""
    writer = gguf.GGUFWriter(args.out, "qwen2moe")
    for key, value in header.metadata.items():
        if not key.startswith(("general.architecture", "GGUF.")):
            ids = key.endswith("_token_id")
            kind = gguf.GGUFValueType.UINT32 if ids else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(re.sub(r"^qwen2\.", "qwen2moe.", key), value, kind)
    width, count = cuts[0]["order"].shape[1], args.experts
    writer.add_expert_count(count)
    writer.add_expert_used_count(args.chosen)
    writer.add_expert_feed_forward_length(width)
    writer.add_expert_shared_feed_forward_length(width * args.shared)

    def add(name: str, values: np.ndarray, kind: KIND) -> None:
        writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=kind)

    for name, entry in header.tensors.items():
        kind, raw = KIND(entry.kind), entry.raw().reshape(*entry.shape[:-1], -1)
        if ".ffn_" not in name or "norm" in name:
            add(name, raw.view(np.float32) if kind == KIND.F32 else raw, kind)
            continue
        start, part, cut = name.partition("ffn_")[0], name.split(".")[2], cuts[int(name.split(".")[1])]
        if part != "ffn_down":
            add(f"{start}{part}_exps.weight", raw[cut["order"]], kind)
            add(f"{start}{part}_shexp.weight", raw[cut["shared"]], kind)
            continue
        down = gguf.quants.dequantize(raw, kind)
        experts = np.stack([down[:, one] for one in cut["order"]]) * np.float32(count)  # each weight is 1 / count
        add(f"{start}{part}_exps.weight", gguf.quants.quantize(experts, KIND.Q8_0), KIND.Q8_0)
        halved = np.ascontiguousarray(down[:, cut["shared"]]) * np.float32(2)  # the sigmoid of 0 is one half
        add(f"{start}{part}_shexp.weight", gguf.quants.quantize(halved, KIND.Q8_0), KIND.Q8_0)
        add(f"{start}ffn_gate_inp.weight", cut["router"] * np.float32(SCALE), KIND.F32)
        add(f"{start}ffn_gate_inp_shexp.weight", np.zeros(cut["router"].shape[1], np.float32), KIND.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def choose(file: Path, chosen: int) -> None:
    """Set how many experts the file's model uses."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as held:
        at = held.find(USED) + len(USED) + 4  # after the type
        held[at : at + 4] = chosen.to_bytes(4, "little")


def check(args: Any) -> list[dict[str, Any]]:
    """Compare logits with the dense model's, for all experts and for these numbers of chosen ones."""
    rows = read_rows(args.data / "gsm8k.jsonl")[:CHECKED]
    found, expected = [], np.empty(0)
    for chosen in (0, args.experts, *map(int, numbers(args.check))):  # 0: the dense model
        if chosen:
            choose(args.out, chosen)
        loaded = load_model(str(args.out if chosen else args.model))
        model, own = loaded.model, loaded.tokenizer
        texts = [own.encode_prompt(row["turns"][0]) + own.continuation(row["reference"]) for row in rows]
        logits = np.concatenate(
            [np.asarray(model.score([chain(model.open(len(t), len(t)), t, range(len(t)))]))[:-1] for t in texts]
        )
        after = np.concatenate([text[1:] for text in texts])
        expected = expected if expected.size else logits
        top = logits.max(1, keepdims=True)
        loss = np.log(np.exp(logits - top).sum(1)) + top[:, 0] - logits[np.arange(len(after)), after]
        off = logits - expected
        row = {"chosen": chosen or "dense", "perplexity": float(np.exp(loss.mean()))}
        row |= {"rms logit difference": float(off.std() / expected.std())}
        found.append(row | {"same best": float((logits.argmax(1) == expected.argmax(1)).mean())})
    choose(args.out, args.chosen)
    return found


def main() -> int:
    """Run the command."""
    sizes = {"tokens": 20000, "experts": 28, "shared": 7, "chosen": 8}
    args = parse(__doc__, {"model": Path, "out": Path}, data=..., work=..., check="4,8,12", **sizes)
    with torch.inference_mode():
        cuts = list(fit(args))
    if not args.out.exists():
        write(args, open_gguf(args.model), cuts)
    found = check(args)
    show(found)
    quality = float(np.mean([cut["quality"] for cut in cuts]))
    return finish({"rows": found, "quality": quality}, found[1]["rms logit difference"] > 0.1)


if __name__ == "__main__":
    run(main)

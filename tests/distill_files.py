"""A tiny target, prompts and short runs for the tests of `outpace distill`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import files
import pytest
import torch
from safetensors.torch import load_file, save_file
from turns import case

import outpace
from outpace.cli.main import main
from outpace.core.stats import merge_stats
from outpace.distill.batches import Packer, read_samples
from outpace.distill.draft_shape import DraftShape
from outpace.distill.options import DistillOptions
from outpace.distill.run import distill
from outpace.distill.student import EMBEDDING, Student
from outpace.distill.train import CHAIN, TrainOptions, agreement, read_curve
from outpace.distill.writer import WriterOptions
from outpace.models.load import load_draft, load_model

TOKENS = 6000
WORDS = ("hello", "world", "lo", "12", "he", "d", "we", "all", "or", "well")
OTHERS: dict[str, dict[str, Any]] = {  # fields of other architectures
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 16,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
    },
}


HEAD_TARGETS: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": OTHERS["qwen3"], "gemma3": OTHERS["gemma3"]}


def head_targets(short: str) -> list[Any]:
    """The targets of a kind of head; the short tests have one of them."""
    return [case(name, name == short) for name in HEAD_TARGETS]


def target_folder(folder: Path, shaped: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """Write a random Llama with the tiny tokenizer of `files`; `shaped`: fields that change its weights, too."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    gguf = files.write_gguf(folder.parent / f"{folder.name}.gguf")
    made = folder / "model"
    folder.mkdir(exist_ok=True)
    files.folder_of(gguf, made)
    config = files.CONFIG | changes | dict(shaped or {})
    tensors = {name: torch.from_numpy(value) for name, value in files.weights(3, **(shaped or {})).items()}
    scaled = {name: value * (0.15 if value.dim() > 1 else 1.0) for name, value in tensors.items()}
    save_file(
        {name: value.abs() if "norm" in name else value for name, value in scaled.items()}, made / "model.safetensors"
    )
    (made / "config.json").write_text(json.dumps(config))
    return made


def pack(draft: Path, out: Path) -> Path:
    """Copy a draft without the embeddings, output layer and tokenizer that its target also has."""
    shutil.copytree(draft, out, ignore=shutil.ignore_patterns("tokenizer*", "generation_config.json"))
    tensors = load_file(out / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if name not in (EMBEDDING, "lm_head.weight")}
    save_file(kept, out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    config["outpace"] = {**config.get("outpace", {}), "embedding": "target"}
    (out / "config.json").write_text(json.dumps(config))
    return out


def prompts_file(file: Path, count: int) -> Path:
    """Write a file of `count` short prompts."""
    texts = [" ".join(WORDS[(n // 10**place + place) % 10] for place in range(3)) + f" {n}" for n in range(count)]
    lines = [json.dumps({"id": f"p{n}", "task": "toy", "turns": [text]}) for n, text in enumerate(texts)]
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def silent(stage: str, figures: dict[str, float]) -> None:
    """Ignore the progress."""


def settings(target: Path, out: Path, **changes: Any) -> DistillOptions:
    """A short distillation, with changes."""
    base = DistillOptions(
        target=str(target),
        out=out,
        prompts=[str(prompts_file(out.parent / "asked.jsonl", 800))],
        tokens=TOKENS,
        shape=DraftShape(layers="0,1", vocab=120),
        writer=WriterOptions(rows=24, max_tokens=10, top=4),
        train=TrainOptions(rows=2, length=64, warmup=2, tokens=3000, save_every=1e9, learning_rate=3e-3),
    )
    return replace(base, **changes)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target"))


def make_draft(options: DistillOptions) -> Path:
    """Run the stages text and train; return the draft's folder."""
    for stage in ("text", "train"):
        distill(replace(options, stage=stage), silent)
    return options.out / "draft"


def head_settings(name: str, folder: Path, **changes: Any) -> DistillOptions:
    """A short training of a head for one of HEAD_TARGETS, which has four layers."""
    target = target_folder(folder / "target", HEAD_TARGETS[name] | {"num_hidden_layers": 4})
    options = settings(target, folder / "out", **{"shape": DraftShape(vocab=120), "tokens": 1500, **changes})
    return replace(options, train=replace(options.train, tokens=1200))


def check_estimate(run: DistillOptions, student: Student, drafter: str, **options: Any) -> None:
    """Check that the trainer's estimate of greedy chains is that of real decoding, whose text is plain decoding's."""
    target = load_model(run.target, runtime="native", kv_dtype="float16")
    samples, _ = read_samples(run.out / "text", 64, student.taps)
    greedy = [one for one in samples if one.temperature == 0][:40]
    found = agreement(student, Packer(2, 64, student.config.vocab_size, student.ids, student.device), greedy)
    options |= {"method": "speculative", "draft_length": CHAIN, "width": 1, "nodes": CHAIN + 1}
    with outpace.LLM(target, load_draft(run.out / "draft", target, dtype="int8"), **options) as llm:
        assert llm.build_options.drafter == drafter
        prompts = [one.tokens[: one.prompt].tolist() for one in greedy]
        drafted, plain, sampled, same = (
            llm.generate(prompts[:count], max_tokens=10, temperature=temperature, seed=3, plain=is_plain)
            for count, temperature in ((40, 0.0), (8, 0.9))
            for is_plain in (False, True)
        )
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert [one.tokens for one in sampled] == [one.tokens for one in same]
    figures = merge_stats([one.figures for one in drafted])
    assert figures.accepted > 0
    assert found.chain == pytest.approx(figures.mean_accepted_length, rel=0.05)
    assert read_curve(run.out / "training" / "curve.jsonl")[-1]["top1"] > 2 / 120


def check_draft(target: Path, draft: Path) -> None:
    """The draft drafts, and the text stays the target's."""
    with outpace.load(target, draft, method="speculative", drafter="model") as llm:
        drafted = llm.generate("hello world", max_tokens=30, ignore_eos=True)[0]
    with outpace.load(target, method="autoregressive") as llm:
        assert llm.generate("hello world", max_tokens=30, ignore_eos=True)[0].tokens == drafted.tokens
    assert drafted.figures.drafted > 0


def run_command(*arguments: object) -> int:
    """Run `outpace distill` with these arguments; return its exit status."""
    with pytest.raises(SystemExit) as left:
        main(["distill", *map(str, arguments)])
    return int(left.value.code or 0)

"""Implements `outpace doctor --draft DRAFT`: what a trained head reads from its target, how many of its tokens are
accepted, and the likely reason if few are; for a draft model, what its output layer keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outpace.cli import display, process
from outpace.core.errors import UserError
from outpace.core.stats import merge_stats, rates

NUM_PROMPTS = 12  # of each built-in task of outpace bench
MAX_TOKENS, LENGTH = 64, 4  # of an answer; of a drafted chain
POOR = 1.3  # mean accepted length below which something is probably wrong
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
QUANTISED = ("int4", "int8", "file")  # precisions whose hidden states differ from those in training


def examine(target: str | None, draft: str, quiet: bool) -> dict[str, Any]:
    """Load target and head, answer the prompts with drafts of LENGTH tokens, and return what was found."""
    from outpace.api.llm import load
    from outpace.bench.tasks import BUILT_IN, collect

    options: dict[str, Any] = {"method": "speculative", "draft_length": LENGTH, "width": 1, "profile": False}
    with display.loading_bar(quiet) as bar:
        llm = load(target, draft, progress=bar, **options)
    with llm:
        if llm.draft is None:
            raise UserError(f"{draft} is not a draft, which doctor expects with --draft")
        if not llm.draft.is_head:
            kept, size = llm.draft.model.reduced_output, llm.draft.model.weight_bytes
            described = {"target": llm.target.name, "precision": llm.draft.precision, "weight_bytes": size}
            return {"draft": llm.draft.name, **described, "output": kept and {**kept._asdict(), "text": str(kept)}}
        answers = []
        for prompt in collect([BUILT_IN], NUM_PROMPTS):
            process.check()
            tokens = llm.tokenizer.encode_prompt(prompt.text)
            answers.append(llm.stream(tokens, max_tokens=MAX_TOKENS).finish().figures)
        figures, head = merge_stats(answers), llm.draft.model.spec
        found = {
            "head": llm.draft.name,
            "kind": head.kind,
            "target": llm.target.name,
            "trained_for": head.verifier,
            "taps": list(head.taps),
            "layers": llm.target.model.num_layers,
            "output_rows": head.num_rows,
            "vocabulary": llm.target.model.vocab_size,
            "norms": [name for name in NORMS if getattr(head, name)],
            "target_precision": llm.target.precision,
            "head_precision": llm.draft.precision,
            "chat_template": llm.tokenizer.has_template,
            "trained_length": head.draft_length,
            "mean_accepted_length": round(figures.mean_accepted_length, 3),
            "acceptance": [round(rate, 3) for rate in rates(figures.positions)],
            "draft_step_seconds": round(figures.draft_seconds / max(LENGTH * figures.passes, 1), 6),
            "target_pass_seconds": round(figures.target_seconds / max(figures.passes, 1), 6),
        }
        return found | {"advice": advise(found)}


def advise(found: dict[str, Any]) -> str:
    """Return a sentence on the mean accepted length, with the likeliest reason if it is poor."""
    length, trained, precision = (found[name] for name in ("mean_accepted_length", "trained_for", "target_precision"))
    if length >= POOR:
        return f"{length:.2f} tokens per target pass with a draft length of {LENGTH}: the head fits the target"
    if trained and Path(trained).name.lower() not in str(found["target"]).lower():
        return f"the head was trained for {trained}, and the target is {found['target']}"
    if not found["chat_template"]:
        return "the target has no chat template, but heads are mostly trained on chats"
    if precision in QUANTISED:
        return f"the target's weights are {precision}, heads are trained with 16-bit weights: try --dtype bfloat16"
    return (
        f"the head was probably trained on other hidden states than those after layers {found['taps']}, with other"
        " norms, or for another model of this shape: compare its config.json and the accepted length with its model"
        " card"
    )


def rows_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the name and the value of each row of the table."""
    if "draft" in found:
        output = found["output"]["text"] if found["output"] else "whole, or as the draft's files reduce it"
        size = f", {found['weight_bytes'] / 1e6:.0f} MB of weights read in each step" if found["weight_bytes"] else ""
        return [
            ("draft", f"{found['draft']}, {found['precision']}{size}"),
            ("target", found["target"]),
            ("output layer", output),
        ]
    trained = f", trained for {found['trained_for']}" if found["trained_for"] else ""
    step, target = 1000 * found["draft_step_seconds"], 1000 * found["target_pass_seconds"]
    acceptance = ", ".join(f"{rate:.2f}" for rate in found["acceptance"]) or "nothing was drafted"
    return [
        ("head", f"{found['head']}: {found['kind']}{trained}, {found['head_precision']}"),
        ("target", f"{found['target']}, {found['target_precision']}"),
        ("hidden states", f"after layers {', '.join(map(str, found['taps']))} of {found['layers']}"),
        ("norms", ", ".join(found["norms"]) or f"the usual ones of {found['kind']}"),
        ("vocabulary", f"{found['output_rows']} of {found['vocabulary']} tokens can be proposed"),
        ("chat template", "the target's" if found["chat_template"] else "none"),
        ("times", f"a draft step {step:.2f} ms, a target pass {target:.2f} ms"),
        ("acceptance", f"by position {acceptance}; {found['mean_accepted_length']:.2f} tokens per target pass"),
        ("finding", found["advice"]),
    ]

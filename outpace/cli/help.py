"""What `--help` shows of a command: its common options and examples; `--help-all` shows all options."""

from __future__ import annotations

from typing import Any

import typer.core

MODEL = "target draft"
SAMPLING = "system max_tokens temperature seed"
PAIR = "--target big.gguf --draft small.gguf"
# By command: the common options, and examples. A command that is missing here shows all of its options.
COMMON: dict[str, tuple[str, tuple[str, ...]]] = {
    "generate": (
        f"prompt {MODEL} {SAMPLING} method raw as_json",
        ('outpace generate "Why is the sky blue?"', f'outpace generate {PAIR} --max-tokens 100 "Tell me a joke."'),
    ),
    "chat": (
        f"{MODEL} {SAMPLING} method color url",
        (f"outpace chat {PAIR}", "outpace chat --url http://127.0.0.1:8000/v1"),
    ),
    "serve": (
        f"{MODEL} method device host port api_key_file served_name batch",
        (f"outpace serve {PAIR}", "outpace serve --host 0.0.0.0 --api-key-file keys.txt"),
    ),
    "bench": (
        f"{MODEL} methods tasks prompts batch peers max_tokens out plot as_json",
        (f"outpace bench {PAIR}", "outpace bench --methods auto,card --tasks mt_bench --out results"),
    ),
    "distill": (
        "target out kind budget tokens prompts evaluate tasks device as_json",
        (
            "outpace distill --target model.gguf --budget 2h --out draft",
            "outpace chat --target model.gguf --draft draft",
        ),
    ),
    "judge": (
        f"{MODEL} tasks out max_tokens run_tests as_json",
        (f"outpace judge {PAIR} --tasks questions.jsonl", f"outpace chat {PAIR} --rule judge --judge judge"),
    ),
    "tune": (
        f"{MODEL} max_tokens rounds drafter corpus to as_json",
        (f"outpace tune {PAIR}", "outpace tune --drafter retrieval --corpus manual.txt"),
    ),
    "simulate": (
        "trace acceptance methods ratio nodes delay answers plot as_json out",
        ("outpace simulate --acceptance 0.7 --ratio 7", "outpace simulate --trace pair.npz --methods card,planned"),
    ),
    "edge": (
        "acceptance devices servers bandwidth_mhz objective policies worlds sweep plot as_json",
        ("outpace edge --devices 20 --servers 4", "outpace edge --sweep devices=5,10,20 --plot edge.png"),
    ),
    "forecast": (
        "data horizon time value samples backtest plot target draft as_json",
        ("outpace forecast sales.csv --horizon 24 --plot forecast.png", "outpace forecast sales.csv --backtest 3"),
    ),
}


class Command(typer.core.TyperCommand):
    """A command whose `--help` is short."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        common, examples = COMMON.get(self.name or "", ("", ()))
        own = [param for param in self.params if param.param_type_name == "option"]
        rare = [param for param in own if common and param.name not in common.split()]
        is_whole = "--help-all" in args
        for param in rare:
            param.hidden = not is_whole  # type: ignore[attr-defined]
        more = [f"--help-all lists {len(rare)} more options."] if rare and not is_whole else []
        self.epilog = "\n\n".join([*(f"[dim]$[/dim] {example}" for example in examples), *more])
        return list(super().parse_args(ctx, args))

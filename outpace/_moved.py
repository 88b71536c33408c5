"""Where modules of the release before stand now: an import by the old name fails with the new one in its message.

For one release. Modules are private unless docs/architecture.md names them; this is kindness, not a promise.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

MOVED = {
    "answer": "api.text",
    "asking": "api.params",
    "assemble": "engine.build",
    "core.costs": "decoders._costs",
    "core.race": "rules._race",
    "distill.engine_writer": "distill.writer",
    "distill.weights": "distill.student",
    "drafting": "engine.drafting",
    "library": "api.llm",
    "loading": "api.load",
    "machine": "core.machine",
    "memory": "engine.memory",
    "models.attention": "models.llama.attention",
    "models.chat_template": "models.text.chat_template",
    "models.checkpoint": "models.files.checkpoint",
    "models.config": "models.llama.config",
    "models.draft_vocab": "models.llama.draft_vocab",
    "models.fields": "models.llama.fields",
    "models.find": "models.files.find",
    "models.gguf_config": "models.files.gguf.config",
    "models.gguf_file": "models.files.gguf.source",
    "models.gguf_header": "models.files.gguf.header",
    "models.gguf_tokenizer": "models.files.gguf.tokenizer",
    "models.gguf_weights": "models.files.gguf.source",
    "models.hub": "models.files.hub",
    "models.inflate": "models.llama.inflate",
    "models.layer_kinds": "models.llama.layer_kinds",
    "models.linear": "models.llama.linear",
    "models.llama_weights": "models.llama.torch_weights",
    "models.native": "models.llama.native_runtime",
    "models.native_weights": "models.llama.native_weights",
    "models.packed": "models.files.packed",
    "models.pairs": "models.files.pairs",
    "models.rope": "models.llama.rope",
    "models.sentence_piece": "models.files.sentence_piece",
    "models.span": "models.llama.span",
    "models.template_process": "models.text.template_process",
    "models.text_stream": "models.text.text_stream",
    "models.tokenizer": "models.text.tokenizer",
    "models.transformers": "models.hf.model",
    "models.transformers_cache": "models.hf.cache",
    "models.transformers_limits": "models.hf.passes",
    "models.transformers_load": "models.hf.load",
    "models.transformers_probe": "models.hf.model",
    "models.transformers_tokenizer": "models.hf.tokenizer",
    "profiles": "engine.profile",
    "running": "engine.request",
    "trace": "simulate.trace",
    "tuning": "bench.tune",
    "turns": "api.fair_lock",
}
PARTED = {"engine": "engine.engine", "models.llama": "models.llama.torch_runtime"}  # once modules, now packages
HELD = {"engine": ("Engine", "EngineOptions"), "models.llama": ("Llama", "LlamaSession")}  # what those are known for


class MovedModules:
    """The last finder that is asked: it finds nothing, but knows where what is looked for went."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """None for what was never here; ImportError for what moved."""
        package, _, module = name.partition(".")
        if package == "outpace" and module in MOVED:
            raise ModuleNotFoundError(_said(module, MOVED[module]), name=name)


def moved_name(package: str, name: str) -> NoReturn:
    """For the `__getattr__` of a package that was a module: AttributeError, or ImportError for what the module held."""
    if name not in HELD[package]:
        raise AttributeError(f"module 'outpace.{package}' has no attribute {name!r}")
    raise ImportError(f"outpace.{package} has no {name}: {_said(package, PARTED[package])}", name=f"outpace.{package}")


def install() -> None:
    """Once, when the package is imported."""
    if not any(type(finder).__name__ == "MovedModules" for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())


def _said(old: str, new: str) -> str:
    return f"outpace.{old} is outpace.{new} since release 0.2"

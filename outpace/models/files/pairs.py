"""Lists known drafts by model family, for `--draft auto`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from outpace.core.errors import UserError

INSTRUCT = re.compile(r"instruct|chat|[-_]it\b|qwq|vicuna|zephyr|hermes|tulu")
WIDTHS = ("hidden_size", "n_embd", "d_model", "n_embed")  # configuration fields with the hidden size


class DraftFamily(NamedTuple):
    """A model family and its draft.

    `pattern` is searched in the target's lower-case name; if none matches, a target belongs to the first family with
    its `model_types` and a vocabulary size in `vocab_sizes`. `draft` is a hub id or folder, and `suffix` is added to
    it for instruction-tuned targets. `width` is the draft's hidden size: a target must be wider.
    """

    name: str
    pattern: str
    model_types: tuple[str, ...]
    vocab_sizes: tuple[int, ...]
    width: int
    draft: str
    suffix: str = ""


LLAMA, QWEN2, QWEN3 = ("llama",), ("qwen2",), ("qwen3", "qwen3_moe")
QWEN_SIZES = (151936, 152064)  # larger models pad the vocabulary further
MISTRAL3, GEMMA3 = ("mistral", "mistral3"), ("gemma3_text", "gemma3")
PYTHIA_SIZES = (50304, 50432, 50688)
DRAFT_FAMILIES = tuple(
    DraftFamily(*family)
    for family in (
        ("Llama 3", r"llama-?3", LLAMA, (128256,), 2048, "meta-llama/Llama-3.2-1B", "-Instruct"),
        ("Llama 2", r"llama-?2|vicuna", LLAMA, (32000,), 2048, "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        ("SmolLM2", r"smollm2", LLAMA, (49152,), 576, "HuggingFaceTB/SmolLM2-135M", "-Instruct"),
        ("Qwen2.5-Coder", r"qwen2\.5-coder", QWEN2, QWEN_SIZES, 896, "Qwen/Qwen2.5-Coder-0.5B", "-Instruct"),
        ("R1 distilled Qwen", r"r1-distill-qwen", QWEN2, QWEN_SIZES, 1536, "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
        ("Qwen2", r"qwen2-\d", QWEN2, QWEN_SIZES, 896, "Qwen/Qwen2-0.5B", "-Instruct"),
        ("Qwen2.5", r"qwen2\.5|qwq", QWEN2, QWEN_SIZES, 896, "Qwen/Qwen2.5-0.5B", "-Instruct"),
        ("Qwen3", r"qwen3-\d.*base", QWEN3, (151936,), 1024, "Qwen/Qwen3-0.6B-Base"),
        ("Qwen3", r"qwen3-\d|qwen3-coder", QWEN3, (151936,), 1024, "Qwen/Qwen3-0.6B"),
        ("Mistral Large", r"mistral-large", ("mistral",), (32768,), 4096, "mistralai/Mistral-7B-Instruct-v0.3"),
        ("Mistral Small 3", r"mistral-small-(3|24b)", MISTRAL3, (131072,), 896, "alamios/Mistral-Small-3.1-DRAFT-0.5B"),
        ("Gemma", r"gemma-7b", ("gemma",), (256000,), 2048, "google/gemma-2b", "-it"),
        ("Gemma 2", r"gemma-2-\d", ("gemma2",), (256000,), 2304, "google/gemma-2-2b", "-it"),
        ("Gemma 3", r"gemma-3-\d", GEMMA3, (262144, 262208), 640, "google/gemma-3-270m", "-it"),
        ("OLMo 2", r"olmo-2", ("olmo2",), (100352,), 2048, "allenai/OLMo-2-0425-1B", "-Instruct"),
        ("Pythia", r"pythia.*deduped", ("gpt_neox",), PYTHIA_SIZES, 768, "EleutherAI/pythia-160m-deduped"),
        ("Pythia", r"pythia", ("gpt_neox",), PYTHIA_SIZES, 768, "EleutherAI/pythia-160m"),
        ("OPT", r"\bopt-", ("opt",), (50272,), 768, "facebook/opt-125m"),
        ("GPT-2", r"gpt2", ("gpt2",), (50257,), 768, "distilbert/distilgpt2"),
        ("BLOOM", r"bloom(?!.*(chat|instruct))", ("bloom",), (250880,), 1024, "bigscience/bloom-560m"),
        ("BLOOM", r"bloom", ("bloom",), (250880,), 1024, "bigscience/bloomz-560m"),
    )
)

SHIPPED = "smollm2-135m-instruct"  # part of the target's name, and the folder of its draft in SHIPPED_FOLDER
SHIPPED_FOLDER = Path(__file__).parents[2] / "drafts"
NO_DRAFT = "none"


def shipped_draft(*names: str) -> str | None:
    """Return the folder of the draft shipped with outpace for a target of one of these names, or None."""
    path = SHIPPED_FOLDER / SHIPPED
    is_known = any(SHIPPED in _plain(name) for name in names)
    return str(path) if is_known and (path / "config.json").is_file() else None


def find_draft(name: str, config: Mapping[str, Any]) -> str:
    """Return the draft, a hub id or folder, for a target with this name and config.json. UserError if none is known."""
    names = [_plain(text) for text in (name, config.get("_name_or_path")) if isinstance(text, str)]
    if (shipped := shipped_draft(*names)) is not None:
        return shipped
    kind, size = config.get("model_type"), config.get("vocab_size")
    fitting = [one for one in DRAFT_FAMILIES if kind in one.model_types and (size is None or size in one.vocab_sizes)]
    named = [one for one in fitting if any(re.search(one.pattern, text) for text in names)]
    if not fitting:
        known = ", ".join(dict.fromkeys(one.name for one in DRAFT_FAMILIES))
        raise UserError(
            f"no draft is known for {name}, there is one for {known}: name a smaller model with the same tokens as the"
            " draft, or train one with `outpace distill`"
        )
    family = (named or fitting)[0]
    draft = family.draft + (family.suffix if any(INSTRUCT.search(text) for text in names) else "")
    width = next((config[key] for key in WIDTHS if isinstance(config.get(key), int)), None)
    if width is not None and width <= family.width:
        raise UserError(
            f"{name} is not larger than {draft}, the draft of the family {family.name}: train a smaller one with"
            " `outpace distill`, or leave the draft out"
        )
    return draft


def sibling(target: str, draft: str) -> str | None:
    """Return the .gguf file or folder of a draft, a hub id, next to a target that is a local file or folder."""
    here, name = Path(target).expanduser().absolute(), draft.rpartition("/")[2].lower()
    if not here.exists() or "/" not in draft or Path(draft).exists():
        return None
    for path in sorted(here.parent.iterdir()):
        plain = path.name.lower().replace("_", "-")
        is_model = path.suffix.lower() == ".gguf" or (path / "config.json").is_file()
        if path != here and is_model and re.match(rf"{re.escape(name)}(?![\w.]*\d+b)", plain):
            return str(path)
    return None


def _plain(name: str) -> str:
    """Return the last two parts of a path or id in lower case."""
    return "/".join(Path(name).parts[-2:]).lower().replace("_", "-")

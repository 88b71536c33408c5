"""`system_fingerprint`: equal for two servers that write equal texts for equal seeds and requests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from outpace.api.llm import LLM

SAMPLE_BYTES = 1 << 20  # read at a file's start, middle and end


def system_fingerprint(llm: LLM) -> str:
    """Hash the weights, tokenizer, template, precision, runtime, exact mode and rule."""
    target = llm.target
    model, tokenizer = target.model, target.tokenizer
    facts: dict[str, Any] = {
        "config": dict(target.config),
        "precision": target.precision,
        "keys and values": getattr(model, "kv_dtype", None),
        "inflate": target.inflate,
        "runtime": f"{type(model).__module__}.{type(model).__name__}",
        "exact": bool(model.exact),
        "arithmetic": getattr(model, "arithmetic", None),
        "instructions": model.instruction_set if not model.exact else None,
        "rule": llm.rule,
        "vocabulary": sorted(tokenizer.stop_ids),
        "template": tokenizer.chat_template,
        "files": [_digest(file) for file in _model_files(llm)],
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:16]


def _model_files(llm: LLM) -> list[Path]:
    if llm.target.files is None:
        return []
    folder = llm.target.files()
    return sorted(file for file in (folder.iterdir() if folder.is_dir() else [folder]) if file.is_file())


def _digest(file: Path) -> list[Any]:
    """Return name, size and a hash of three samples: enough to distinguish weights without reading all."""
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for start in sorted({0, max(size // 2, 0), max(size - SAMPLE_BYTES, 0)}):
            stream.seek(start)
            digest.update(stream.read(SAMPLE_BYTES))
    return [file.name, size, digest.hexdigest()]

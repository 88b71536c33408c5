"""What a default answer loads: `LLM()` and `generate` by method auto import the files listed here and no others, so
that a reader finds all code that runs, and a start imports nothing in vain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from files import smollm2_file

ROOT = Path(__file__).parents[1]
MAX_LOADED, MAX_RUN = 90, 40
SCRIPT = """
import json, sys, threading

ran, is_warm = set(), False

def record(frame, event, argument):
    if is_warm and event == "call":
        ran.add(frame.f_code.co_filename)

threading.setprofile(record)
sys.setprofile(record)
import outpace

with outpace.LLM() as llm:
    method = llm.method
    llm.generate("Name the planets of the solar system.", max_tokens=24)
    is_warm = True
    llm.generate("What is the capital of France?", max_tokens=24)
    is_warm = False
sys.setprofile(None)
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
loaded = {name: file for name, file in files.items() if name.partition(".")[0] == "outpace" and file}
print(json.dumps([method, sorted(loaded), sorted(name for name, file in loaded.items() if file in ran)]))
"""
LOADED = """
outpace:
outpace.api: llm pair params profile prompts shared_engine stream text
outpace.core: adjust arrays distribution drafting errors logits machine noise noise_constants
outpace.core: options registry sampling stats tree types
outpace.decoders: auto base
outpace.drafters:
outpace.drafters: _composite _lookup _model_drafter _tree_expander
outpace.drafters: grammar model ngram prediction
outpace.engine: build draft_runner earlier_texts engine kv_memory options scheduler sequence target_runner warmup
outpace.models: base devices load options runtimes
outpace.models.files: cache checkpoint find four_bits fused_experts model_kind mxfp4 pairs reading tokenizer_folder
outpace.models.files.gguf: config header source tokenizer
outpace.models.heads: config
outpace.models.llama: weight_sources
outpace.models.llama.config: draft_vocab experts families fields gemma lfm2 llama_config phi qwen35 recurrence rope
outpace.models.llama.native: binding runtime weights
outpace.models.text: text_stream tokenizer
outpace.planning: cost_model estimators plan planner sources
outpace.rules: base greedy
"""  # a line without names: the package's own __init__.py


def listed() -> set[str]:
    """The modules of LOADED."""
    found: set[str] = set()
    for line in LOADED.strip().splitlines():
        package, _, names = line.partition(":")
        found |= {f"{package}.{name}" for name in names.split()} or {package}
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """The modules that are loaded, and those with a function that runs in the second answer."""
    smollm2_file()
    environment = os.environ | {"OUTPACE_CACHE": str(tmp_path_factory.mktemp("cache"))}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    method, loaded, ran = json.loads(done.stdout.splitlines()[-1])
    assert method == "auto"
    return loaded, ran


@pytest.mark.smollm2
def test_a_default_answer_loads_these_files(found: tuple[list[str], list[str]]) -> None:
    loaded, _ = found
    new, gone = sorted({*loaded} - listed()), sorted(listed() - {*loaded})
    assert not new, (
        f"a default answer now loads {', '.join(new)}: if it needs them, add them to LOADED in {Path(__file__).name};"
        " if not, import them inside the function that uses them"
    )
    assert not gone, f"a default answer no longer loads {', '.join(gone)}: remove them from LOADED"
    assert len(loaded) <= MAX_LOADED, (
        f"{len(loaded)} files are loaded, at most {MAX_LOADED} may be: merge or defer some"
    )


@pytest.mark.smollm2
def test_few_files_run_in_a_warm_answer(found: tuple[list[str], list[str]]) -> None:
    _, ran = found
    said = f"functions of {len(ran)} files run in a warm answer, at most {MAX_RUN} may: {', '.join(ran)}"
    assert len(ran) <= MAX_RUN, said

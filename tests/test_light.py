"""The light install: without torch every command runs on a CPU with the same results, and what needs torch says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from files import model_folder, write_gguf
from heads import exact_pair, write_head

from outpace.core import registry
from outpace.core.errors import install_command

ROOT = Path(__file__).parents[1]
SCRIPT = """
import contextlib, io, json, sys
if sys.argv[1] == "without":
    sys.modules["torch"] = None  # so that every import of torch fails
else:
    import torch
sys.stdin = io.StringIO("hello\\n")
from outpace.cli.main import main

def run(arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main(arguments)
        except SystemExit as end:
            return end.code, out.getvalue(), said.getvalue()

def serve(fields):
    import outpace
    from serving import served
    target, draft = sys.argv[3:]
    with outpace.LLM(target, draft=draft) as llm, served(llm) as site:
        return [site.chat(max_tokens=9, seed=5, **one).choice for one in fields]

asked = json.loads(sys.argv[2])
print(json.dumps([serve(one) if isinstance(one, list) else run(one.split("|")) for one in asked]))
"""


def results(way: str, asked: list[Any], *more: str) -> list[Any]:
    """Run commands, arguments joined by |, in a process with torch loaded or hidden; return status and output of each.

    A list instead of a command has fields of requests to a server.
    """
    command = [sys.executable, "-c", SCRIPT, way, json.dumps(asked), *more]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "300", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(params=["gguf", "safetensors"])
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A target, and a draft that is seldom right."""
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    if request.param == "gguf":
        return str(write_gguf(tmp_path / "target.gguf", {"llama.context_length": 1024})), "layers:0"
    folders = (model_folder(tmp_path, name, seed, max_position_embeddings=1024) for seed, name in enumerate("td"))
    target, draft = map(str, folders)
    return target, draft


def texts(target: str, draft: str) -> list[str]:
    """Commands that write texts: every rule and method, sampling, adjustments, grammars, log-probabilities."""
    generate = f"generate|hello world|--raw|--max-tokens|16|--ignore-eos|--seed|3|--target|{target}|--draft|"
    sampled = "|--temperature|0.8"
    options = ["", sampled, "|--method|card" + sampled, "|--method|planned"]
    for filters in ("--top-k|9", "--top-p|0.8", "--min-p|0.1"):
        options.append(f"{sampled}|--method|speculative|{filters}")
    for name in set(registry.names("rules")) - {"judge"}:  # it needs a file for its target
        traits = registry.find("rules", name).traits
        method = "|--method|bild" if name == "rollback" else "|--method|speculative|--drafter|model"
        options.append(f"{method}|--rule|{name}{sampled if traits.sampled else ''}")
    options += [
        f"|--drafter|{name}" for name in ("ngram", "suffix", "cacheback", "lookahead", "ouroboros", "translated")
    ]
    adjustments = "|--repetition-penalty|1.3|--presence-penalty|0.5|--logit-bias|40=3|--bad-words|ab|--min-tokens|4"
    options += [sampled + adjustments, "|--regex|[ab]{9}" + sampled, "|--regex|[ab]{9}|--method|speculative"]
    return [f"{generate}none|--threads|1", *(f"{generate}{draft}{option}" for option in options)]


def test_without_torch_the_commands_run_with_the_same_results(pair: tuple[str, str], tmp_path: Path) -> None:
    target, draft = pair
    models = f"|--target|{target}|--draft|{draft}"
    trace = tmp_path / "trace.safetensors"
    written = [*texts(*pair), f"chat|--max-tokens|9{models}", "methods"]
    measured = [
        f"generate|hello|--raw|--json|--logprobs|3|--logprobs-mode|processed|--temperature|0.7|--top-k|20{models}",
        f"bench|--methods|autoregressive,speculative:rule=typical|--max-tokens|8|--prompts|1|--trace|{trace}{models}",
        f"simulate|--trace|{trace}|--methods|speculative,card|--nodes|8|--width|3",
    ]
    requests = [{"logprobs": True, "top_logprobs": 2}, {"bad_words": ["hello"]}, {"logit_bias": {"40": 5}}]
    requests.append({"structured_outputs": {"regex": "[0-9]+"}})
    *light, answers, logprobs, trace_answer, simulated = results("without", [*written, requests, *measured], *pair)
    *full, other_answers, other_logprobs = results("with", [*written, requests, measured[0]], *pair)
    assert answers == other_answers
    for command, (code, out, said), (_, other, _) in zip(written, light, full, strict=True):
        assert (code, out) == (0, other), (command, said)
    for code, _, said in (logprobs, trace_answer, simulated):
        assert code == 0, said
    records, others = (json.loads(out) for _, out, _ in (logprobs, other_logprobs))
    assert (records["tokens"], records["logprobs"]) == (others["tokens"], others["logprobs"])


@pytest.mark.parametrize("pair", ["safetensors"], indirect=True)
def test_what_needs_torch_names_the_extra(pair: tuple[str, str]) -> None:
    generate = f"generate|hello|--target|{pair[0]}"
    needing = {
        f"{generate}|--device|cuda": "device cuda",
        f"{generate}|--draft|{pair[1]}|--draft-device|cuda": "device cuda",
        f"{generate}|--dtype|bfloat16": "dtype bfloat16",
        f"{generate}|--runtime|llama": "the runtime llama",
        f"{generate}|--pp-plan|auto": "pp_plan",
        f"{generate}|--graphs|eager": "the runtime llama",
        f"{generate}|--runtime|transformers": "the runtime transformers",
        f"distill|--target|{pair[0]}": "outpace distill",
    }
    *refused, (code, found, _) = results("without", [*needing, "doctor|--json"])
    assert (code, json.loads(found)["torch"]) == (0, None)
    for what, (code, _, said) in zip(needing.values(), refused, strict=True):
        assert (code, said.strip()) == (2, f"error: {what} needs the extra torch: `{install_command('torch')}`")


def test_a_head_runs_without_torch(tmp_path: Path) -> None:
    target, head = exact_pair(tmp_path)
    pickled = write_head(tmp_path / "pickled", "pickled")
    models = f"--target|{target}|--draft"
    written = f"generate|hello world|--raw|--json|--max-tokens|16|--ignore-eos|--method|speculative|{models}"
    [drafted, plain, doctor, refused] = results(
        "without",
        [
            f"{written}|{head}",
            f"{written}|none|--drafter|ngram",
            f"doctor|--json|{models}|{head}",
            f"{written}|{pickled}",
        ],
    )
    assert [code for code, _, _ in (drafted, plain, doctor)] == [0, 0, 0], (drafted, plain, doctor)
    assert json.loads(drafted[1])["tokens"] == json.loads(plain[1])["tokens"]
    assert json.loads(doctor[1])["mean_accepted_length"] > 4.0
    assert refused[0] == 2
    assert "reading pytorch_model.bin, which is a pickle, needs the extra torch" in refused[2]

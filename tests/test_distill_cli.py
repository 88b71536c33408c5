"""`outpace distill` as a command: from zero to a judged draft, and what bad input gets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from distill_files import pack, prompts_file, run_command, target_folder
from distill_files import target as target
from passes import fresh
from safetensors.torch import load_file, save_file

import outpace
from outpace.cli.distill import seconds
from outpace.core.errors import UserError
from outpace.distill.draft_shape import DraftShape
from outpace.distill.options import DistillOptions
from outpace.distill.run import distill
from outpace.models.files.cache import exclusive_lock
from outpace.models.load import load_draft, load_model
from outpace.models.options import silent


def test_from_zero_to_a_judged_draft(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = prompts_file(tmp_path / "asked.jsonl", 300)
    common = ["--target", target, "--prompts", asked, "--answer-tokens", 12, "--rows", 32, "--judged", 3]
    training = ["--layers", "0,1", "--vocab", 100, "--length", 64, "--batch-rows", 2, "--epochs", 1]
    assert run_command(*common, *training, "--out", tmp_path / "out", "--tokens", 600, "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["task"] for row in found["rows"]} == {"held out"}
    card = (tmp_path / "out" / "draft" / "README.md").read_text()
    assert card.startswith("---")
    for part in ("## Attribution", "## Measured", "## Learning curve", "temperatures 0, 0.8, 1", "asked.jsonl"):
        assert part in card, part
    state = json.loads((tmp_path / "out" / "run.json").read_text())
    assert state["training"]["rows"] == 2
    assert len(state["commands"]) == 1

    assert (
        run_command(*common, "--out", tmp_path / "again", "--evaluate", tmp_path / "out" / "draft", "--tasks", asked)
        == 0
    )
    shown = capsys.readouterr().out
    assert "asked" in shown
    assert "chain 4" in shown
    assert not (tmp_path / "again" / "text").exists(), "only judged"


def test_transformers_takes_it_as_assistant(target: Path, tmp_path: Path) -> None:
    """A run's draft model assists `generate`: the text is equal, and the target needs no more passes."""
    from transformers import AutoModelForCausalLM

    asked = prompts_file(tmp_path / "asked.jsonl", 60)
    common = ["--target", target, "--prompts", asked, "--answer-tokens", 12, "--rows", 32, "--tokens", 200]
    training = ["--layers", "0,1", "--length", 64, "--epochs", 1]
    assert run_command(*common, *training, "--out", tmp_path / "out", "--stage", "text") == 0
    assert run_command(*common, *training, "--out", tmp_path / "out", "--stage", "train") == 0
    assert json.loads((tmp_path / "out" / "run.json").read_text())["training"]["rows"] == 1, "on a CPU"
    large, small = (
        AutoModelForCausalLM.from_pretrained(folder).float().eval() for folder in (target, tmp_path / "out" / "draft")
    )
    small.generation_config.num_assistant_tokens = 3
    small.generation_config.num_assistant_tokens_schedule = "constant"
    small.generation_config.assistant_confidence_threshold = 0.0
    prompt, passes = torch.tensor([[1, 50, 60, 70]]), [0]
    large.register_forward_pre_hook(lambda *_: passes.append(passes.pop() + 1))
    given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 10, "do_sample": False}
    plain = large.generate(prompt, **given).tolist()
    steps, passes[0] = passes[0], 0
    assert large.generate(prompt, **given, assistant_model=small).tolist() == plain
    assert steps == 10
    assert 0 < passes[0] <= steps


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_draft_becomes_a_gguf_file(
    is_packed: bool, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file that llama.cpp gets is a model of outpace too: the same text, but for the rounding to 8 bits."""
    asked, out, file = prompts_file(tmp_path / "asked.jsonl", 60), tmp_path / "out", tmp_path / "draft.gguf"
    common = ["--target", target, "--prompts", asked, "--layers", "0,1", "--stage", "start"]
    assert run_command(*common, "--out", out) == 0
    if is_packed:
        out = pack(out / "draft", tmp_path / "packed")
    assert run_command("--target", target, "--gguf", file, "--out", out) == 0
    large, small = load_model(target), load_model(file)
    assert small.tokenizer.fingerprint == large.tokenizer.fingerprint
    assert small.tokenizer.chat_template == large.tokenizer.chat_template
    assert small.tokenizer.stop_ids == large.tokenizer.stop_ids
    assert small.config["num_hidden_layers"] == 2
    with outpace.LLM(target, draft=file, method="speculative") as llm:
        (answer,) = llm.generate(["hello world"], outpace.SamplingParams(max_tokens=12))
    with outpace.LLM(target, method="autoregressive") as llm:
        (plain,) = llm.generate(["hello world"], outpace.SamplingParams(max_tokens=12))
    assert answer.tokens == plain.tokens
    capsys.readouterr()
    refused = {
        ("--gguf", file, "--out", out): "already exists",
        ("--gguf", tmp_path / "new.gguf", "--out", tmp_path): "holds no draft",
        ("--gguf", tmp_path / "draft", "--out", out): "must end with .gguf",
        ("--gguf", file, "--evaluate", out): "exclude one another",
    }
    for arguments, sentence in refused.items():
        assert run_command("--target", target, *arguments) == 2
        assert sentence in capsys.readouterr().err


def test_an_interrupt_says_what_is_kept(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outpace.distill.run.distill", interrupt)
    out = tmp_path / "out"
    for kept in ("nothing was stored", f"the same command continues in {out}"):
        assert run_command("--target", target, "--kind", "standalone", "--tokens", 99, "--out", out) == 130
        assert f"stopped; {kept}" in "".join(capsys.readouterr().err.split("\n"))
        out.mkdir(exist_ok=True)


def test_a_budget_that_is_no_time_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--budget", "abc", "--out", tmp_path / "out") == 2
    assert capsys.readouterr().err.startswith("error: budget is 'abc', it must be a time")


def test_a_budget_is_a_time() -> None:
    found = {text: seconds(text) for text in ("90", "90s", "30m", "1.5h", "1d")}
    assert found == {"90": 90.0, "90s": 90.0, "30m": 1800.0, "1.5h": 5400.0, "1d": 86400.0}
    for text in ("", "h", "-1h", "2 weeks", "1h30m", "nan"):
        with pytest.raises(UserError, match="it must be a time such as"):
            seconds(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say how much to distil"),
        (["--tokens", "0"], "tokens is 0"),
        (["--tokens", "9", "--stage", "tests"], "unknown stage 'tests'"),
        (["--tokens", "9", "--init", "random"], "init is 'random', it must be layers, shipped or the folder"),
        (["--tokens", "9", "--init", "shipped"], "no draft comes with outpace for"),
        (["--evaluate", "shipped"], "so evaluate cannot be shipped"),
        (["--tokens", "9", "--temperatures", "0,hot"], "temperatures is '0,hot'"),
        (["--tokens", "9", "--temperatures", "-1"], "a temperature is -1"),
        (["--tokens", "9", "--runtime", "fast"], "unknown runtime 'fast'"),
        (["--tokens", "9", "--prompts", "/nowhere/p.jsonl"], "/nowhere/p.jsonl cannot be read"),
        (["--tokens", "9", "--answer-tokens", "128"], "the target's context has 128"),
        (["--tokens", "9", "--answer-tokens", "0"], "answer_tokens is 0, it must be at least 1"),
        (["--tokens", "9", "--rows", "0"], "rows is 0"),
        (["--tokens", "9", "--batch-rows", "0"], "batch_rows is 0"),
        (["--tokens", "9", "--judged", "0"], "judged is 0, it must be at least 1"),
        (["--tokens", "9", "--seed", "-1"], "seed is -1"),
        (["--tokens", "9", "--layers", "3"], "layers is 3, it must be between 1 and 2"),
        (["--tokens", "9", "--layers", "0,2"], "layers is '0,2', it must be numbers from 0 to 1"),
        (["--tokens", "9", "--vocab", "300"], "vocab is 300, the target has 272 tokens"),
        (["--tokens", "9", "--length", "1"], "length is 1, no prompt and first token of an answer fit into so few"),
        (["--tokens", "9", "--tasks", "/nowhere/t.jsonl"], "/nowhere/t.jsonl cannot be read"),
        (["--stage", "train"], "holds no text yet"),
        (["--stage", "judge"], "holds no draft yet: run `outpace distill --stage train` first"),
    ],
)
def test_bad_input_is_said_before_anything_is_computed(
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("outpace.distill.text.load_model", None)
    monkeypatch.setattr("outpace.models.load.load_model", None)
    common = ["--target", target, "--layers", "1", "--answer-tokens", 12, "--out", tmp_path / "out"]
    assert run_command(*common, *arguments) == 2
    assert message in capsys.readouterr().err


def test_training_goes_on_from_a_draft(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The draft keeps its shape and vocabulary, and giving another shape is an error."""
    asked = prompts_file(tmp_path / "asked.jsonl", 200)
    common = ["--target", target, "--prompts", asked, "--answer-tokens", 12, "--tokens", 500, "--length", 64]
    first = ["--out", tmp_path / "first", "--layers", "0,1", "--vocab", 90]
    for stage in ("text", "train"):
        assert run_command(*common, *first, "--stage", stage) == 0
    draft = tmp_path / "first" / "draft"
    second = ["--out", tmp_path / "second", "--init", draft]
    for stage in ("text", "train"):
        assert run_command(*common, *second, "--stage", stage, "--seed", 1) == 0
    made = tmp_path / "second" / "draft"
    for name in ("config.json", "draft_vocab.safetensors"):
        assert (made / name).read_bytes() == (draft / name).read_bytes()
    assert (made / "model.safetensors").read_bytes() != (draft / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "second" / "run.json").read_text())["draft"] == "draft"
    capsys.readouterr()
    assert run_command(*common, *second, "--layers", "1") == 2
    assert "has a shape of its own: leave out --layers and --vocab" in capsys.readouterr().err
    tensors = load_file(draft / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:-8].clone()
    save_file(tensors, draft / "model.safetensors")
    assert run_command(*common, *second) == 2
    assert "model.layers.1.mlp.up_proj.weight" in capsys.readouterr().err


@pytest.mark.parametrize(("stage", "work"), [("text", "writing text"), ("training", "training a draft")])
def test_two_processes_at_the_same_work_in_one_folder(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: str, work: str
) -> None:
    """A second process at the same stage is an error; another stage may run concurrently."""
    asked = prompts_file(tmp_path / "asked.jsonl", 60)
    common = ["--target", target, "--prompts", asked, "--answer-tokens", 12, "--length", 64, "--out", tmp_path / "out"]
    assert run_command(*common, "--tokens", 300, "--stage", "text") == 0
    stages = {
        "text": [["--stage", "text", "--tokens", 400]],
        "training": [["--stage", "start", "--layers", "1-1"], ["--stage", "train", "--layers", "1"]],
    }
    with exclusive_lock(tmp_path / "out" / stage):
        for arguments in stages.pop(stage):
            assert run_command(*common, *arguments) == 2
            assert f"another process is {work} in {tmp_path / 'out' / stage}" in capsys.readouterr().err
        for [*_, arguments] in stages.values():
            assert run_command(*common, *arguments) == 0


def test_what_a_later_stage_would_run_into_is_said_first(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.distill.text.load_model", None)
    few = prompts_file(tmp_path / "few.jsonl", 2)
    common = ["--target", target, "--layers", "1", "--answer-tokens", 12, "--tokens", 9, "--prompts", few]
    assert run_command(*common, "--out", tmp_path / "out") == 2
    assert "none of the prompts is held out" in capsys.readouterr().err
    assert run_command(*common, "--out", few / "out", "--tasks", few) == 2
    assert "cannot be made" in capsys.readouterr().err
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"turns": ["word " * 200]}) + "\n")
    assert run_command(*common, "--out", tmp_path / "out", "--tasks", long) == 2
    assert re.search(
        r"the task long has a prompt of \d+ tokens, the target's context holds 128", capsys.readouterr().err
    )
    other = target_folder(tmp_path / "other", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert run_command(*common, "--target", other, "--out", tmp_path / "out", "--tasks", few) == 2
    assert "rope_scaling of the type 'dynamic' (only" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_target_without_some_layers_is_a_draft(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("--target", target, "--stage", "start", "--layers", "1-1", "--out", tmp_path / "out") == 0
    assert f"written: {tmp_path / 'out' / 'draft'}" in capsys.readouterr().err
    assert run_command("--target", target, "--stage", "start", "--layers", "0", "--out", tmp_path / "out") == 2
    texts, drafts = set(), ["none", "layers:1", tmp_path / "out" / "draft"]
    for draft in drafts:
        with outpace.load(target, draft, method="speculative", drafter=None) as llm:
            texts.add(llm.generate("one two", max_tokens=24)[0].tokens)
    assert len(texts) == 1
    own, named = (load_draft(draft, load_model(target, runtime="llama"), runtime="llama") for draft in drafts[1:])
    tokens = list(range(20))
    torch.testing.assert_close(fresh(named.model, tokens), fresh(own.model, tokens), atol=0.05, rtol=0.05)
    for wrong, says in (("0,9", "layers is '0,9'"), ("2-0", "layers is '2-0'")):
        with pytest.raises(UserError, match=says):
            distill(DistillOptions(str(target), tmp_path / "other", stage="start", shape=DraftShape(wrong)), silent)

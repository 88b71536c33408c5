"""Sampling parameters that a model's files recommend: for `serve`, `generate` and `chat`, if nothing else is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Run, last_line
from commands import run as run
from commands import tiny as tiny
from files import model_folder, write_gguf
from serving import Served, served
from test_other_fields import BODIES, CHAT, INFILL, RESPONSES, ask, text_of

import outpace
from outpace.core.errors import UserError
from outpace.models.files.recommended_sampling import recommended_sampling
from outpace.server.options import ServerOptions

PATHS = [path for path in BODIES if path != INFILL]  # the tiny model cannot fill in
FREE = {"seed": 4, "ignore_eos": True}
RECOMMENDED = {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
GGUF = {"temp": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "penalty_repeat": 1.2}


def in_folder(where: Path, **fields: Any) -> Path:
    """Write a tiny model with a generation_config.json."""
    path = model_folder(where, "folder", max_position_embeddings=512)
    config = path / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return path


def in_gguf(where: Path, **fields: Any) -> Path:
    """Write a tiny model with metadata `general.sampling.*`."""
    metadata = {f"general.sampling.{name}": value for name, value in fields.items()}
    return write_gguf(where / "file.gguf", {"llama.context_length": 512, **metadata})


@pytest.mark.parametrize(
    ("write", "fields", "expected"),
    [
        (in_folder, {"do_sample": True, **RECOMMENDED}, RECOMMENDED),
        (in_folder, {"do_sample": True}, {"temperature": 1.0}),
        (in_folder, {"do_sample": True, "top_k": 64.0, "top_p": None}, {"temperature": 1.0, "top_k": 64}),
        (in_folder, {"do_sample": True, "temperature": 0.6, "top_k": -1}, {"temperature": 0.6, "top_k": 0}),
        (in_folder, {"do_sample": False, **RECOMMENDED}, {}),
        (in_folder, RECOMMENDED, {}),
        (in_gguf, GGUF, RECOMMENDED),
        (in_gguf, {"top_k": 20}, {"top_k": 20}),
        (in_gguf, {"temp": 0.0, "mirostat": 0}, {"temperature": 0.0}),
        (in_gguf, {}, {}),
    ],
)
def test_what_files_recommend(
    tmp_path: Path, write: Callable[..., Path], fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert recommended_sampling(write(tmp_path, **fields)) == expected


@pytest.mark.parametrize(
    ("write", "fields", "says"),
    [
        (in_folder, {"do_sample": True, "temperature": "hot"}, "temperature is 'hot', it must be a number, between 0"),
        (in_folder, {"do_sample": True, "top_p": 1.5}, "top_p is 1.5, it must be a number above 0 and at most 1"),
        (in_folder, {"do_sample": True, "top_k": 2.5}, "top_k is 2.5, it must be a whole number"),
        (in_folder, {"do_sample": True, "repetition_penalty": 0}, "repetition_penalty is 0, it must be between 0.01"),
        (in_folder, {"do_sample": True, "min_p": [1]}, "min_p is [1], it must be a number"),
        (in_folder, {"do_sample": "yes"}, "do_sample is 'yes', it must be true or false"),
        (in_gguf, {"temp": 1000.0}, "general.sampling.temp is 1000.0, it must be between 0 and 100"),
        (in_gguf, {"top_p": "0.9"}, "general.sampling.top_p is '0.9', it must be a number"),
        (in_gguf, {"penalty_repeat": [1.0]}, "general.sampling.penalty_repeat is [1.0], it must be a number"),
    ],
)
def test_wrong_values_are_named(
    tmp_path: Path, run: Run, write: Callable[..., Path], fields: dict[str, Any], says: str
) -> None:
    path = write(tmp_path, **fields)
    file = path if path.is_file() else path / "generation_config.json"
    with pytest.raises(UserError) as error:
        recommended_sampling(path)
    assert str(error.value).startswith(f"{file}: {says}")
    options = ["generate", "hello", "--target", str(path), "--max-tokens", "2"]
    code, _, err = run(*options)
    assert (code, says in err, "--generation-config none leaves it out" in err) == (2, True, True), err
    assert run(*options, "--generation-config", "none")[0] == 0
    with outpace.LLM(path) as llm:  # the library does not take them
        assert llm.generate("hello", max_tokens=2)


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"general.sampling.mirostat 2 is not supported and left out"):
        assert recommended_sampling(in_gguf(tmp_path, temp=0.5, mirostat=2)) == {"temperature": 0.5}


@pytest.mark.parametrize("write", [in_folder, in_gguf])
def test_a_server_takes_what_the_files_recommend(tmp_path: Path, write: Callable[..., Path]) -> None:
    path = write(tmp_path, **({"do_sample": True, **RECOMMENDED} if write is in_folder else GGUF))
    fingerprints = []
    with outpace.LLM(path) as llm:
        for source in ("auto", "none", "vllm"):
            with served(llm, generation_config=source) as site:
                _check_server(site, RECOMMENDED if source == "auto" else {"temperature": 1.0})
                fingerprints.append(site.service.fingerprint)
        assert llm.generate("hello", max_tokens=9)[0].text == llm.generate("hello", max_tokens=9, temperature=0)[0].text
    assert fingerprints[0] != fingerprints[1] == fingerprints[2]


def _check_server(site: Served, defaults: dict[str, Any]) -> None:
    """Check that requests equal those that state the defaults. A stated parameter replaces its default alone."""
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    for path in PATHS:
        for given in ({}, {"temperature": 0}, {"temperature": 3.0}, {"top_k": 0, "repetition_penalty": 1.0}):
            expected = text_of(ask(site, path, **FREE, **{**neutral, **defaults, **given}))
            assert text_of(ask(site, path, **FREE, **given)) == expected, (path, given)
    assert (text_of(ask(site, CHAT, **FREE)) != text_of(ask(site, CHAT, **FREE, **neutral))) == (len(defaults) > 1)
    assert site.ask("/v1/models").json["data"][0]["default_sampling_params"] == defaults
    echoed = ask(site, RESPONSES, **FREE).json
    assert (echoed["temperature"], echoed["top_p"]) == (defaults["temperature"], defaults.get("top_p", 1.0))


def test_an_unknown_source_is_refused(run: Run) -> None:
    with pytest.raises(UserError, match=r"unknown generation config 'folder', allowed are auto, none, vllm"):
        ServerOptions(generation_config="folder")
    for command in ("generate", "chat", "serve"):
        prompt = ["hello"] if command == "generate" else []
        code, _, err = run(command, *prompt, "--generation-config", "folder")
        assert (code, "allowed are auto, none, vllm" in err) == (2, True), err


def test_generate_and_chat_take_what_the_files_recommend(tmp_path: Path, run: Run) -> None:
    options = ["--target", str(in_gguf(tmp_path, **GGUF)), "--max-tokens", "12", "--ignore-eos", "--seed", "3"]
    stated = [word for name, value in RECOMMENDED.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    none = ["--generation-config", "none"]

    def generate(*more: str) -> tuple[str, dict[str, Any]]:
        code, out, err = run("generate", "hello", *options, "--json", *more)
        assert (code, err) == (0, "")
        found = last_line(out)
        return found["text"], found["sampling_params"]

    recommended, greedy = generate(), generate(*none)
    assert recommended == generate(*stated, *none)
    assert recommended[1] == RECOMMENDED
    assert greedy[1] == {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert greedy[0] == generate("--temperature", "0", "--repetition-penalty", "1")[0] != recommended[0]
    code, out, err = run("generate", "hello", *options, "--n", "2")  # of greedy answers there is one only
    assert (code, out.startswith(recommended[0].rstrip("\n"))) == (0, True)
    assert "sampling as the model's files recommend: temperature 1.5, top_k 9," in err
    chats = [run("chat", *options, *more, stdin="hello\n")[1] for more in ([], stated, none)]
    assert chats[0] == chats[1] != chats[2]

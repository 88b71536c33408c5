"""Mistakes of users are explained in one sentence: numbers out of range, missing extras, files and prompts."""

from __future__ import annotations

import io
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from commands import run as run
from commands import tiny as tiny
from files import write_gguf

from outpace.cli.options import StructureFlags
from outpace.cli.process import standard_input
from outpace.core.errors import UserError, check_range, check_whole, install_command
from outpace.models.files.cache import new_folder, write_error
from outpace.server.chat_completions import ChatMessage, template_messages
from outpace.server.errors import ApiError
from outpace.server.options import ServerOptions


@pytest.mark.parametrize(
    ("check", "value", "low", "high", "says"),
    [
        (check_whole, -1, 0, 2**63 - 1, "-1, it must be between 0 and 9223372036854775807"),
        (check_whole, 2**63, 0, 2**63 - 1, "9223372036854775808, it must be between 0 and 9223372036854775807"),
        (check_whole, 1.0, 1, 9, "1.0, it must be a whole number, between 1 and 9"),
        (check_whole, "7", 1, 9, "'7', it must be a whole number, between 1 and 9"),
        (check_whole, True, 1, 9, "True, it must be a whole number, between 1 and 9"),
        (check_whole, None, 0, math.inf, "None, it must be a whole number, at least 0"),
        (check_whole, [5] * 100, 1, 9, "[5, 5, 5, 5, 5, 5, ...], it must be a whole number, between 1 and 9"),
        (check_range, 3, 0.01, 2.0, "3, it must be between 0.01 and 2"),
        (check_range, math.nan, 0.0, 1.0, "nan, it must be between 0 and 1"),
        (check_range, "0.5", 0.0, 1.0, "'0.5', it must be a number, between 0 and 1"),
        (check_range, False, 0.0, 1.0, "False, it must be a number, between 0 and 1"),
    ],
)
def test_a_number_out_of_range(check: Any, value: Any, low: float, high: float, says: str) -> None:
    with pytest.raises(UserError) as raised:
        check("seed", value, low, high)
    assert str(raised.value) == f"seed is {says}"


def test_the_command_that_installs_an_extra(tmp_path: Path) -> None:
    assert install_command("server", tmp_path) == "pip install 'outpace[server]'"
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("")
    assert shlex.split(install_command("server", folder)) == ["pip", "install", "-e", f"{folder}[server]"]
    assert shlex.split(install_command("hub"))[-1] == f"{Path(__file__).parents[1]}[hub]"


def test_a_missing_or_invalid_certificate(tmp_path: Path) -> None:
    file = tmp_path / "text.pem"
    with pytest.raises(UserError, match=r"TLS file .*text\.pem cannot be read \(No such file"):
        ServerOptions(ssl_certfile=file, ssl_keyfile=file)
    file.write_text("no certificate")
    with pytest.raises(UserError, match="are not a certificate and its key in PEM format"):
        ServerOptions(ssl_certfile=file, ssl_keyfile=file)


def test_an_unknown_method_for_requests() -> None:
    assert ServerOptions(allow_method=["card", "model+ngram", "greedy"]).allow_method
    with pytest.raises(UserError, match=r"unknown method, drafter or rule 'autoo', .* did you mean 'auto'"):
        ServerOptions(allow_method=["model+ngram", "autoo"])


def test_unreadable_api_keys(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--api-key-file is .*none, which cannot be read \(No such file"):
        ServerOptions(api_key_file=tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"--api-key-file is .*latin, which is not UTF-8 text \(byte 3\)"):
        ServerOptions(api_key_file=tmp_path / "latin")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_that_is_not_text(errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the locale C.UTF-8, which is common in containers, Python keeps such bytes by default."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors=errors))
    with pytest.raises(UserError, match=r"standard input is not text in utf-8 \(byte 3\)"), standard_input() as stream:
        stream.read()


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "file"))
    with (
        pytest.raises(UserError, match=r"cannot be written .*: name another folder by OUTPACE_CACHE$"),
        new_folder(tmp_path / "file" / "drafts" / "one"),
    ):
        pass
    monkeypatch.setenv("OUTPACE_CACHE", "~nobody_of_this_name/cache")
    assert "OUTPACE_CACHE" not in str(write_error(tmp_path / "one", OSError(28, "No space left on device")))


def test_json_schema_takes_a_file() -> None:
    with pytest.raises(UserError, match=r"--json-schema is \{\}, which cannot be read \(No such file"):
        StructureFlags(json_schema="{}").structured_outputs()


@pytest.mark.parametrize("content", [None, []])
def test_a_user_message_without_content(content: list[Any] | None) -> None:
    with pytest.raises(ApiError, match="a user message has no content"):
        template_messages([ChatMessage(role="user", content=content)])
    assert template_messages([ChatMessage(role="user", content=""), ChatMessage(role="assistant")])


def test_a_target_without_a_chat_template(tmp_path: Path, run: Run) -> None:
    path = write_gguf(tmp_path / "plain.gguf", {"tokenizer.chat_template": None})
    for words, says in (
        (["chat"], "plain.gguf has no chat template: `outpace generate --raw`"),
        (["generate", "hi"], "--raw"),
    ):
        code, _, err = run(*words, "--target", str(path))
        assert (code, says in " ".join(err.split())) == (2, True)

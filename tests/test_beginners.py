"""What a beginner gets wrong, and is told in a sentence."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from files import write_gguf

from outpace.api.llm import LLM
from outpace.bench.table_files import make_table
from outpace.cli.sampling_options import Structured
from outpace.cli.standard_streams import reading
from outpace.core.errors import UserError
from outpace.models.files.cache_folder import new_folder, unwritable
from outpace.models.load import Progress
from outpace.server import options
from outpace.server.chat_body import ChatMessage, messages_of
from outpace.server.errors import ApiError
from outpace.server.options import ServerOptions


def test_a_certificate_that_is_missing_or_none(tmp_path: Path) -> None:
    file = tmp_path / "text.pem"
    with pytest.raises(UserError, match=r"text\.pem, for TLS, cannot be read \(No such file"):
        ServerOptions(certificate=file, certificate_key=file)
    file.write_text("no certificate")
    with pytest.raises(UserError, match="are no certificate and its key in PEM"):
        ServerOptions(certificate=file, certificate_key=file)


def test_a_method_that_requests_may_choose_must_be_one() -> None:
    assert ServerOptions(methods=("card", "model+ngram", "greedy")).methods
    with pytest.raises(UserError, match=r"unknown method, drafter or rule 'autoo', .* did you mean 'auto'"):
        ServerOptions(methods=("model+ngram", "autoo"))


def test_keys_that_cannot_be_read_are_told_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none, for API keys, cannot be read \(No such file or directory\)$"):
        options.read_api_keys(tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"latin, for API keys, is not UTF-8 text \(byte 3\)"):
        options.read_api_keys(tmp_path / "latin")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_that_is_no_text(errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The locale C.UTF-8, as containers have it, lets Python keep such bytes."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors=errors))
    with pytest.raises(UserError, match=r"standard input is not text in utf-8 \(byte 3\)"), reading() as stream:
        stream.read()


def test_a_cache_that_cannot_be_written_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "file"))
    with (
        pytest.raises(UserError, match=r"cannot be written .*: name another folder by OUTPACE_CACHE$"),
        new_folder(tmp_path / "file" / "drafts" / "one"),
    ):
        pass
    monkeypatch.setenv("OUTPACE_CACHE", "~nobody_of_this_name/cache")
    assert "OUTPACE_CACHE" not in str(unwritable(tmp_path / "one", OSError(28, "No space left on device")))


def test_a_schema_is_a_file() -> None:
    with pytest.raises(UserError, match=r"--json-schema names a file: \{\} does not exist"):
        Structured(json_schema="{}").asked()


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        (None, "by --drafter cacheback, retrieval or layer_skip"),
        ("foo", "unknown drafter 'foo', allowed are cacheback, layer_skip, retrieval"),
        ("ngram", "not for ngram"),
    ],
)
def test_a_corpus_is_for_some_drafters(drafter: str | None, says: str, tmp_path: Path) -> None:
    def silent(*_: object) -> None:
        pass

    progress: Progress = silent
    with pytest.raises(UserError, match=says):
        make_table(drafter, [tmp_path / "none.txt"], None, None, progress)


@pytest.mark.parametrize("content", [None, []])
def test_a_message_of_the_user_has_content(content: list[Any] | None) -> None:
    with pytest.raises(ApiError, match="a message of the user has no content"):
        messages_of([ChatMessage(role="user", content=content)])
    assert messages_of([ChatMessage(role="user", content=""), ChatMessage(role="assistant")])


def test_arguments_of_an_answer_are_none_of_the_llm() -> None:
    with pytest.raises(UserError, match="max_tokens is an argument of `generate` and of `SamplingParams`, not of LLM"):
        LLM(max_tokens=5)


def test_a_target_without_a_chat_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from outpace.cli.main import main

    path = write_gguf(tmp_path / "plain.gguf", {"tokenizer.chat_template": None})
    for command, says in (("chat", "plain.gguf has no chat template: outpace generate --raw"), ("generate", "--raw")):
        with pytest.raises(SystemExit) as left:
            main([command, *(["hi"] if command == "generate" else []), "--target", str(path)])
        assert left.value.code == 2
        assert says in " ".join(capsys.readouterr().err.split())

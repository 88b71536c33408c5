"""Files of tables: whole, refused or replaced; made by `outpace tune --corpus`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from commands import last_line, run_command
from files import model_folder, smollm2_file

import outpace
from outpace.bench import tune
from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.drafters import cacheback, retrieval
from outpace.models.files import token_tables
from outpace.models.load import load_model

TOKENS = [1, 2, 3, 4, 5, 1, 2, 3]


def context(fingerprint: str) -> BuildContext:
    tokenizer: Any = SimpleNamespace(fingerprint=fingerprint)
    return BuildContext(tokenizer=tokenizer)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    arrays = retrieval.make([TOKENS], 16, retrieval.Options())
    token_tables.write(tmp_path / "store", "retrieval", "mine", arrays)
    return tmp_path / "store"


def test_a_file_is_read_as_it_was_written(file: Path) -> None:
    read = token_tables.read(file, "retrieval", "mine")
    assert read["tokens"].tolist() == [*TOKENS, -1]
    assert all(isinstance(array, np.memmap) for array in read.values())
    assert not read["order"].flags.writeable


def test_every_changed_byte_is_noticed(file: Path) -> None:
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            read = token_tables.read(file, "retrieval", "mine")
        except UserError:
            continue
        assert read["tokens"].tolist() == [*TOKENS, -1], f"byte {place} was read wrongly"


@pytest.mark.parametrize("length", [0, 5, 40, 100, 150, -1])
def test_a_torn_file_is_refused(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(UserError, match="build it again with outpace tune --drafter retrieval"):
        token_tables.read(file, "retrieval", "mine")


def test_a_file_of_another_kind_or_tokenizer_is_refused(file: Path) -> None:
    with pytest.raises(UserError, match="tables of drafter retrieval, not of cacheback"):
        token_tables.read(file, "cacheback", "mine")
    with pytest.raises(UserError, match="another tokenizer than the target's"):
        token_tables.read(file, "retrieval", "another")
    options = retrieval.Options(datastore=str(file))
    with pytest.raises(UserError, match="another tokenizer"):
        retrieval.build(options, given=context("another"))
    assert retrieval.build(options, given=context("mine")).name == "retrieval"


def test_a_missing_file_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    given = context("mine")
    with pytest.raises(UserError, match="needs a datastore: make one with outpace tune --drafter retrieval"):
        retrieval.build(retrieval.Options(), given=given)
    with pytest.raises(UserError, match="cannot be read"):
        cacheback.build(cacheback.Options(table=str(tmp_path / "none")), given=given)
    assert cacheback.build(cacheback.Options(), given=given)._frozen is None


def test_the_users_file_is_preferred_to_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(token_tables, "SHIPPED", tmp_path)
    given = context("mine")
    for folder, token in ((tmp_path, 5), (tmp_path / "cache" / "tables", 7)):
        folder.mkdir(parents=True, exist_ok=True)
        arrays = cacheback.make([[token, 1, 2, 3]], 16, cacheback.Options())
        token_tables.write(folder / token_tables.file_name("cacheback", "mine"), "cacheback", "mine", arrays)
        frozen = cacheback.build(cacheback.Options(), given=given)._frozen
        assert frozen is not None
        assert frozen.followers(token) == [(1, 2, 3)]
    assert cacheback.build(cacheback.Options(table="none"), given=given)._frozen is None
    assert cacheback.build(cacheback.Options(), given=context("another"))._frozen is None


def test_the_shipped_table_is_for_the_shipped_model() -> None:
    """It is complete, and drafts before any text was read."""
    smollm2_file()
    given = BuildContext(tokenizer=load_model(None).tokenizer)
    frozen = cacheback.build(cacheback.Options(), given=given)._frozen
    assert frozen is not None
    [of, the] = given.tokenizer.encode(" of the")
    phrases = frozen.followers(of)
    assert len(phrases) == 8
    assert any(phrase[0] == the for phrase in phrases)


def test_a_file_is_replaced_whole_or_not_at_all(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, before = token_tables.read(file, "retrieval", "mine"), file.read_bytes()
    arrays = retrieval.make([[7, 8, 9] * 10], 16, retrieval.Options())

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(UserError, match="cannot be written"):
            token_tables.write(file, "retrieval", "mine", arrays)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]
    token_tables.write(file, "retrieval", "mine", arrays)
    assert token_tables.read(file, "retrieval", "mine")["tokens"][0] == 7
    assert opened["tokens"].tolist() == [*TOKENS, -1], "an open file keeps its content"


# outpace tune --corpus


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models"), "target", 0)


@pytest.mark.parametrize("drafter", ["cacheback", "retrieval"])
def test_a_drafter_uses_the_file_made_for_it(
    drafter: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    with outpace.load(tiny, method="autoregressive") as llm:
        plain = llm.generate("hello", max_tokens=40, ignore_eos=True)[0]
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("hello" + plain.text, encoding="utf-8")
    lines.write_text(json.dumps({"text": "hello world"}) + "\n" + json.dumps({"turns": ["12 12", "hello"]}) + "\n")
    words = ("tune", "--target", tiny, "--drafter", drafter, "--corpus", text, "--corpus", lines)
    code, out, _ = run_command(*words, "--json")
    assert code == 0
    made = last_line(out)
    assert (made["drafter"], made["texts"], made["bytes"]) == (drafter, 4, Path(made["path"]).stat().st_size)
    with outpace.load(tiny, method="speculative", drafter=drafter) as llm:
        found = llm.generate("hello", max_tokens=40, ignore_eos=True)[0]
    assert found.tokens == plain.tokens
    assert found.figures.accepted > 0
    other = tmp_path / "other.tables"
    code, _, err = run_command(*words, "--to", other)
    assert (code, f"tokens of 4 texts, {made['bytes'] / 1000:.1f} KB, for" in err) == (0, True)
    assert other.read_bytes() == Path(made["path"]).read_bytes()


def test_another_tokenizers_file_is_refused_by_the_library(tiny: Path, file: Path) -> None:
    with pytest.raises(UserError, match="another tokenizer"):
        outpace.load(tiny, method="speculative", drafter="retrieval", datastore=str(file))


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        (b"hello world", ["--drafter", "ngram"], "cacheback, retrieval or layer_skip, not for ngram"),
        (b"hello world", ["--drafter", "foo"], "unknown drafter 'foo', allowed are block, cacheback"),
        (b"hello world", [], "say which, by --drafter cacheback, retrieval or layer_skip"),
        (b"", ["--drafter", "retrieval"], "is empty"),
        (b" \n", ["--drafter", "retrieval"], "is empty"),
        (b"\xff\xfe", ["--drafter", "retrieval"], "not UTF-8"),
        (b"h", ["--drafter", "cacheback"], "no text of more than 3 tokens"),
        (None, ["--drafter", "retrieval"], "does not exist"),
        (b"hello world", ["--drafter", "retrieval", "--to", "/no/such/folder/x"], "there is no folder"),
    ],
)
def test_a_bad_corpus_is_one_sentence(
    content: bytes | None,
    words: list[str],
    said: str,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "corpus.txt"
    if content is not None:
        file.write_bytes(content)
    code, _, err = run_command("tune", "--target", tiny, "--corpus", file, *words)
    assert (code, said in err) == (2, True), err
    assert not (tmp_path / "cache" / "tables").exists() or not list((tmp_path / "cache" / "tables").iterdir())


@pytest.mark.parametrize("line", ["{", "7", "{}", '{"turns": []}', '{"text": 7}'])
def test_an_invalid_line_is_named(line: str, tmp_path: Path) -> None:
    """Only a line feed ends a line of JSON; a text may contain other line breaks."""
    texts, file = ["one\u2028two", "three\x85four", "five\x0c"], tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    assert tune.texts_of([file]) == texts
    with file.open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(UserError, match="line 4"):
        tune.texts_of([file])

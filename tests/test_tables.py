"""Drafters with lookup tables: the tables equal slow searches and stay within their bounds; tables in files."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from commands import last_line, run_command
from files import model_folder, smollm2_file
from light import grown

import outpace
from outpace.bench import tune
from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters import build_drafter, cacheback, retrieval, suffix
from outpace.drafters._phrases import PhraseTable
from outpace.models.files import token_tables
from outpace.models.load import load_model
from outpace.rules.greedy import Greedy


def request(prompt: Sequence[int]) -> Request:
    return Request(tuple(prompt), Greedy(), 50)


def some_texts(chance: random.Random, count: int = 4) -> list[list[int]]:
    return [[chance.randrange(4) for _ in range(chance.randrange(60))] for _ in range(count)] + [[1, 2, 3, 0, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_the_datastore_finds_the_longest_matches(seed: int) -> None:
    chance = random.Random(seed)
    texts = some_texts(chance)
    store = retrieval.Datastore(retrieval.make(texts, 16, retrieval.Options()))
    flat = [token for text in texts for token in (*text, -1)]
    text = [chance.randrange(4) for _ in range(20)]
    lengths = []
    for place in range(1, len(flat)):
        length = 0
        while length < min(place, 16) and flat[place - length - 1] == text[-length - 1]:
            length += 1
        if length and flat[place] != -1:
            lengths.append(length)
    found = list(store.matches(text, 9, 1, 16))
    assert [length for length, _ in found] == sorted(lengths, reverse=True)[:9]
    for length, place in found:
        assert flat[place - length : place] == text[len(text) - length :]
        behind = flat[place : place + 5]
        assert store.after(place, 5) == (behind[: behind.index(-1)] if -1 in behind else behind)


@pytest.mark.parametrize("seed", range(10))
def test_a_table_holds_the_latest_phrases_of_the_latest_leaders(seed: int) -> None:
    """The table equals a list of the five latest leaders, each with its three latest phrases."""
    chance, table = random.Random(seed), PhraseTable(5, 3)
    known: list[tuple[int, list[Any]]] = []  # leaders with their phrases, both latest first
    for _ in range(300):
        leader, phrase = chance.randrange(8), (chance.randrange(3), chance.randrange(3), 0)
        table.learn(leader, phrase)
        before = dict(known).get(leader, [])
        phrases = [phrase, *(one for one in before if one != phrase)][:3]
        known = [(leader, phrases), *(entry for entry in known if entry[0] != leader)][:5]
        assert [table.followers(number) for number in range(8)] == [dict(known).get(number, []) for number in range(8)]
        assert len(table) <= 15


def test_a_table_is_bounded_over_many_tokens() -> None:
    drafter = cacheback.CachebackDrafter(cacheback.Options(leaders=64, followers=4), None)
    chance, state = random.Random(0), drafter.open(request([1]))
    for turn in range(1000):
        written = [chance.randrange(500) for _ in range(100)]
        root = TokenTree(written[-1], turn + 1, turn + 2)
        drafter.observe(state, Observation([turn], written, root))
        assert len(state.table) <= 64 * 4
        assert len(state.last) <= 3


def test_followers_of_followers_are_offered_to_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cacheback, "_MIN_CHANCE", 0.0)
    drafter = cacheback.CachebackDrafter(cacheback.Options(), None)
    drafter.close(drafter.open(request([1, 2, 3, 4, 5, 6, 7, 1])))
    tree = TokenTree(1)
    drafter.grow([drafter.open(request([9, 1]))], [tree])
    assert tree.tokens[1:7] == [2, 3, 4, 5, 6, 7]
    assert tree.parents[1:7] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(6))
def test_the_frozen_table_equals_counting(seed: int) -> None:
    texts = some_texts(random.Random(seed), 12)
    arrays = cacheback.make(texts, 16, cacheback.Options(leaders=3, followers=5))
    counts = Counter(tuple(text[place : place + 4]) for text in texts for place in range(len(text) - 3))
    leaders: Counter[int] = Counter()
    for window, count in counts.items():
        leaders[window[0]] += count
    frozen = cacheback.Frozen(arrays)
    kept = [token for token in range(16) if frozen.followers(token)]
    assert len(kept) == min(3, len(leaders))
    assert sum(leaders[token] for token in kept) == sum(count for _, count in leaders.most_common(3))
    for token in kept:
        mine = sorted((count for window, count in counts.items() if window[0] == token), reverse=True)[:5]
        assert [counts[(token, *phrase)] for phrase in frozen.followers(token)] == mine


@pytest.mark.parametrize("module", [cacheback, retrieval])
@pytest.mark.parametrize("texts", [[], [[]], [[1]], [[1], [2], []]])
def test_a_corpus_of_short_texts_is_refused(module: Any, texts: list[list[int]]) -> None:
    with pytest.raises(UserError, match="the corpus has no text of more than"):
        module.make(texts, 16, module.Options())


@pytest.mark.parametrize(
    ("module", "options", "said"),
    [
        (cacheback, {"leaders": 0}, "leaders is 0"),
        (retrieval, {"branches": 65}, "branches is 65"),
    ],
)
def test_options_out_of_bounds_are_refused(module: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        module.Options(**options)


OFFERED: dict[str, Any] = {"cacheback": cacheback, "retrieval": retrieval, "suffix": suffix}


@pytest.mark.parametrize("name", OFFERED)
@pytest.mark.parametrize("offered", [1, 2, 5, 16])
def test_a_round_proposes_at_most_the_offered_number(name: str, offered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds however often the decoder asks in a round."""
    chance, vocab = random.Random(3), 16
    texts = [[chance.randrange(4) for _ in range(300)] for _ in range(3)]
    module = OFFERED[name]
    monkeypatch.setattr(module, "_OFFERED", offered)
    monkeypatch.setattr(module, "_MIN_CHANCE", 0.0)
    options = module.Options(branches=4)
    if name == "retrieval":
        drafter = retrieval.RetrievalDrafter(options, retrieval.Datastore(retrieval.make(texts, vocab, options)))
    else:
        drafter = build_drafter(name, BuildContext(), vars(options))
    state, tree = drafter.open(request(texts[0])), TokenTree(texts[0][-1])
    added = [grown(drafter, state, tree) for _ in range(3)]
    assert sum(added) == len(tree) - 1 == offered


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

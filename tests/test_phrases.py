"""Phrases that are kept between runs: the same again, replaced as a whole, refused where torn or of another kind."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from doubles import QuickToy, decode, make_request, write
from test_matrix import Letters

from outpace.card.inline import InlineWorker
from outpace.card.thread import ThreadWorker
from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.drafters import build_drafter, cacheback, lookahead, ouroboros
from outpace.drafters._phrases import PhraseTable, PhraseTables
from outpace.engine.engine import Engine, EngineOptions

TARGET = QuickToy(16, 3, 0)
GIVEN = BuildContext(TARGET, TARGET, Letters(), Letters())
WIDE = EngineOptions(nodes=64, rows=512)
KEEPERS = ("cacheback", "lookahead", "ouroboros")


class OtherLetters(Letters):
    fingerprint = "other letters"


def test_a_table_comes_back_as_it_was() -> None:
    chance, table, again = random.Random(0), PhraseTable(20, 3), PhraseTable(20, 3)
    for _ in range(500):
        table.learn(chance.randrange(30), tuple(chance.randrange(9) for _ in range(chance.randrange(1, 5))))
    again.load_arrays(table.arrays())
    assert [again.followers(lead) for lead in range(30)] == [table.followers(lead) for lead in range(30)]
    for held in (table, again):
        held.learn(99, (1,))
    assert [again.followers(lead) for lead in range(30)] == [table.followers(lead) for lead in range(30)]


def test_an_empty_table_comes_back(tmp_path: Path) -> None:
    for _ in range(2):
        kept = PhraseTables(4, 4, str(tmp_path / "phrases"), GIVEN)
        assert len(kept.shared) == 0
        kept.save()


@pytest.mark.parametrize("name", KEEPERS)
def test_the_next_run_begins_with_what_was_learnt(tmp_path: Path, name: str) -> None:
    asked, rounds = make_request((3, 1, 4), max_tokens=60), []
    for _ in range(2):
        drafter = build_drafter(name, GIVEN, {"phrases": str(tmp_path / "phrases")})
        outcome = decode([asked], "speculative", drafter, target=TARGET, engine=WIDE)
        assert outcome.texts == [write(TARGET, asked)]
        rounds.append(len(outcome.steps[0]))
    assert rounds[1] < rounds[0]
    assert [file.name for file in tmp_path.iterdir()] == ["phrases"]


@pytest.mark.parametrize("name", KEEPERS)
def test_nothing_is_kept_unless_it_is_asked_for(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Engine(TARGET, build_drafter(name, GIVEN, {})):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [ThreadWorker, InlineWorker])
def test_a_worker_keeps_them_too(tmp_path: Path, make: Any) -> None:
    drafter = build_drafter("cacheback", GIVEN, {"phrases": str(tmp_path / "phrases")})
    with Engine(TARGET, worker=make(drafter).start()):
        pass
    assert (tmp_path / "phrases").is_file()


@pytest.mark.parametrize("name", KEEPERS)
def test_phrases_of_another_tokenizer_are_refused(tmp_path: Path, name: str) -> None:
    where = {"phrases": str(tmp_path / "phrases")}
    with Engine(TARGET, build_drafter(name, GIVEN, where)):
        pass
    kept = (tmp_path / "phrases").read_bytes()
    with pytest.raises(UserError, match="another tokenizer than the target's; delete it"):
        build_drafter(name, GIVEN._replace(tokenizer=OtherLetters()), where)
    assert (tmp_path / "phrases").read_bytes() == kept


@pytest.mark.parametrize("kept", [0, 10, 40, 200, -1, None])
def test_a_damaged_file_is_refused_and_stays(tmp_path: Path, kept: int | None) -> None:
    """`kept`: where the file is cut off; None: a byte near its end is changed instead."""
    path = tmp_path / "phrases"
    drafter = build_drafter("cacheback", GIVEN, {"phrases": str(path)})
    drafter.open(make_request(tuple(range(12))))
    drafter.capabilities.save()
    damaged = bytearray(path.read_bytes()[:kept])
    if kept is None:
        damaged[-3] ^= 1
    path.write_bytes(damaged)
    says = "its checksum is wrong" if kept is None else "delete it, and the phrases are learnt again"
    with pytest.raises(UserError, match=says):
        build_drafter("cacheback", GIVEN, {"phrases": str(path)})
    assert path.read_bytes() == damaged


def test_a_frozen_table_is_no_file_of_phrases(tmp_path: Path) -> None:
    from outpace.models.files import token_tables

    arrays = cacheback.make([[1, 2, 3, 4, 5]], 16, cacheback.Options())
    token_tables.write(tmp_path / "table", "cacheback", Letters.fingerprint, arrays)
    with pytest.raises(UserError, match="holds the tables of drafter cacheback, not of phrases"):
        lookahead.build(lookahead.Options(phrases=str(tmp_path / "table")), given=GIVEN)


@pytest.mark.parametrize(
    ("given", "path", "said"),
    [
        (GIVEN, "nowhere/phrases", "there is no folder"),
        (GIVEN._replace(tokenizer=None), "phrases", "the target's is not known here"),
    ],
)
def test_a_place_where_nothing_can_be_kept_is_refused(
    tmp_path: Path, given: BuildContext, path: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        ouroboros.build(ouroboros.Options(phrases=str(tmp_path / path)), given=given)


def test_a_folder_that_cannot_be_written_when_it_ends_costs_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    drafter = build_drafter("cacheback", GIVEN, {"phrases": str(folder / "phrases")})
    engine = Engine(TARGET, drafter)
    folder.rmdir()
    folder.write_text("a file")
    with pytest.warns(UserWarning, match="cannot be written"):
        engine.close()

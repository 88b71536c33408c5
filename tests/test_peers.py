"""Other engines as peers: the text of our own plain decoding where precision is the same, and counts that add up."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from files import model_folder

from outpace.bench import contenders
from outpace.bench.peer import PeerSettings, TimedAnswer
from outpace.bench.peers import _rounds
from outpace.bench.peers._rounds import RoundRecorder
from outpace.core.errors import UserError
from outpace.models.base import chain
from outpace.models.load import load_model

PACKAGES = {"transformers": "transformers", "llama_cpp": "llama_cpp"}
DRAFTING = ("transformers_assisted", "transformers_lookup", "llama_cpp_lookup", "llama_cpp_draft")
WITH_DRAFT = ("transformers_assisted", "llama_cpp_draft")
PROMPT = (1, 40, 41, 42, 43, 40, 41, 42)
TOKENS = 24


def package(name: str) -> str:
    """What a peer needs."""
    return next(package for start, package in PACKAGES.items() if name.startswith(start))


def open_peer(name: str, settings: PeerSettings) -> Any:
    """A peer that closes itself; skips where its package is not installed."""
    pytest.importorskip(package(name), reason=f"the peer {name} is not installed")
    return closing(contenders.find_peer(name).build(settings))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a model that knows nothing of it."""
    where = tmp_path_factory.mktemp("models")
    return model_folder(where, "target"), model_folder(where, "other", seed=5)


@pytest.fixture
def settings(folders: tuple[Path, Path]) -> PeerSettings:
    """The target is its own draft."""
    return PeerSettings(folders[0], folders[0], frozenset(), 1, 100)


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> tuple[int, ...]:
    """Greedy, one token a pass, on our own torch runtime."""
    model = load_model(folders[0], runtime="llama").model
    text = list(PROMPT)
    session = model.open(100, 100)
    rows = model.score([chain(session, text, wanted=[len(text) - 1])])
    for _ in range(TOKENS):
        session.keep(range(session.pending))
        text.append(int(rows[-1].argmax()))
        rows = model.score([chain(session, text[-1:], wanted=[0])])
    return tuple(text[len(PROMPT) :])


def check(answer: TimedAnswer, num_tokens: int) -> None:
    """What holds of every answer."""
    assert len(answer.tokens) == sum(answer.counts) == num_tokens
    assert len(answer.arrivals) == len(answer.counts)
    assert list(answer.arrivals) == sorted(answer.arrivals)
    assert 0 < answer.first_token == answer.arrivals[0] <= answer.arrivals[-1] <= answer.seconds
    if answer.drafted is None:
        assert set(answer.counts) == {1}
        assert answer.accepted is None
        assert answer.by_position == ()
    else:
        assert 0 <= answer.accepted <= answer.drafted
        assert answer.accepted + len(answer.counts) >= num_tokens >= answer.accepted


FLOAT32 = [name for name in contenders.peer_names() if package(name) != "llama_cpp"]


@pytest.mark.parametrize("name", FLOAT32)
def test_in_float32_the_text_is_that_of_plain_decoding(
    name: str, settings: PeerSettings, plain: tuple[int, ...]
) -> None:
    with open_peer(name, settings) as peer:
        answer = peer.answer(PROMPT, TOKENS)
        again = peer.answer(PROMPT, TOKENS)
    assert (peer.name, peer.precision) == (name, "float32")
    check(answer, TOKENS)
    assert (answer.drafted is not None) == (name in DRAFTING)
    assert answer.tokens == again.tokens == plain


@pytest.mark.parametrize("name", contenders.peer_names())
def test_an_answer_ends_with_a_stop_token_and_says_no_more(
    name: str, settings: PeerSettings, plain: tuple[int, ...]
) -> None:
    with open_peer(name, settings) as peer:
        text = peer.answer(PROMPT, TOKENS).tokens
    stop = next(token for place, token in enumerate(text) if place >= TOKENS // 2 and token not in text[:place])
    with open_peer(name, replace(settings, stop_ids=frozenset([stop, 271]))) as peer:
        answer = peer.answer(PROMPT, TOKENS)
    check(answer, text.index(stop) + 1)
    assert answer.tokens == text[: text.index(stop) + 1]


@pytest.mark.parametrize("name", WITH_DRAFT)
def test_what_a_draft_is_worth_is_counted(name: str, settings: PeerSettings, folders: tuple[Path, Path]) -> None:
    with open_peer(name, settings) as peer:
        perfect = peer.answer(PROMPT, TOKENS)
    with open_peer(name, replace(settings, draft=folders[1])) as peer:
        useless = peer.answer(PROMPT, TOKENS)
    for answer in (perfect, useless):
        check(answer, TOKENS)
    assert perfect.tokens == useless.tokens
    assert perfect.accepted >= perfect.drafted - 2  # the last round may be cut
    assert min(perfect.by_position[:2]) > 0.8
    assert len(perfect.counts) < 0.6 * TOKENS
    assert useless.drafted > useless.accepted
    assert useless.by_position[0] < 0.5


@pytest.mark.parametrize("name", ["transformers_lookup", "llama_cpp_lookup"])
def test_a_text_that_repeats_itself_is_looked_up(name: str, settings: PeerSettings) -> None:
    with open_peer(name, settings) as peer:
        answer = peer.answer(PROMPT * 4, TOKENS)
    check(answer, TOKENS)
    assert answer.drafted > 0
    assert len(answer.by_position) > 0


def test_llama_cpp_writes_what_float32_writes(settings: PeerSettings, plain: tuple[int, ...]) -> None:
    pytest.importorskip("llama_cpp")
    from outpace.bench.peers.llama_cpp import LlamaCpp

    with closing(LlamaCpp("exact", settings, "F32")) as peer:
        answer = peer.answer(PROMPT, TOKENS)
    check(answer, TOKENS)
    assert answer.tokens == plain  # its keys and values are float16, which these models bear


def test_llama_cpp_writes_the_same_with_drafts_as_without(settings: PeerSettings) -> None:
    texts = set()
    for name in ("llama_cpp", "llama_cpp_lookup", "llama_cpp_draft"):
        with open_peer(name, settings) as peer:
            texts.add(peer.answer(PROMPT, TOKENS).tokens)
            assert peer.precision == "Q8_0"
    assert len(texts) == 1


@pytest.mark.parametrize("name", contenders.peer_names())
def test_a_missing_package_is_told_with_what_installs_it(
    name: str, settings: PeerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    hidden: Callable[..., Any] = lambda module, *rest: None if module == package(name) else found(module, *rest)  # noqa: E731
    monkeypatch.setattr(_rounds.importlib.util, "find_spec", hidden)
    with pytest.raises(UserError, match=rf"peer {name} is not installed: run `pip install "):
        contenders.find_peer(name).build(settings)


@pytest.mark.parametrize("name", contenders.peer_names())
def test_a_file_says_what_its_peer_is_and_where_it_comes_from(name: str) -> None:
    lines = (contenders.find_peer(name).__doc__ or "").splitlines()
    assert lines[0].endswith(".")
    assert not lines[1]
    assert any(word in lines[2] for word in ("arXiv", "http", "20"))


@pytest.mark.parametrize("name", WITH_DRAFT)
@pytest.mark.parametrize(("draft", "reason"), [(None, "needs a draft"), ("layers:0", "cannot make the draft layers:0")])
def test_a_draft_that_is_none_is_told(name: str, draft: str | None, reason: str, settings: PeerSettings) -> None:
    pytest.importorskip(package(name))
    with pytest.raises(UserError, match=rf"peer {name} {reason}"):
        contenders.find_peer(name).build(replace(settings, draft=draft))


@pytest.mark.parametrize("name", contenders.peer_names())
def test_a_prompt_that_does_not_fit_is_told(name: str, settings: PeerSettings) -> None:
    with open_peer(name, settings) as peer:
        with pytest.raises(UserError, match=f"peer {name} was given 8 tokens of prompt and 93 of answer"):
            peer.answer(PROMPT, 93)
        with pytest.raises(UserError, match="0 tokens of prompt"):
            peer.answer((), 5)
        check(peer.answer(PROMPT, 3), 3)


@pytest.mark.parametrize("name", contenders.peer_names())
def test_a_target_that_is_none_is_told(name: str, settings: PeerSettings, tmp_path: Path) -> None:
    pytest.importorskip(package(name))
    with pytest.raises(UserError, match="nowhere"):
        contenders.find_peer(name).build(replace(settings, target=tmp_path / "nowhere"))


def test_threads_are_given_back(settings: PeerSettings) -> None:
    before = torch.get_num_threads()
    with open_peer("transformers", replace(settings, threads=before + 1)) as peer:
        peer.answer(PROMPT, 2)
    assert torch.get_num_threads() == before


def written(rounds: RoundRecorder, *texts: tuple[list[int], list[int] | None]) -> TimedAnswer:
    for tokens, drafts in texts:
        rounds.begin(drafts)
        for token in tokens:
            rounds.write(token)
    return rounds.finish()


def test_rounds_are_counted() -> None:
    answer = written(
        RoundRecorder(frozenset([9]), 20), ([1, 2, 3], [1, 2]), ([4], [5, 6]), ([6, 7], [6, 8]), ([5, 9, 4], [5, 9])
    )
    assert answer.tokens == (1, 2, 3, 4, 6, 7, 5, 9)
    assert answer.counts == (3, 1, 2, 2)
    assert (answer.drafted, answer.accepted) == (8, 5)
    assert answer.by_position == (3 / 4, 2 / 3)


def test_an_answer_is_cut_at_its_length() -> None:
    rounds = RoundRecorder(frozenset(), 4)
    answer = written(rounds, ([1, 2, 3], None), ([4, 5], None), ([6], None))
    assert answer.tokens == (1, 2, 3, 4)
    assert answer.counts == (3, 1)
    assert (answer.drafted, answer.accepted, answer.by_position) == (None, None, ())
    assert rounds.is_over


def test_positions_that_no_round_reached_have_no_figure() -> None:
    for rounds, rates in (((([1], [2, 3, 4]), ([2], [])), (0.0,)), ((([1, 2], [1]), ([3], [4, 5])), (0.5,))):
        assert written(RoundRecorder(frozenset(), 9), *rounds).by_position == rates
    empty = written(RoundRecorder(frozenset(), 9))
    assert empty.first_token == empty.seconds

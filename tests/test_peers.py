"""Other engines as peers: they write plain decoding's text in the same precision, and their counts add up."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from files import model_folder

from outpace.api.llm import load
from outpace.bench import contenders
from outpace.bench.peer import PeerSettings, TimedAnswer
from outpace.bench.peers import _rounds
from outpace.bench.peers._rounds import RoundRecorder
from outpace.bench.peers.llama_cpp import LlamaCpp
from outpace.core.errors import UserError
from outpace.core.stats import rates
from outpace.models.files.gguf.writer import gguf_file

PACKAGES = {"transformers": "transformers", "llama_cpp": "llama_cpp"}
DRAFTING = ("transformers_assisted", "transformers_lookup", "llama_cpp_lookup", "llama_cpp_draft")
WITH_DRAFT = ("transformers_assisted", "llama_cpp_draft")
PROMPT = (1, 40, 41, 42, 43, 40, 41, 42)
TOKENS = 24


def package(name: str) -> str:
    """Return the package that a peer needs."""
    return next(package for start, package in PACKAGES.items() if name.startswith(start))


def open_peer(name: str, settings: PeerSettings) -> Any:
    """Open a peer that closes itself; skip the test if its package is not installed."""
    pytest.importorskip(package(name), reason=f"the peer {name} is not installed")
    return closing(contenders.find_peer(name).build(settings))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and an unrelated model."""
    where = tmp_path_factory.mktemp("models")
    return model_folder(where, "target"), model_folder(where, "other", seed=5)


@pytest.fixture
def settings(folders: tuple[Path, Path]) -> PeerSettings:
    """The target is its own draft."""
    return PeerSettings(folders[0], folders[0], frozenset(), 1, 100)


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> tuple[int, ...]:
    """Greedy, by our own torch runtime."""
    with load(folders[0], runtime="llama", method="autoregressive") as llm:
        return llm.generate([list(PROMPT)], max_tokens=TOKENS, ignore_eos=True)[0].tokens


def check(answer: TimedAnswer, num_tokens: int) -> None:
    """Check what is true of every answer."""
    assert len(answer.tokens) == sum(answer.counts) == num_tokens
    assert len(answer.arrivals) == len(answer.counts)
    assert list(answer.arrivals) == sorted(answer.arrivals)
    assert 0 < answer.first_token == answer.arrivals[0] <= answer.arrivals[-1] <= answer.seconds
    if answer.drafted is None:
        assert set(answer.counts) == {1}
        assert (answer.accepted, answer.positions) == (None, ())
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
def test_accepted_drafts_are_counted(name: str, settings: PeerSettings, folders: tuple[Path, Path]) -> None:
    with open_peer(name, settings) as peer:
        perfect = peer.answer(PROMPT, TOKENS)
    with open_peer(name, replace(settings, draft=folders[1])) as peer:
        useless = peer.answer(PROMPT, TOKENS)
    for answer in (perfect, useless):
        check(answer, TOKENS)
    assert perfect.tokens == useless.tokens
    assert perfect.accepted >= perfect.drafted - 2  # the last round may be cut
    assert min(rates(perfect.positions)[:2]) > 0.8
    assert len(perfect.counts) < 0.6 * TOKENS
    assert useless.drafted > useless.accepted
    assert rates(useless.positions)[0] < 0.5


def test_llama_cpp_writes_what_float32_writes(settings: PeerSettings, plain: tuple[int, ...]) -> None:
    pytest.importorskip("llama_cpp")
    exact = replace(settings, target=str(gguf_file(settings.target, "F32")))
    with closing(LlamaCpp("exact", exact)) as peer:
        answer = peer.answer(PROMPT, TOKENS)
    check(answer, TOKENS)
    assert answer.tokens == plain  # its keys and values are float16, which these models bear


@pytest.mark.parametrize("name", contenders.peer_names())
def test_a_missing_package_is_named_with_its_install_command(
    name: str, settings: PeerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_rounds, "find_spec", lambda module: None)
    with pytest.raises(UserError, match=rf"peer {name} is not installed: run `pip install "):
        contenders.find_peer(name).build(settings)


@pytest.mark.parametrize("name", WITH_DRAFT)
@pytest.mark.parametrize(("draft", "reason"), [(None, "needs a draft"), ("layers:0", "cannot make the draft layers:0")])
def test_a_wrong_draft_is_refused(name: str, draft: str | None, reason: str, settings: PeerSettings) -> None:
    pytest.importorskip(package(name))
    with pytest.raises(UserError, match=rf"peer {name} {reason}"):
        contenders.find_peer(name).build(replace(settings, draft=draft))


@pytest.mark.parametrize("name", contenders.peer_names())
def test_a_prompt_that_does_not_fit_is_refused(name: str, settings: PeerSettings) -> None:
    with open_peer(name, settings) as peer:
        with pytest.raises(UserError, match=f"peer {name} was given 8 tokens of prompt and 93 of answer"):
            peer.answer(PROMPT, 93)
        with pytest.raises(UserError, match="0 tokens of prompt"):
            peer.answer((), 5)
        check(peer.answer(PROMPT, 3), 3)


@pytest.mark.parametrize("name", contenders.peer_names())
def test_a_missing_target_is_refused(name: str, settings: PeerSettings, tmp_path: Path) -> None:
    pytest.importorskip(package(name))
    with pytest.raises(UserError, match="nowhere"):
        contenders.find_peer(name).build(replace(settings, target=tmp_path / "nowhere"))


Rounds = list[tuple[list[int], list[int] | None]]  # tokens, drafts
DRAFTED: Rounds = [([1, 2, 3], [1, 2]), ([4], [5, 6]), ([6, 7], [6, 8]), ([5, 9, 4], [5, 9]), ([7], [])]


@pytest.mark.parametrize(
    ("rounds", "max_tokens", "tokens", "counts", "accepted", "positions"),
    [
        (DRAFTED, 20, (1, 2, 3, 4, 6, 7, 5, 9), (3, 1, 2, 2), (8, 5), ((4, 3), (3, 2))),  # until the stop token 9
        ([([1, 2, 3], None), ([4, 5], None), ([6], None)], 4, (1, 2, 3, 4), (3, 1), (None, None), ()),
        ([([1], [2, 3, 4]), ([2], [])], 9, (1, 2), (1, 1), (3, 0), ((1, 0),)),  # no round reaches a second position
        ([([1, 2], [1]), ([3], [4, 5])], 9, (1, 2, 3), (2, 1), (3, 1), ((2, 1),)),
        ([], 9, (), (), (None, None), ()),
    ],
)
def test_rounds_are_recorded(
    rounds: Rounds, max_tokens: int, tokens: Any, counts: Any, accepted: Any, positions: Any
) -> None:
    recorder = RoundRecorder(frozenset([9]), max_tokens)
    for written, drafts in rounds:
        recorder.begin(drafts)
        recorder.write(*written)
    answer = recorder.finish()
    assert (answer.tokens, answer.counts, answer.positions) == (tokens, counts, positions)
    assert (answer.drafted, answer.accepted) == accepted
    assert recorder.is_over == (9 in tokens or len(tokens) == max_tokens)
    assert answer.first_token == (answer.arrivals[0] if tokens else answer.seconds)

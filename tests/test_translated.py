"""A draft with another tokenizer: the same text by every method and rule, tokens in common, what is cut anew."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from files import CONFIG, folder_of, model_folder, weights, write_checkpoint
from light import grown
from test_tokenizer import sentence_piece
from toy import Toy
from turns import in_turn

import outpace
from outpace.api.params import SamplingParams
from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters import translated
from outpace.drafters.translated import shared_tokens
from outpace.engine.build import find_rule
from outpace.models.base import Model
from outpace.models.load import Loaded, load_model
from outpace.models.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "hello world 12 hello world 12"}]
SAMPLED = {"temperature": 0.9, "seed": 3, "top_k": 40}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target; the same model with its ids shuffled; and one that knows fewer merges, so that it cuts otherwise."""
    where = tmp_path_factory.mktemp("models")
    target = model_folder(where, "target", 0)
    return {
        "target": target,
        "shuffled": _other(where / "shuffled", target, 0),
        "finer": _other(where / "finer", target, 4),
    }


def _other(where: Path, target: Path, merges_less: int) -> Path:
    """The target under other ids, its first ones moved by 40; without its last merges."""
    spec = json.loads((target / "tokenizer.json").read_text())
    size = CONFIG["vocab_size"]
    new = {old: (old + 40) % size for old in range(size)}
    spec["model"]["vocab"] = {word: new[old] for word, old in spec["model"]["vocab"].items()}
    for token in spec["added_tokens"]:
        token["id"] = new[token["id"]]
    spec["model"]["merges"] = spec["model"]["merges"][: len(spec["model"]["merges"]) - merges_less]
    tensors = {name: torch.from_numpy(value) for name, value in weights(0).items()}
    order = np.argsort([new[old] for old in range(size)])
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][torch.from_numpy(order)].contiguous()
    write_checkpoint(where, CONFIG, tensors)
    for name in ("tokenizer_config.json", "generation_config.json"):
        fields = json.loads((target / name).read_text())
        ids = {
            key: [new[i] for i in v] if isinstance(v, list) else new[v]
            for key, v in fields.items()
            if "token_id" in key
        }
        (where / name).write_text(json.dumps(fields | ids))
    (where / "tokenizer.json").write_text(json.dumps(spec))
    return where


def load(folders: dict[str, Path], draft: str, **options: Any) -> outpace.LLM:
    return outpace.load(folders["target"], str(folders[draft]), drafter="translated", dtype="float32", **options)


@pytest.mark.parametrize(
    ("draft", "method", "sampling"), in_turn(["shuffled", "finer"], ["speculative", "auto", "card"], [SAMPLED, {}])
)
def test_the_text_is_plain_decodings(
    folders: dict[str, Path], draft: str, method: str, sampling: dict[str, Any]
) -> None:
    options = {"worker": "inline"} if method == "card" else {}
    with load(folders, draft, method=method, **options) as llm:
        asked = {"max_tokens": 40, "ignore_eos": True, **sampling}
        plain = llm.generate([CHAT, "hello"], plain=True, **asked)
        found = llm.generate([CHAT, "hello"], **asked)
    assert [result.tokens for result in found] == [result.tokens for result in plain]
    # auto and card verify what pays, which with a draft as large as its target may be nothing
    assert method != "speculative" or sum(result.figures.drafted for result in found) > 0


def test_the_same_model_under_other_ids_drafts_perfectly(folders: dict[str, Path]) -> None:
    with load(folders, "shuffled", method="speculative") as llm:
        for sampling in ({}, SAMPLED):
            found = llm.generate(CHAT, max_tokens=40, ignore_eos=True, **sampling)[0]
            assert found.figures.mean_accepted_length > 4
    with load(folders, "shuffled", method="speculative", rule="rejection") as llm:
        first, second = (llm.generate(CHAT, max_tokens=30, ignore_eos=True, **SAMPLED)[0] for _ in range(2))
    assert first.tokens == second.tokens
    assert first.figures.accepted > 10


def test_shared_tokens_have_equal_bytes(folders: dict[str, Path], tmp_path: Path) -> None:
    target, other = (Tokenizer.from_folder(folders[name]) for name in ("target", "shuffled"))
    pairs = shared_tokens(target, other)
    assert (np.diff(pairs[:, 0]) > 0).all()
    assert all(target.words[mine] == other.words[theirs] for mine, theirs in pairs.tolist())
    assert len(pairs) == len(target.words) - len(target.special_ids)
    by_pieces = Tokenizer.from_folder(folder_of(sentence_piece(tmp_path / "pieces.gguf"), tmp_path / "pieces"))
    shared = [
        (target.words[mine], by_pieces.words[theirs]) for mine, theirs in shared_tokens(target, by_pieces).tolist()
    ]
    assert {("\u0120", "\u2581"), ("\u010a", "<0x0A>"), ("a", "a")} <= set(shared)


class Words:
    """A tokenizer with words only."""

    special_ids = frozenset[int]()

    def __init__(self, *words: str) -> None:
        self._words = words

    def bytes_by_id(self) -> dict[int, bytes]:
        return {index: word.encode() for index, word in enumerate(self._words)}


def test_a_pair_without_common_tokens_is_refused(folders: dict[str, Path]) -> None:
    model = load_model(folders["target"], dtype="float32")
    given = BuildContext(model.model, model.model, Words("x"), Words("y"))
    assert isinstance(translated.build(translated.Options(by="text"), given=given), translated.ByText)
    with pytest.raises(UserError, match=r"no token in common.*it may by text \(--by text\)"):
        translated.build(translated.Options(), given=given)
    with pytest.raises(UserError, match="needs a draft model"):
        translated.build(translated.Options(), given=given._replace(draft=None))
    with pytest.raises(UserError, match="tokenizers"):
        translated.build(translated.Options(), given=given._replace(tokenizer=None))
    with pytest.raises(UserError, match="width is 0"):
        translated.Options(width=0)
    with pytest.raises(UserError, match="unknown by 'words', allowed are text, tokens"):
        translated.Options(by="words")
    with pytest.raises(UserError, match=r"does not fit the target.*drafter translated"):
        outpace.load(folders["target"], str(folders["shuffled"]), dtype="float32")


def test_the_text_read_equals_the_text_tokenized_again(folders: dict[str, Path]) -> None:
    """Over an answer much longer than the tail that is cut again in each round."""
    with load(folders, "finer", method="speculative") as llm:
        drafter = llm.engine.drafting.drafter
        assert isinstance(drafter, translated.ByTokens)
        state = drafter.open(request_of((5,), 100))
        text = llm.tokenizer.continuation("hello world 12 " * 30)
        for place, token in enumerate(text):
            drafter.observe(state, Observation([place], [token], TokenTree(token, place + 1, place + 2)))
            assert len(state.tail) <= 160
        mine, theirs = llm.tokenizer, llm.draft.tokenizer
        assert theirs.decode(state.wanted).endswith(mine.decode(text))


class Counted(Toy):
    """A small draft: of what its two last tokens were followed by in the texts that it was trained on, the shares."""

    def __init__(self, vocab_size: int, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(vocab_size, 2, 0)
        self.seen: Counter[tuple[int, ...]] = Counter()
        for text in texts:
            for length in (1, 2, 3):
                self.seen.update(tuple(text[place : place + length]) for place in range(len(text) - length + 1))

    def _row(self, text: Sequence[int]) -> torch.Tensor:
        row = torch.full((self.vocab_size,), 0.01, dtype=torch.float64)
        for weight, before in ((0.1, ()), (1.0, tuple(text[-1:])), (20.0, tuple(text[-2:]))):
            row += weight * torch.tensor([self.seen[(*before, token)] for token in range(self.vocab_size)])
        return row.log()


def train_tokenizer(where: Path, texts: Sequence[str]) -> Tokenizer:
    """A tokenizer of its own words, trained on these texts."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    where.mkdir()
    trained.save(str(where / "tokenizer.json"))
    (where / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return Tokenizer.from_folder(where)


@pytest.fixture(scope="module")
def trained(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Loaded, Loaded]:
    """A target, and a draft with other tokens that was trained on its answers."""
    target = load_model(folders["target"], dtype="float32")
    with outpace.load(target, method="autoregressive") as llm:
        texts = [llm.generate(CHAT, max_tokens=60, ignore_eos=True)[0].text, "hello world 12 " * 4]
    tokenizer = train_tokenizer(tmp_path_factory.mktemp("trained") / "tokenizer", texts)
    cut = [tokenizer.continuation(text) for text in texts]
    draft = Counted(max(tokenizer.words) + 1, cut)
    return target, Loaded(draft, tokenizer, "counted")


def drafter_by_text(target: Loaded, draft: Model, tokenizer: Tokenizer) -> Any:
    given = BuildContext(draft, target.model, tokenizer, target.tokenizer)
    return translated.build(translated.Options(by="text"), given=given)


def request_of(prompt: Sequence[int], max_tokens: int = 30) -> Request:
    return Request(tuple(prompt), find_rule("auto", SamplingParams().sampling), max_tokens)


@pytest.mark.parametrize(("by", "method"), in_turn(["text", "tokens"], ["speculative", "auto", "card"]))
def test_a_draft_that_was_trained_with_its_own_tokenizer_drafts(
    trained: tuple[Loaded, Loaded], by: str, method: str
) -> None:
    target, draft = trained
    assert target.tokenizer.fingerprint != draft.tokenizer.fingerprint
    options: dict[str, Any] = {"worker": "inline"} if method == "card" else {}
    with outpace.load(target, draft, drafter="translated", method=method, by=by, profile=False, **options) as llm:
        asked = {"max_tokens": 60, "ignore_eos": True}
        plain, found = llm.generate(CHAT, plain=True, **asked)[0], llm.generate(CHAT, **asked)[0]
    assert found.tokens == plain.tokens
    least = {"speculative": 5, "card": 0, "auto": -1}[method]  # what CARD accepts depends on measured times
    assert found.figures.accepted > least, "it has read this answer"


def test_by_text_proposes_tokens_that_only_the_target_has(folders: dict[str, Path], tmp_path: Path) -> None:
    """The draft knows single characters alone, the target words."""
    target, tokenizer = load_model(folders["target"], dtype="float32"), train_tokenizer(tmp_path / "letters", ["a"])
    said = "hello world 12 "
    draft = Counted(max(tokenizer.words) + 1, [tokenizer.continuation(said * 4)])
    drafter, text = drafter_by_text(target, draft, tokenizer), target.tokenizer.continuation(said)
    state, tree = drafter.open(request_of(text)), TokenTree(text[-1])
    for _ in range(14):
        drafter.grow([state], [tree])
    assert set(tree.tokens[1:]) - set(shared_tokens(target.tokenizer, tokenizer)[:, 0].tolist())
    assert tokenizer.decode(state.own) in said * 2
    node = 0
    for token in target.tokenizer.continuation(tokenizer.decode(state.own)):
        below = tree.child(node, token)
        assert below is not None, "its text, as the target cuts it"
        node = below


def test_by_text_the_end_of_an_answer_is_not_drafted(trained: tuple[Loaded, Loaded]) -> None:
    target, draft = trained
    (end,) = draft.tokenizer.special_ids
    drafter = drafter_by_text(target, Counted(draft.model.vocab_size, [[end] * 50]), draft.tokenizer)
    assert grown(drafter, drafter.open(request_of((5, 6))), TokenTree(6)) == 0


def test_an_incomplete_character_is_not_proposed(folders: dict[str, Path], tmp_path: Path) -> None:
    """The draft writes its bytes one by one; nothing is offered that is no text yet."""
    target = load_model(folders["target"], dtype="float32")
    tokenizer = train_tokenizer(tmp_path / "bytes", ["a"])
    cut = tokenizer.continuation("\u00e9" * 20)
    assert len(cut) == 40
    drafter = drafter_by_text(target, Counted(max(tokenizer.words) + 1, [cut]), tokenizer)
    text = target.tokenizer.continuation("\u00e9\u00e9")
    state, tree = drafter.open(request_of(text)), TokenTree(text[-1])
    drafter.grow([state], [tree])
    drafter.grow([state], [tree])
    path, node = [], 0
    while tree.children(node):
        node = tree.children(node)[-1]
        path.append(tree.tokens[node])
    assert target.tokenizer.decode(path) == "\u00e9\u00e9"


def test_a_pause_frees_the_session_and_a_text_that_is_too_long_is_not_read(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(folders, "finer", method="speculative") as llm:
        drafter: Any = llm.engine.drafting.drafter
        request = llm.prepare(CHAT, SamplingParams(max_tokens=20)).request
    state, tree = drafter.open(request), TokenTree(request.prompt[-1])
    drafter.grow([state], [tree])
    count = len(request.prompt)
    assert 0 < drafter._model.session_bytes(state.session.slots) <= drafter.capabilities.memory([count])
    known = state.session.length
    drafter.pause(state)
    assert state.session.slots == state.session.length == 0
    drafter.grow([state], [tree])
    assert state.session.length == known + 1, "all is read again, with the token that was drafted"
    monkeypatch.setattr(translated, "_max_tokens", lambda length: 3)
    assert grown(drafter, drafter.open(request), other := TokenTree(request.prompt[-1])) == 0
    assert len(other) == 1

"""A draft with another tokenizer: the same text by every method and rule, tokens in common, what is cut anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files import CONFIG, model_folder, weights

import outpace
from outpace.core.errors import UserError
from outpace.core.needs import Given
from outpace.drafters import translated
from outpace.engine.build import find_rule
from outpace.models.files.checkpoint import write_checkpoint
from outpace.models.load import load_model
from outpace.models.text.shared import shared_tokens
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


@pytest.mark.parametrize("draft", ["shuffled", "finer"])
@pytest.mark.parametrize("method", ["speculative", "auto", "card"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED])
def test_the_text_is_plain_decodings(
    folders: dict[str, Path], draft: str, method: str, sampling: dict[str, Any]
) -> None:
    options = {"worker": "inline"} if method == "card" else {}
    with load(folders, draft, method=method, **options) as llm:
        asked = {"max_tokens": 40, "ignore_eos": True, **sampling}
        plain = llm.generate([CHAT, "hello"], plain=True, **asked)
        found = llm.generate([CHAT, "hello"], **asked)
    assert [result.tokens for result in found] == [result.tokens for result in plain]
    assert method == "auto" or sum(result.figures.drafted for result in found) > 0  # a draft as large as its target


@pytest.mark.parametrize("sampling", [{}, SAMPLED])
def test_the_same_model_under_other_ids_drafts_perfectly(folders: dict[str, Path], sampling: dict[str, Any]) -> None:
    with load(folders, "shuffled", method="speculative") as llm:
        found = llm.generate(CHAT, max_tokens=40, ignore_eos=True, **sampling)[0]
    assert found.figures.mean_accepted_length > 4


def test_a_ratio_rule_judges_what_it_draws(folders: dict[str, Path]) -> None:
    with load(folders, "shuffled", method="speculative", rule="rejection") as llm:
        found = [llm.generate(CHAT, max_tokens=30, ignore_eos=True, **SAMPLED)[0] for _ in range(2)]
    assert found[0].tokens == found[1].tokens
    assert found[0].figures.accepted > 10


def test_shared_tokens_stand_for_the_same_bytes(folders: dict[str, Path]) -> None:
    target, other = (Tokenizer.from_folder(folders[name]) for name in ("target", "shuffled"))
    pairs = shared_tokens(target, other)
    assert (np.diff(pairs[:, 0]) > 0).all()
    assert all(target.words[mine] == other.words[theirs] for mine, theirs in pairs.tolist())
    assert len(pairs) == len(target.words) - len(target.special_ids)


class Words:
    """A tokenizer of which only its words count."""

    def __init__(self, *words: str, special: tuple[int, ...] = ()) -> None:
        self.words, self.special_ids = dict(enumerate(words)), frozenset(special)


def test_words_of_two_kinds_of_tokenizer_are_compared_by_their_bytes() -> None:
    by_bytes = Words("a", "\u0120the", "\u010a", "\u00c3\u00a9", "<s>", special=(4,))
    by_pieces = Words("<s>", "\u2581the", "<0x0A>", "\u00e9", "a", special=(0,))
    assert shared_tokens(by_bytes, by_pieces).tolist() == [[0, 4], [1, 1], [2, 2], [3, 3]]  # type: ignore[arg-type]


def test_a_pair_without_common_tokens_is_refused(folders: dict[str, Path]) -> None:
    model = load_model(folders["target"], dtype="float32")
    given = Given(model.model, model.model, Words("x"), Words("y"))
    with pytest.raises(UserError, match="no token in common"):
        translated.build(translated.Options(), given=given)
    with pytest.raises(UserError, match="needs a draft model"):
        translated.build(translated.Options(), given=given._replace(draft=None))
    with pytest.raises(UserError, match="tokenizers"):
        translated.build(translated.Options(), given=given._replace(tokenizer=None))
    with pytest.raises(UserError, match="width is 0"):
        translated.Options(width=0)


def test_another_drafter_says_which_one_takes_such_a_draft(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"does not fit the target.*drafter translated"):
        outpace.load(folders["target"], str(folders["shuffled"]), dtype="float32")


def test_what_is_read_stays_the_text_cut_anew(folders: dict[str, Path]) -> None:
    """Over an answer much longer than the tail that is cut again in each round."""
    with load(folders, "finer", method="speculative") as llm:
        drafter = llm.engine.drafting.drafter
        assert isinstance(drafter, translated.Translated)
        rule = find_rule("auto", outpace.SamplingParams().sampling)
        from outpace.core.tree import TokenTree
        from outpace.core.types import Observation, Request

        state = drafter.open(Request((5,), rule, 100))
        text = llm.tokenizer.continuation("hello world 12 " * 30)
        for place, token in enumerate(text):
            drafter.observe(state, Observation([place], [token], TokenTree(token, place + 1, place + 2)))
            assert len(state.tail) <= 160
        mine, theirs = llm.tokenizer, llm.draft.tokenizer
        assert theirs.decode(state.wanted).endswith(mine.decode(text))

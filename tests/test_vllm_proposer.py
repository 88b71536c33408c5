"""The proposer for vLLM, driven as vLLM 0.32 drives it: chains, rows that move, appear and go, and no more drafts than
pay. `make test-vllm` runs vLLM itself."""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from files import model_folder
from links import drafting
from turns import one_of

import outpace
from outpace.card.wire import identity_of
from outpace.cluster.draft_model import build_card_drafter, load_own_draft
from outpace.core.errors import UserError
from outpace.integrations.row_drafter import RowDrafter
from outpace.integrations.vllm import Proposer
from outpace.models.options import LoadOptions

CAPACITY, DRAFTS = 512, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("vllm"), "target")


@pytest.fixture(autouse=True)
def of_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))  # type: ignore[arg-type]
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))


def config(folder: Path, options: Any = None, drafts: int = DRAFTS, **changes: Any) -> Any:
    """The fields of a VllmConfig that the proposer reads."""
    model = SimpleNamespace(
        model=str(folder),
        max_model_len=CAPACITY,
        get_vocab_size=lambda: 272,
        hf_config=SimpleNamespace(to_dict=dict),
    )
    fields = {
        "model_config": model,
        "speculative_config": SimpleNamespace(num_speculative_tokens=drafts),
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "device_config": SimpleNamespace(device_type="cpu"),
        "additional_config": {"outpace": options or {}},
    }
    return SimpleNamespace(**fields | changes)


class Answer:
    """A request whose whole text is known: `prompt` tokens are read, the rest is what the target writes."""

    def __init__(self, text: Sequence[int], prompt: int) -> None:
        self.text, self.length, self.drafts = [*text], prompt, list[int]()

    @property
    def is_over(self) -> bool:
        return self.length >= len(self.text)

    def verify(self) -> list[int]:
        """What a pass of the target over the drafts writes."""
        following = self.text[self.length : self.length + len(self.drafts) + 1]
        same = next((at for at, (a, b) in enumerate(zip(self.drafts, following, strict=False)) if a != b), None)
        written = following[: len(self.drafts) + 1 if same is None else same + 1]
        self.length += len(written)
        return written


class Serving:
    """Runs answers as vLLM's runner does, on a clock of its own: a pass takes 10 ms, `row` more ms for each row above
    one, and `jump` more ms if several requests have any draft."""

    def __init__(self, row: float = 0.1, seed: int = 0, jump: float = 0.0) -> None:
        self.now, self._row, self._random, self._jump = 0.0, row, random.Random(seed), jump
        self.most = 0  # drafts of one pass

    def run(self, proposer: Any, answers: Sequence[Answer], moves: bool = False) -> float:
        """Write all answers and return the seconds; `moves`: rows change places."""
        began, rows, batch = self.now, np.zeros((len(answers), CAPACITY), np.int32), [*answers]
        while batch := [answer for answer in batch if not answer.is_over]:
            if moves:
                self._random.shuffle(batch)
            drafted = sum(len(answer.drafts) for answer in batch)
            self.most = max(self.most, drafted)
            self.now += (10 + self._row * (len(batch) + drafted - 1)) / 1e3
            self.now += self._jump / 1e3 if drafted and len(batch) > 1 else 0.0
            sampled = [answer.verify() for answer in batch]
            lengths = np.array([answer.length for answer in batch])
            for row, answer in enumerate(batch):
                rows[row, : answer.length] = answer.text[: answer.length]
            for answer, drafts in zip(batch, proposer.propose(sampled, lengths, rows), strict=True):
                assert len(drafts) <= DRAFTS
                answer.drafts = drafts
        return self.now - began


def repeated(seed: int = 0, length: int = 400) -> list[int]:
    """A text in which a passage of 40 tokens comes again and again."""
    return (random.Random(seed).choices(range(3, 272), k=40) * 20)[:length]


def varied(seed: int, length: int = 300) -> list[int]:
    """A text without order, of few different tokens, so that n-grams occur again and rarely go on alike."""
    return random.Random(seed).choices(range(3, 23), k=length)


def partly_repeated(seed: int, length: int = 300) -> list[int]:
    """A text that copies about a third of its tokens from itself."""
    drawn, text = random.Random(seed), list[int]()
    while len(text) < length:
        is_copy = len(text) > 60 and drawn.random() < 0.35
        text += text[-40:-25] if is_copy else drawn.choices(range(3, 272), k=10)
    return text[:length]


def proposer_of(folder: Path, serving: Serving, options: Mapping[str, Any] | None = None) -> Proposer:
    return Proposer(config(folder, options), clock=lambda: serving.now)


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "cacheback", "ngram+suffix+cacheback"])
def test_a_text_that_repeats_is_written_in_fewer_passes(drafter: str, folder: Path) -> None:
    serving = Serving()
    proposer = proposer_of(
        folder, serving, {"drafter": drafter, "table": "none"} if "cache" in drafter else {"drafter": drafter}
    )
    plain = 360 * 0.010
    assert serving.run(proposer, [Answer(repeated(), 40)]) < plain / 2


@pytest.mark.parametrize("count", [1, 8])
def test_drafts_that_do_not_pay_end(count: int, folder: Path) -> None:
    """Rows as expensive as on a CPU: 8 ms of 10. Plain decoding takes one pass for each token."""
    serving = Serving(row=8.0)
    proposer = proposer_of(folder, serving)
    texts = [varied(seed) for seed in range(4 * count)]
    plain = sum((10 + 8.0 * (count - 1)) / 1e3 * 290 for _ in range(4))
    took = sum(
        serving.run(proposer, [Answer(text, 10) for text in texts[start : start + count]])
        for start in range(0, 4 * count, count)
    )
    assert serving.most, "none was tried"
    assert took < plain / 0.97


def test_a_batch_that_any_draft_slows_down_gets_few(folder: Path) -> None:
    """A pass with drafts takes 12 ms longer, rows are cheap. A few accepted tokens per pass do not pay; many do."""
    serving = Serving(row=0.5, jump=12.0)
    proposer = proposer_of(folder, serving)
    texts = [partly_repeated(seed) for seed in range(32)]
    took = sum(serving.run(proposer, [Answer(text, 10) for text in texts[at : at + 8]]) for at in range(0, 32, 8))
    assert took < 4 * 290 * 0.0135 / 0.94
    took = serving.run(proposer_of(folder, serving), [Answer(repeated(at), 40) for at in range(8)])
    assert took < 360 * 0.0135 / 1.2


def test_rows_may_change_places(folder: Path) -> None:
    """Rows that change places and end at different times are drafted as well as rows that keep their place."""
    times = []
    for moves in (False, True):
        serving = Serving(seed=1)
        answers = [Answer(repeated(seed, 200 + 20 * seed), 40) for seed in range(6)]
        answers.append(Answer(repeated(0), 40))  # a row with the same text, for a while
        times.append(serving.run(proposer_of(folder, serving), answers, moves))
    assert times[1] == pytest.approx(times[0], rel=0.02)


def test_a_prompt_that_is_still_read_gets_nothing(folder: Path) -> None:
    proposer, texts = Proposer(config(folder)), np.array([repeated(), repeated(1)], np.int32)
    for length in range(100, 140):
        sampled = [[int(texts[0, length - 1])], []]
        assert proposer.propose(sampled, np.array([length, 50]), texts)[1] == []


def test_a_large_batch_gets_no_drafts(folder: Path) -> None:
    serving = Serving()
    proposer = proposer_of(folder, serving, {"max_rows": 8})
    serving.run(proposer, [Answer(repeated(seed), 40) for seed in range(5)])
    assert not serving.most
    serving.run(proposer, [Answer(repeated(seed), 40) for seed in range(4)])
    assert 0 < serving.most <= 4


@pytest.fixture(scope="module")
def written(folder: Path) -> list[int]:
    """A text of the model in `folder`, after a prompt of four tokens."""
    prompt = [3, 50, 60, 70]
    with outpace.LLM(folder, method="autoregressive", dtype="float32") as llm:
        (answer,) = llm.generate([prompt], outpace.SamplingParams(max_tokens=100, ignore_eos=True))
    return [*prompt, *answer.tokens]


def test_a_draft_model_drafts(folder: Path, written: list[int]) -> None:
    """The target itself as draft: with exact drafts every pass writes several tokens."""
    serving = Serving()
    proposer = proposer_of(folder, serving, {"drafter": "model", "draft": str(folder)})
    assert serving.run(proposer, [Answer(written, 4)]) < 0.8 * (len(written) - 4) * 0.010


class RealServing(Serving):
    """The same on the real clock."""

    def run(self, proposer: Any, answers: Sequence[Answer], moves: bool = False) -> float:
        self.passes = 0

        def propose(*arguments: Any) -> list[list[int]]:
            time.sleep(0.03)
            self.passes += 1
            drafts: list[list[int]] = proposer.propose(*arguments)
            return drafts

        return super().run(SimpleNamespace(propose=propose), answers, moves)


@pytest.mark.parametrize("delay", one_of(2, [0.005, 0.0]))
def test_a_draft_worker_elsewhere_drafts(delay: float, folder: Path, written: list[int]) -> None:
    """Drafts of the target's own weights come over a link; when it is cut for good, the text goes on."""
    draft = load_own_draft(str(folder), LoadOptions(dtype="float32"))
    own = identity_of(draft)
    with drafting(build_card_drafter("model", draft, {}), own, delay) as (_, relay):
        proposer, serving = Proposer(config(folder, {"worker": f"grpc://127.0.0.1:{relay.port}"})), RealServing()
        serving.run(proposer, [Answer(written, 4)])
        assert serving.passes < 0.9 * (len(written) - 4)
        relay.close()
        with pytest.warns(UserWarning, match="continuing without it until it restarts"):
            serving.run(proposer, [Answer(written, 4)])
        assert serving.passes == len(written) - 4
        proposer.close()


def test_a_draft_worker_with_other_tokens_is_refused(folder: Path) -> None:
    with drafting() as (_, relay), pytest.raises(UserError, match="refused this target"):
        Proposer(config(folder, {"worker": f"grpc://127.0.0.1:{relay.port}"}))


def test_an_exception_gives_one_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = Proposer(config(folder))
    texts = np.array([repeated()], np.int32)

    def fail(*_: Any) -> None:
        raise ValueError("of the test")

    monkeypatch.setattr(RowDrafter, "_match", fail)
    with pytest.warns(UserWarning, match=r"outpace failed \(ValueError: of the test\); vLLM continues without drafts"):
        assert proposer.propose([[5]], np.array([50]), texts) == [[]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert proposer.propose([[5]], np.array([51]), texts) == [[]]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"drafter": "eagle"}, "unknown drafter for vLLM 'eagle'"),
        ({"drafter": "ngram", "longst": 3}, "unknown option 'longst'.*did you mean 'longest'"),
        ({"drafter": "ngram", "longest": 0}, "longest is 0"),
        ({"drafter": "model"}, "name a draft if, and only if, drafter model is used"),
        ({"drafter": "ngram", "draft": "d"}, "name a draft if, and only if, drafter model is used"),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"worker": "there"}, "worker is 'there', it must be the address of a draft worker"),
        ({"worker": "grpc://127.0.0.1:1", "drafter": "ngram"}, "name drafter 'ngram' there, not here"),
        ({"untested": "yes"}, "untested is 'yes'"),
        ([], None),
        ([1], "outpace of additional_config is"),
    ],
)
def test_options_are_checked_at_the_start(options: Any, sentence: str | None, folder: Path) -> None:
    if sentence is None:
        Proposer(config(folder, options))
        return
    with pytest.raises(UserError, match=sentence):
        Proposer(config(folder, options))


def test_a_draft_with_other_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    other = model_folder(tmp_path, "other")
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace("[PAD271]", "[OTHER]"))
    with pytest.raises(UserError, match="does not fit the target"):
        Proposer(config(folder, {"draft": str(other)}))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "pipeline_parallel_size is 2"),
        ({"speculative_config": SimpleNamespace(num_speculative_tokens=CAPACITY)}, "it must be below 512"),
    ],
)
def test_what_vllm_cannot_do_is_refused(changes: dict[str, Any], sentence: str, folder: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        Proposer(config(folder, **changes))


@pytest.mark.parametrize(
    ("version", "is_tested"), [("0.31.2", False), ("0.33.1", True), ("0.34.0", False), ("1", False)]
)
def test_other_versions_need_the_option_untested(
    version: str, is_tested: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    if is_tested:
        Proposer(config(folder))
        return
    with pytest.raises(UserError, match=f"vLLM is version {version}, outpace works with 0.32 to 0.33"):
        Proposer(config(folder))
    Proposer(config(folder, {"untested": True}))

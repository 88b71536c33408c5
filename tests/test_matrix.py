"""The matrix of drafter x draft x decoder x worker x rule x sampling, as the registry finds them.

A file that is dropped into drafters/, decoders/ or rules/ is covered by existing. With a rule of trait `same_text` the
text is that of the naive loop, however it is drafted; with another rule it is possible, and the same when repeated.
Drafters that run a model are given a perfect, a partial, a garbage and a chain-drafting one, and each drafter is also
silenced. All samplings, with and without a constraint, share one batch.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from constraints import Table, rings
from doubles import Outcome, QuickToy, ToyBlock, ToyHead, ToySlots, ToySteered, decode, make_request, write
from timed import Stopwatch, Timed
from turns import one_of

from outpace.core import registry
from outpace.core.drafting import NO_NEEDS, BuildContext
from outpace.core.errors import UserError
from outpace.core.sampling import GREEDY, Sampling
from outpace.core.tree import TokenTree
from outpace.core.types import Capabilities, Drafter, Observation, Request
from outpace.drafters import build_drafter, drafter_modules
from outpace.engine.build import check_rule, find_rule
from outpace.models.files import token_tables

pytestmark = pytest.mark.filterwarnings("error:the drafter.*failed")

TARGET = QuickToy(16, 3, 0)
NEAR = QuickToy(16, 3, 0)
NEAR._tables = 0.75 * TARGET._tables + 0.25 * QuickToy(16, 3, 1)._tables
HEADS: dict[str, dict[str, Any]] = {  # and a steered draft: by the drafter that runs them, and by quality
    name: {"perfect": head(16, 3, 0), "partial": head(16, 3, 0), "garbage": head(16, 2, 99)}
    for name, head in {"eagle": ToyHead, "block": ToyBlock, "specformer": ToySlots, "steered": ToySteered}.items()
}
for by_quality in HEADS.values():
    by_quality["partial"]._tables = NEAR._tables
    by_quality["chain"] = by_quality["partial"]
DRAFTS = {"perfect": TARGET, "partial": NEAR, "garbage": QuickToy(16, 2, 99), "chain": NEAR}  # chain: of width 1
FOLDER = tempfile.TemporaryDirectory()
FILES = {"cacheback": "table", "retrieval": "datastore"}  # drafters with a file, and the option that names it
SAMPLINGS = (
    GREEDY,
    Sampling(1.0),
    Sampling(0.6, top_k=5),
    Sampling(0.7, top_p=0.9),
    Sampling(1.3, top_k=9, top_p=0.8, min_p=0.02),
)
PROMPTS = ((3, 1, 4, 1, 5, 3, 1, 4, 1, 5, 3, 1), (7,), (2, 7, 1, 8))
WORKERS = {None: (None,), "sequential": (None,), "parallel": ("inline", "thread")}  # by a decoder's `drafting`


class Letters:
    """A tokenizer of the toys' tokens, each a letter."""

    words, special_ids, fingerprint = dict(enumerate("abcdefghijklmnop")), frozenset[int](), "letters"

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    continuation = encode

    def bytes_by_id(self) -> dict[int, bytes]:
        return {token: word.encode() for token, word in self.words.items()}

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join(self.words[token] for token in ids)


GIVEN = BuildContext(TARGET, TARGET, Letters(), Letters())


class Cell(NamedTuple):
    """One method as a user may choose it. `draft` is the model of a drafter that runs one, or "silent"."""

    decoder: str
    drafter: str | None
    draft: str | None
    worker: str | None
    rule: str

    def __str__(self) -> str:
        return "-".join(part for part in self if part)


class Silent(Drafter):
    """Passes everything to another drafter and proposes nothing."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.capabilities = inner, Capabilities(inner.capabilities.sources)

    def open(self, request: Request) -> Any:
        return self.inner.open(request)

    def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> None:
        pass

    def observe(self, state: Any, seen: Observation) -> None:
        self.inner.observe(state, seen)

    def close(self, state: Any) -> None:
        self.inner.close(state)


def drafters() -> list[str]:
    """Every drafter, and every two of them on one tree."""
    single = single_drafters()
    on_drafts = [name for name in single if registry.describe("drafters", name).needs == registry.DRAFT_MODEL]
    pairs = [
        pair for pair in itertools.combinations(single, 2) if not HEADS.keys() & {*pair} or not {*pair} <= {*on_drafts}
    ]
    return [*single, *map("+".join, pairs)]


def single_drafters() -> list[str]:
    """Every drafter but `multi_step`, which needs a draft with graphs: see test_multi_step.py."""
    return [name for name in registry.names("drafters") if name != "multi_step"]


def given(drafter: str, draft: Any = TARGET) -> BuildContext:
    """What a drafter is built from; the draft of some drafters is a head."""
    heads = heads_of(drafter)
    return GIVEN._replace(draft=heads["perfect"] if heads and draft not in heads.values() else draft)


def heads_of(drafter: str) -> dict[str, Any]:
    """The heads that a drafter, or one of several, runs; none for others."""
    return next((HEADS[part] for part in drafter.split("+") if part in HEADS), {})


def files_of(drafter: str) -> dict[str, str]:
    """The options of a drafter, or of several, that name files: each is made of texts that the target wrote."""
    return {FILES[name]: _file_of(name) for name in drafter_modules(drafter) if name in FILES}


@cache
def runs_model(drafter: str) -> bool:
    """Whether a drafter, or one of several, is given a model to run."""
    return build_drafter(drafter, given(drafter), files_of(drafter)).capabilities.runs_model


@cache
def _file_of(drafter: str) -> str:
    module, path = registry.find("drafters", drafter), Path(FOLDER.name) / drafter
    texts = [[*prompt, *write(TARGET, make_request(prompt, "greedy", 60))] for prompt in PROMPTS]
    token_tables.write(path, drafter, Letters.fingerprint, module.make(texts, TARGET.vocab_size, module.Options()))
    return str(path)


def cells() -> Iterator[Cell]:
    """Yield every combination with one drafter, also those that are refused, and some with two drafters on one tree.

    These pairs grow with the square of the drafters: each decoder gets one rule of trait `same_text` and one other.
    """
    decoders, rules = registry.names("decoders"), registry.names("rules")
    keyed = [rule for rule in rules if is_keyed(rule)]
    others = [rule for rule in rules if rule not in keyed] or keyed
    for place, decoder in enumerate(decoders):
        workers = WORKERS[registry.find("decoders", decoder).drafting]
        if registry.find("decoders", decoder).drafting is None:
            yield from (Cell(decoder, None, None, None, rule) for rule in rules)
            continue
        for number, drafter in enumerate(drafters(), place):
            drafts = [*(DRAFTS if runs_model(drafter) else (None,)), "silent"]
            if "+" in drafter:
                for asked in (keyed, others):
                    draft, worker = drafts[number % len(drafts)], workers[number % len(workers)]
                    yield Cell(decoder, drafter, draft, worker, asked[number % len(asked)])
            else:
                ways = itertools.product(drafts, workers, rules)
                yield from (Cell(decoder, drafter, draft, worker, rule) for draft, worker, rule in ways)


@cache
def samplings_of(rule: str) -> Mapping[Sampling, Any]:
    """The samplings that a rule goes with, and the rule for each."""
    found = {}
    for sampling in SAMPLINGS:
        try:
            found[sampling] = find_rule(rule, sampling)
        except UserError:
            continue
    assert found, f"rule {rule} goes with no sampling"
    return found


@cache
def requests_of(rule: str, prompts: tuple[tuple[int, ...], ...] = PROMPTS, max_tokens: int = 28) -> Sequence[Request]:
    """All samplings of a rule for all prompts, each with a prediction that is right but for some tokens; the last
    prompt with a constraint too. The same requests for every cell, so that each text is written plainly once."""
    asked = [
        make_request(prompt, built, max_tokens, sampling=sampling, seed=(number << 39) + 7, choice=number)
        for sampling, built in samplings_of(rule).items()
        for number, prompt in enumerate(prompts)
    ]
    last = [request for request in asked if request.prompt == prompts[-1]]
    asked += [replace(request, constraint=Table(len(request.prompt), rings(16, 5, alone=2))) for request in last]
    return tuple(replace(request, prediction=_nearly(request)) for request in asked)


@cache
def text_of(request: Request) -> Sequence[int]:
    """Plain decoding's own, by none of what the engine does."""
    return write(TARGET, request)


@cache
def _auto(sampling: Sampling) -> Any:
    return find_rule("auto", sampling)


def _nearly(request: Request) -> tuple[int, ...]:
    """The text by the rule that is keyed, every sixth token replaced."""
    text = text_of(replace(request, rule=_auto(request.sampling)))
    return tuple((token + (place % 6 == 5)) % 16 for place, token in enumerate(text))


def drafter_of(cell: Cell, watch: Stopwatch) -> Drafter | None:
    if cell.drafter is None:
        return None
    draft: Any = Timed(DRAFTS.get(cell.draft or "", TARGET), watch, 0.5, 0.01)
    if heads := heads_of(cell.drafter):
        draft = heads.get(cell.draft or "", heads["perfect"])
    options = files_of(cell.drafter) | ({"width": 1, "branches": 1} if cell.draft == "chain" else {})
    built = build_drafter(cell.drafter, given(cell.drafter, draft), options)
    return Silent(built) if cell.draft == "silent" else built


def run_cell(cell: Cell, requests: Sequence[Request]) -> Outcome | None:
    """All requests at once, on a clock by which drafts may pay; None where the parts say that they do not fit."""
    decoder, watch = registry.find("decoders", cell.decoder), Stopwatch()
    try:
        check_rule(cell.rule, decoder, cell.drafter)
        drafter, target = drafter_of(cell, watch), Timed(TARGET, watch, 6.0, 0.1)
        return decode(requests, cell.decoder, drafter, worker=cell.worker, target=target, seconds=watch)
    except UserError:
        return None


def is_keyed(rule: str) -> bool:
    """Whether the text follows from request and target alone."""
    built = next(iter(samplings_of(rule).values()))
    return bool(built.traits.same_text)


def asks_the_target(cell: Cell) -> bool:
    """Whether a worker, which sees nothing of the target's passes, is to run a drafter that needs something of them."""
    return registry.find("decoders", cell.decoder).drafting == "parallel" and needs_target(cell.drafter)


@cache
def needs_target(drafter: str | None) -> bool:
    """Whether it needs something of the target's passes."""
    built = drafter_of(Cell("", drafter, None, None, ""), Stopwatch())
    return built is not None and built.capabilities.needs != NO_NEEDS


@cache
def _fits(cell: Cell) -> bool:
    try:
        check_rule(cell.rule, registry.find("decoders", cell.decoder), cell.drafter)
    except UserError:
        return False
    return not asks_the_target(cell)


def fits(cell: Cell) -> bool:
    """Return whether decoder, drafter and rule go together."""
    return _fits(cell._replace(draft=None, worker=None))


def parts_of(cell: Cell) -> list[tuple[int, str | None]]:
    """Return decoder, drafter and rule, with their indices."""
    return [(0, cell.decoder), (1, cell.drafter), (4, cell.rule)]


def pairs_of(cell: Cell) -> set[Any]:
    """Return the pairs of parts that a cell tests together; the draft and the worker count with decoder and drafter."""
    pairs = set(itertools.combinations(parts_of(cell), 2))
    others = [(2, cell.draft), (3, cell.worker)]
    return pairs | {*itertools.product([(0, cell.decoder), (1, cell.drafter)], others), tuple(others)}


def check_cell(cell: Cell, requests: Sequence[Request]) -> None:
    """The text of every request, and that it was not written plainly."""
    run = run_cell(cell, requests)
    if run is None:
        return
    assert run.failure is None
    assert set(run.reasons) == {"length"}
    assert run.figures.emitted == sum(len(text) for text in run.texts)
    check_depths(run, requests)
    if is_keyed(cell.rule):
        assert run.texts == [text_of(request) for request in requests]
    else:
        assert [len(text) for text in run.texts] == [request.max_tokens for request in requests]
        again = run_cell(cell, requests)
        assert again is not None
        assert again.texts == run.texts
    if cell.drafter is None or cell.draft == "silent":
        assert run.figures.drafted == run.figures.accepted == run.figures.hits == 0
    else:
        assert run.figures.drafted > 0
        assert run.figures.accepted > 0 or cell.draft in ("garbage", None)
    if cell.decoder == "card":
        assert run.figures.misses > 0 or cell.draft in ("perfect", "partial")
        # A thread's candidates may all come too late: only the inline worker drafts at known times.
        # Toys answer masks with garbage: below a chain's first token, drafter parallel then finds nothing.
        is_poor = cell.draft in ("garbage", "silent", None) or (cell.drafter, cell.draft) == ("parallel", "chain")
        assert run.figures.hits > 0 or is_poor or cell.worker == "thread"


def check_depths(run: Outcome, requests: Sequence[Request]) -> None:
    """No draft is deeper than what may still be written: the target itself writes the last token."""
    for request, steps in zip(requests, run.steps, strict=True):
        left = request.max_tokens
        for step in steps:
            assert step.depth_offered < left, f"drafted {step.depth_offered} tokens where {left} were left"
            left -= step.emitted


@cache
def sample() -> list[Cell]:
    """Return few cells with all `pairs_of` a cell, chosen greedily; the long tests run all others."""
    every = [cell for cell in cells() if "+" not in (cell.drafter or "") and fits(cell)]
    decoders = registry.names("decoders")
    every.sort(key=lambda cell: (decoders.index(cell.decoder) + hash_of(cell)) % len(decoders))  # mixes the decoders
    met: set[Any] = set()
    found = []
    for least in range(8, 0, -1):
        for cell in every:
            pairs = pairs_of(cell)
            if len(pairs - met) >= least:
                found.append(cell)
                met |= pairs
    return found


def hash_of(cell: Cell) -> int:
    """Return the same number in every process."""
    return sum(map(ord, str(cell)))


def others() -> list[Cell]:
    """All cells but these."""
    taken = set(sample())
    return [cell for cell in cells() if cell not in taken]


@pytest.mark.parametrize("cell", sample(), ids=str)
def test_a_combination_writes_what_it_must(cell: Cell) -> None:
    check_cell(cell, requests_of(cell.rule, PROMPTS[::2], 10))


@pytest.mark.long
@pytest.mark.parametrize("cell", sample(), ids=str)
def test_a_combination_writes_longer_texts(cell: Cell) -> None:
    check_cell(cell, requests_of(cell.rule))


@pytest.mark.parametrize("decoder", ["speculative", "bild"])
def test_a_draft_grows_on_where_another_drafter_raises_scores(decoder: str) -> None:
    """Phrases that ouroboros' own draft agrees with rise above their parents' old scores in the other draft's order."""
    cell = Cell(decoder, "model+ouroboros", "partial", None, "greedy" if decoder == "speculative" else "match")
    check_cell(cell, requests_of(cell.rule, PROMPTS[::2], 14))


@pytest.mark.long
@pytest.mark.parametrize("cell", others(), ids=str)
def test_every_other_combination_writes_what_it_must(cell: Cell) -> None:
    check_cell(cell, requests_of(cell.rule, PROMPTS[::2], 14))


def mixed_cells() -> list[Cell]:
    """Return every decoder and worker with a tree that the n-gram table and a partial draft model share."""
    found = [
        Cell(name, drafting and "ngram+model", drafting and "partial", worker, rule)
        for name in registry.names("decoders")
        for drafting in [registry.find("decoders", name).drafting]
        for worker, rule in itertools.product(WORKERS[drafting], filter(is_keyed, registry.names("rules")))
    ]
    return list({cell[:4]: cell for cell in found if fits(cell)}.values())


@pytest.mark.parametrize("cell", one_of(3, ([cell] for cell in mixed_cells())), ids=str)
def test_a_request_writes_in_a_batch_what_it_writes_alone(cell: Cell) -> None:
    """The requests of a batch differ in rules, samplings, prompts and constraints."""
    rules = filter(is_keyed, registry.names("rules"))
    mixed = [request for rule in rules for request in requests_of(rule, PROMPTS[::2], 10)[::4]]
    together = run_cell(cell, mixed)
    assert together is not None
    for request, text in zip(mixed, together.texts, strict=True):
        alone = run_cell(cell, [request])
        assert alone is not None
        assert alone.texts == [text] == [text_of(request)]


@pytest.mark.parametrize("every_pair", [False, pytest.param(True, marks=pytest.mark.long)])
def test_everything_goes_with_something(every_pair: bool) -> None:
    """A part that refuses all others would pass above. With `every_pair` none that fits refuses another either."""
    ran: list[Cell] = []
    every = reversed(list(cells()))
    asked = list({cell._replace(draft=None, worker=None): cell for cell in every}.values())  # with the first draft
    for cell in asked:
        known = any(other.rule == cell.rule and other.decoder == cell.decoder for other in ran)
        if known and not is_keyed(cell.rule):
            continue
        if not every_pair and all(any(part == other[place] for other in ran) for place, part in parts_of(cell)):
            continue
        if run_cell(cell, requests_of(cell.rule, PROMPTS[1:2], 2)) is not None:
            ran.append(cell)
    for kind, place in (("decoders", 0), ("rules", 4)):
        assert {cell[place] for cell in ran} == set(registry.names(kind))
    assert {cell.drafter for cell in ran} == {None, *drafters()}
    refused = [cell for cell in asked if every_pair and cell not in ran and is_keyed(cell.rule)]
    assert [cell for cell in refused if not asks_the_target(cell)] == []


DRAFTER = '''"""Says nines.

No paper.
"""

from dataclasses import dataclass

from outpace.core.types import Capabilities, Drafter, DraftSource


@dataclass(frozen=True)
class Options:
    """None."""


class Nines(Drafter):
    capabilities = Capabilities((DraftSource("nines"),))

    def grow(self, states, trees):
        for tree in trees:
            tree.add(0, 9, -1.0)


def build(options, **given):
    return Nines()
'''
RULE = '''"""Takes any child.

No paper.
"""

from outpace.core.types import Verdict
from outpace.rules.greedy import Greedy


class AnyChild(Greedy):
    def walk(self, tree, picks):
        path = [0, 1] if len(tree) > 1 else [0]
        return Verdict(path, picks[path[-1]])
'''


def test_a_file_that_is_dropped_in_is_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new drafter and a new rule are found. The rule accepts any child of the root, and the matrix notices."""
    known = set(cells())
    for kind, name, text in (("drafters", "nines", DRAFTER), ("rules", "any_child", RULE)):
        package = importlib.import_module(f"outpace.{kind}")
        (tmp_path / kind).mkdir()
        (tmp_path / kind / f"{name}.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / kind)])
        monkeypatch.delitem(sys.modules, f"outpace.{kind}.{name}", raising=False)
    found = [cell for cell in cells() if cell not in known]
    assert {cell.drafter for cell in found} >= {"nines", "model+nines", "ngram+nines"}
    check_cell(Cell("speculative", "nines", None, None, "greedy"), requests_of("greedy"))
    check_cell(Cell("autoregressive", None, None, None, "any_child"), requests_of("any_child"))
    with pytest.raises(AssertionError):
        check_cell(Cell("speculative", "ngram", None, None, "any_child"), requests_of("any_child")[: len(PROMPTS)])

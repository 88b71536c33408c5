"""Measures a profile beforehand: times of rounds by rows and of draft steps, and the fastest method. Makes the files of
lookup drafters from a corpus of the user's own, for one tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from outpace.api.llm import LLM, Result
from outpace.api.profile import Profile, subject
from outpace.bench.contenders import PLAIN
from outpace.bench.run import rotated
from outpace.core import registry
from outpace.core.errors import UserError, check_whole
from outpace.core.options import CheckedOptions, whole
from outpace.core.types import Drafter
from outpace.engine.build import AUTO, PLANNED, default_drafter
from outpace.models.files import token_tables
from outpace.models.files.find import resolve
from outpace.models.files.reading import read_text
from outpace.models.load import Loaded, Progress
from outpace.models.text.tokenizer import Tokenizer
from outpace.planning.cost_model import CostModel

PROMPTS = (
    "Explain to a child of ten why the sea is salty.",
    "Write a Python function that checks whether a text reads the same backwards, and three tests for it.",
    "A baker sells 3 trays of 24 rolls in the morning and half as many in the afternoon. How many rolls is that? Show"
    " the steps.",
    "List eight things to pack for a weekend in the mountains, one a line, each with a reason.",
    "Rewrite this politely: I will not come to your party, I do not like crowds.",
)
SINGLE = "draft "  # prefix of the label of one of several drafts
PARALLEL_GAIN = 1.03  # speedup that drafting in parallel must reach over sequential drafting to be chosen
SEARCHED = "layer_skip"  # a drafter without a file, whose options skip_search.py finds with a corpus


@dataclass(frozen=True)
class TuneOptions(CheckedOptions):
    """Each method answers every prompt `rounds` times with `max_tokens`; `rows` are the sizes of the timed passes."""

    prompts: Sequence[str] = PROMPTS
    max_tokens: int = whole(96, 8)
    rounds: int = whole(2, 1)
    rows: Sequence[int] = (1, 2, 4, 8, 16, 32)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompts:
            raise UserError("there is no prompt to tune by, at least one is needed")
        for rows in self.rows:
            check_whole("rows", rows, 1, 4096)


@dataclass(frozen=True)
class TuneResult:
    """The measured seconds of a round and of a draft step, each by rows, tokens/s by method, and the chosen method.

    With several drafts, `drafts` has the tokens/s of each one by itself, the fastest first.
    """

    rounds: Mapping[int, float]
    draft_steps: Mapping[int, float]
    rates: Mapping[str, float]
    chosen: str
    path: Path | None
    drafts: Mapping[str, float] = field(default_factory=dict)


def tune(target: Loaded, draft: Loaded | None, options: TuneOptions, progress: Progress) -> TuneResult:
    """Measure all methods, choose one, and write the profile that method "auto" starts with."""
    runs = draft.drafter if draft is not None else None
    drafter = default_drafter(AUTO, runs)
    singles = [replace(draft, others=()), *draft.others] if draft is not None and draft.others else []
    setups: dict[str, tuple[Loaded | None, dict[str, Any]]] = {
        AUTO: (draft, {"method": AUTO}),
        **(
            {}
            if draft is not None and draft.reads_target
            else {PLANNED: (draft, {"method": PLANNED, "drafter": drafter})}
        ),
        PLAIN: (None, {"method": PLAIN}),
        **{f"{SINGLE}{one.name}": (one, {"method": AUTO}) for one in singles},
    }
    prompts = [target.tokenizer.encode_prompt(text) for text in options.prompts]
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(LLM(target, own, profile=False, reuse=False, **values))
            for name, (own, values) in setups.items()
        }
        costs = llms[AUTO].engine.costs
        for place, rows in enumerate(options.rows):  # times of trees of up to `rows` nodes
            method: dict[str, Any] = {"method": "speculative", "drafter": drafter} if rows > 1 else {"method": PLAIN}
            with LLM(target, draft if rows > 1 else None, nodes=rows, **method) as llm:
                llm.generate(prompts[:1], max_tokens=min(24, options.max_tokens))
                known, timed = costs.state_dict(), llm.engine.costs.state_dict()
                costs.load_state_dict(known | {kind: known[kind] | timed[kind] for kind in ("plain", "rounds")})
            progress("rounds", (place + 1) / len(options.rows))
        rates = _race(llms, prompts, options, progress)
        chosen = PLANNED if rates.get(PLANNED, 0.0) > PARALLEL_GAIN * rates[AUTO] else AUTO
        path = Profile(subject(target, draft)).save(*_learnt(llms[AUTO]), tuned=chosen)
        for one in singles:
            Profile(subject(target, one)).save(*_learnt(llms[f"{SINGLE}{one.name}"]))
        learned = costs.state_dict()
    rounds, steps = (
        {int(rows): times[rows] for rows in sorted(times, key=int)}
        for times in (learned["rounds"] | learned["plain"], learned["draft"].get(runs, {}))
    )
    drafts = {one.name: rates.pop(f"{SINGLE}{one.name}") for one in singles}
    ranked = dict(sorted(drafts.items(), key=itemgetter(1), reverse=True))
    return TuneResult(rounds, steps, rates, chosen, path, ranked)


def _learnt(llm: LLM) -> tuple[CostModel, Iterable[Drafter]]:
    """Return what learns in a run: the cost model and the drafters."""
    return llm.engine.costs, llm.engine.drafting.drafters.values()


def _race(
    llms: Mapping[str, LLM], prompts: Sequence[Sequence[int]], options: TuneOptions, progress: Progress
) -> dict[str, float]:
    """Return the pooled tokens/s of each method; the methods alternate on each prompt."""
    results: dict[str, list[Result]] = {name: [] for name in llms}
    total = options.rounds * len(prompts)
    for turn in range(total):
        for name in rotated(list(llms), turn):
            prompt = prompts[turn % len(prompts)]
            results[name] += llms[name].generate([prompt], max_tokens=options.max_tokens)
        progress("ways", (turn + 1) / total)
    return {name: _rate(found) for name, found in results.items()}


def _rate(results: Sequence[Result]) -> float:
    timed = [(len(result.tokens), result.tokens_per_second) for result in results if result.tokens_per_second]
    return sum(tokens for tokens, _ in timed) / sum(tokens / rate for tokens, rate in timed) if timed else 0.0


class TableFile(NamedTuple):
    """A file that was made, and the size of its corpus."""

    drafter: str
    path: Path
    texts: int
    tokens: int
    bytes: int


def make_table(
    drafter: str | None, corpus: Sequence[Path], target: str | None, to: Path | None, progress: Progress
) -> TableFile:
    """Tokenize a corpus and replace the drafter's file by one made from it.

    UserError for a drafter without a file, and for a corpus that cannot be read or is empty.
    """
    name, module = _find_maker(drafter)
    texts = texts_of(corpus)
    tokenizer = Tokenizer.from_folder(resolve(target, progress=progress))
    tokens = []
    for place, text in enumerate(texts):
        tokens.append(tokenizer.continuation(text))
        progress("corpus", (place + 1) / len(texts))
    path = to or token_tables.place_of(name, tokenizer.fingerprint)
    arrays = module.make(tokens, tokenizer.size, module.Options())
    token_tables.write(path, name, tokenizer.fingerprint, arrays)
    return TableFile(name, path, len(texts), sum(map(len, tokens)), path.stat().st_size)


def _find_maker(drafter: str | None) -> tuple[str, ModuleType]:
    """Return the drafter's name and its module, which has a function `make`."""
    makers = [name for name in registry.names("drafters") if hasattr(registry.find("drafters", name), "make")]
    allowed = f"{', '.join(makers)} or {SEARCHED}"
    if drafter is None:
        raise UserError(f"--corpus is for one drafter: say which, by --drafter {allowed}")
    if drafter not in makers:
        raise UserError(f"--corpus is for --drafter {allowed}, not for {drafter}")
    return drafter, registry.find("drafters", drafter)


def texts_of(corpus: Sequence[Path]) -> list[str]:
    """Read the texts of a corpus: text files, and the lines of .jsonl files.

    UserError for a file that cannot be read or is empty.
    """
    texts = []
    for file in corpus:
        content = read_text(file.expanduser(), largest=None)
        if not content.strip():
            raise UserError(f"{file} is empty, a corpus needs text")
        if file.suffix == ".jsonl":
            lines = content.removesuffix("\n").split("\n")  # a text may hold other line breaks
            texts += [text for n, line in enumerate(lines, 1) for text in _line_texts(line, f"{file}, line {n}")]
        else:
            texts.append(content)
    return texts


def _line_texts(line: str, where: str) -> list[str]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error})") from error
    fields = entry if isinstance(entry, dict) else {}
    texts = fields.get("turns", [fields["text"]] if "text" in fields else [])
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(f'{where} must be a JSON object with "text" or "turns" in each line')
    return texts

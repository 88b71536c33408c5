"""Options of methods have bounds; a rule from another package receives its own, and names its temperatures."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import dataclass, fields, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from test_library import folder
from typer.testing import CliRunner

from outpace.api.llm import LLM
from outpace.cli.main import app
from outpace.core import registry
from outpace.core.errors import UserError
from outpace.core.options import MethodOptions, help_of, whole
from outpace.core.sampling import Sampling
from outpace.core.types import Row
from outpace.engine.build import find_rule
from outpace.models.load import Loaded, load_model
from outpace.rules.greedy import Greedy

NAME = "second_best"


class SecondBest(Greedy):
    """Lossy on purpose, at any temperature."""

    traits = replace(Greedy.traits, lossless=False, sampled=True)

    @dataclass(frozen=True)
    class Options(MethodOptions):
        every: int = whole(
            3, 1, 100, help="distance of the positions at which the target's second best token is written"
        )

    def reduce(self, logits, rows: list[Row]) -> list[int]:  # type: ignore[no-untyped-def]
        best = logits.topk(2).indices.tolist()
        pairs = zip(best, rows, strict=True)
        return [second if row.position % self.options.every == 0 else first for (first, second), row in pairs]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_package_of_rules", "Writes the second best token now and then.\n\nNo paper.")
    vars(module).update(SecondBest=SecondBest)
    monkeypatch.setattr(SecondBest, "__module__", module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = registry.entry_points
    point = SimpleNamespace(name=NAME, module=module.__name__)
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [point] if group == "outpace.rules" else list(found(group=group))
    )
    assert importlib.import_module(point.module) is module


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(folder(tmp_path_factory.mktemp("rules"), "target"), runtime="llama")


def test_an_option_reaches_the_rule(target: Loaded) -> None:
    texts = {}
    for every in (1, 2, 100):
        with LLM(target, method="autoregressive", rule=NAME, every=every) as llm:
            texts[every] = llm.generate(["hello"], max_tokens=12)[0].tokens
    assert len(set(texts.values())) == 3
    with LLM(target, method="autoregressive", rule=NAME, every="2") as llm:
        assert llm.generate(["hello"], max_tokens=12)[0].tokens == texts[2], "text is read as a number"


def test_an_option_that_it_has_not_or_that_is_wrong_is_refused(target: Loaded) -> None:
    with pytest.raises(UserError, match=r"unknown option 'evry' of method autoregressive, rule second_best, .*every"):
        LLM(target, method="autoregressive", rule=NAME, evry=2)
    with pytest.raises(UserError, match="every"):
        LLM(target, method="autoregressive", rule=NAME, every=0)
    with pytest.raises(UserError, match="unknown option"):
        LLM(target, method="autoregressive", rule="greedy", every=2)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_it_says_itself_for_which_temperatures_it_is(temperature: float) -> None:
    assert isinstance(find_rule(NAME, Sampling(temperature)), SecondBest)
    name, fitting = (
        ("gumbel", "greedy, cascade, judge, rollback, second_best or top_beta")
        if not temperature
        else (
            "greedy",
            "block, gumbel, match, multi_round, rejection, spectr, traversal, without_replacement, adaptive, ",
        )
    )
    with pytest.raises(
        UserError, match=f"rule {name} does not work with temperature {temperature:g}, use rule {fitting}"
    ):
        find_rule(name, Sampling(temperature))


def test_a_rule_whose_text_depends_on_drafts_is_not_planned_by_the_clock(
    target: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SecondBest, "traits", replace(SecondBest.traits, same_text=False))
    with LLM(target, target, rule=NAME) as llm:
        assert llm.method == "speculative"


OPTIONS = {(kind, name): registry.find(kind, name).Options for kind in registry.KINDS for name in registry.names(kind)}
BOUNDED = [
    pytest.param(options, one, id=f"{name}-{one.name}")
    for (_, name), options in OPTIONS.items()
    for one in fields(options)
    if one.metadata.get("bounds")
]


@pytest.mark.parametrize(("options", "option"), BOUNDED)
def test_an_option_out_of_bounds_is_refused_by_name(options: Any, option: Any) -> None:
    low, high = option.metadata["bounds"]
    for value in (low - 1, high + 1):
        if value < math.inf:
            with pytest.raises(UserError, match=f"^{option.name} is {value!r}, it must be "):
                options(**{option.name: value})


def test_every_number_among_the_options_of_rules_and_drafters_has_bounds() -> None:
    numbers = [
        (name, one)
        for (kind, name), options in OPTIONS.items()
        if issubclass(options, MethodOptions)
        for one in fields(options)
        if one.type in ("int", "float", "int | None")
    ]
    assert len(numbers) > 40
    assert [f"{name} {one.name}" for name, one in numbers if "bounds" not in one.metadata] == []


def test_every_option_has_a_sentence_that_the_page_shows() -> None:
    assert [
        f"{name} {one.name}"
        for (_, name), options in OPTIONS.items()
        for one in fields(options)
        if not help_of(options).get(one.name)
    ] == []


@pytest.mark.parametrize(
    ("option", "name"), [(option, name) for option, values in registry.FIXED_OPTIONS.items() for name in values]
)
def test_a_removed_option_is_named_with_its_value(option: str, name: str) -> None:
    assert option not in {
        one.name for (_, method), options in OPTIONS.items() if method == name for one in fields(options)
    }
    [kind] = [kind for kind, method in OPTIONS if method == name]
    with pytest.raises(UserError, match=f"'{option}' .* was removed, leave it out: it is always .* for "):
        registry.check_known({f"a {name}": registry.find(kind, name)}, {option: 1})


def test_its_option_is_a_flag_and_a_row_of_the_table() -> None:
    said = CliRunner().invoke(app, ["methods", NAME], env={"COLUMNS": "160"}).output
    assert "--every 3" in said
    assert NAME in said

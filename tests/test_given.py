"""What a drafter's builder is given: the models and both tokenizers, through the library and in another process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from doubles import Empty
from test_library import folder

from outpace.api.llm import LLM
from outpace.core import registry
from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.engine.build import _rebuild_drafter
from outpace.models.load import Loaded, load_model


@dataclass(frozen=True)
class Options:
    """None."""


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[BuildContext]:
    """What a drafter `asking` of another package was built from."""
    seen: list[BuildContext] = []

    def build(options: Options, *, given: BuildContext) -> Empty:
        if given.tokenizer is None:
            raise UserError("drafter asking needs the target's tokenizer, use worker thread")
        seen.append(given)
        return Empty()

    module = ModuleType("a_package_of_drafters", "Asks what there is.\n\nNo paper.")
    vars(module).update(Options=Options, build=build)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found: Callable[..., Any] = registry.entry_points
    point = SimpleNamespace(name="asking", module=module.__name__)
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [point] if group == "outpace.drafters" else list(found(group=group))
    )
    return seen


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(folder(tmp_path_factory.mktemp("given"), "target"), runtime="llama")


def test_a_builder_is_given_both_models_and_their_tokenizers(
    target: Loaded, given: list[BuildContext], tmp_path: Path
) -> None:
    draft = load_model(folder(tmp_path, "draft"), runtime="llama")
    with LLM(target, draft, method="speculative", drafter="asking"):
        pass
    assert given == [BuildContext(draft.model, target.model, draft.tokenizer, target.tokenizer)]
    with LLM(target, method="speculative", drafter="asking"):
        pass
    assert given[1] == BuildContext(None, target.model, None, target.tokenizer)


def test_in_another_process_there_is_the_draft_alone(target: Loaded, given: list[BuildContext]) -> None:
    with pytest.raises(UserError, match="use worker thread"):
        _rebuild_drafter("asking", lambda: target, 7, {})
    drafter = _rebuild_drafter("model", lambda: target, target.model.vocab_size, {})
    assert drafter.weight_bytes(drafter.sources[0]) == target.model.weight_bytes

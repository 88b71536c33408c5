"""`LLM` from model names, loaded models or both; errors that are raised before a model is loaded."""

from __future__ import annotations

from typing import Any

import pytest
from test_library import folder

import outpace
from outpace.api import pair
from outpace.models.load import Loaded, load_draft, load_model
from outpace.models.options import LoadOptions


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder(tmp_path_factory.mktemp("llm"), "target")


@pytest.fixture(scope="module")
def target(path: str) -> Loaded:
    return load_model(path)


def tokens(llm: outpace.LLM) -> tuple[int, ...]:
    with llm:
        assert llm.target.name
        (result,) = llm.generate("hello hello hello", outpace.SamplingParams(max_tokens=8))
    return result.tokens


def test_models_by_name_or_loaded_or_one_of_each(path: str, target: Loaded) -> None:
    draft = load_draft("layers:0", target)
    made = [
        outpace.LLM(path, "layers:0", method="speculative"),
        outpace.LLM(model=path, draft="layers:0", method="speculative"),
        outpace.load(path, "layers:0", method="speculative"),
        outpace.load(path, "layers:0", LoadOptions(), method="speculative"),
        outpace.LLM(target, draft, method="speculative"),
        outpace.LLM(target, "layers:0", method="speculative"),
        outpace.LLM(path, draft, method="speculative"),
    ]
    assert [llm.draft.name if llm.draft else None for llm in made] == ["layers:0"] * len(made)
    assert len({tokens(llm) for llm in made}) == 1
    alone = outpace.LLM(target), outpace.LLM(target, "none"), outpace.LLM(path)
    assert [llm.draft for llm in alone] == [None] * 3
    for llm in alone:
        llm.close()


def test_repr_names_model_and_method(target: Loaded) -> None:
    with outpace.LLM(target, method="autoregressive") as llm:
        assert repr(llm) == f"<LLM of {target.name} by autoregressive>"
    assert repr(llm) == repr(object.__new__(outpace.LLM)) == "<closed LLM>"


def test_options_of_loading_reach_both_models(path: str) -> None:
    with outpace.LLM(path, path, dtype="float32", draft_dtype="bfloat16") as llm:
        assert llm.draft is not None
        assert (llm.target.precision, llm.draft.precision) == ("float32", "bfloat16")
    with outpace.LLM(path, "none", LoadOptions(dtype="bfloat16"), dtype="float32") as llm:
        assert llm.target.precision == "float32"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float32"}, "dtype is for models that are loaded by name, these are loaded already: leave it out"),
        ({"options": LoadOptions(exact=False)}, "exact is for models that are loaded by name"),
        ({"draft_device": "cpu"}, "draft_device is for models that are loaded by name"),
        ({"tokenizer": object()}, "tokenizer is for models that are loaded by name"),
        ({"model": "x"}, "model is another name for target, give one of them"),
        ({"widht": 3}, "unknown option 'widht' of method auto"),
    ],
)
def test_options_without_a_model_to_load_are_refused(target: Loaded, options: dict[str, Any], says: str) -> None:
    for draft in (None, "none", load_draft("layers:0", target)):
        with pytest.raises(outpace.UserError, match=says):
            outpace.LLM(target, draft, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "crad"}, "unknown method 'crad'"),
        ({"drafter": "model+ngrm"}, "unknown drafter 'ngrm'"),
        ({"rule": "gumble"}, "unknown rule 'gumble'"),
        ({"worker": "proces"}, "unknown worker 'proces'"),
        ({"draft_threads": 0}, "draft_threads is 0"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
    ],
)
def test_option_errors_are_raised_before_a_model_is_loaded(
    options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "load_model", lambda *_, **__: pytest.fail("a model was loaded first"))
    with pytest.raises(outpace.UserError, match=says):
        outpace.LLM("somewhere", **options)

"""How models are loaded: one set of options for the target, and one for its draft, by whatever way they are given."""

from __future__ import annotations

import inspect
import json
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Run
from commands import run as run
from commands import tiny as tiny
from files import model_folder
from test_runtimes import PROMPT
from turns import in_turn

import outpace
from outpace.api.profile import subject
from outpace.cli.generate import generate
from outpace.cli.options import LOAD_FLAGS, ModelFlags
from outpace.core.errors import UserError
from outpace.core.options import help_of
from outpace.engine.options import BuildOptions
from outpace.models.load import Loaded, load_draft, load_model
from outpace.models.options import FLOATS, LoadOptions

METHODS = {
    "chain": {"method": "speculative", "drafter": "model", "width": 1},
    "tree": {"method": "speculative", "drafter": "model"},
    "card": {"method": "card", "drafter": "model", "worker": "inline"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("dtypes", "how"), in_turn([("int8", "float32"), ("float32", "int8"), ("auto", "bfloat16")], METHODS), ids=str
)
def test_a_draft_can_have_its_own_precision(folder: Path, dtypes: tuple[str, str], how: str) -> None:
    for temperature in (0.0, 1.0):
        asked: dict[str, Any] = {"max_tokens": 40, "temperature": temperature, "seed": 3}
        with outpace.load(folder, dtype=dtypes[0], method="autoregressive") as llm:
            plain = llm.generate([PROMPT], **asked)[0]
        with outpace.load(folder, folder, dtype=dtypes[0], draft_dtype=dtypes[1], **METHODS[how]) as llm:
            assert (llm.target.precision, llm.draft.precision) == (dtypes[0].replace("auto", "int8"), dtypes[1])
            assert llm.draft.again().precision == dtypes[1], "a process of its own would load another draft"
            found = llm.generate([PROMPT], **asked)[0]
        assert found.tokens == plain.tokens
        assert found.figures.accepted > 0


def test_the_default_precision_of_a_draft(folder: Path) -> None:
    for dtype in ("int8", "int4", "bfloat16"):
        with outpace.load(folder, folder, dtype=dtype) as llm:
            assert llm.draft.precision == llm.target.precision == dtype
    with outpace.load(folder, folder) as llm:  # what only proposes is held in fewer bits
        assert (llm.target.precision, llm.draft.precision) == ("int8", "int4")


def test_the_flag_draft_dtype(folder: Path, run: Run) -> None:
    with ModelFlags(str(folder), [str(folder)], LoadOptions(draft_dtype="float32")).open({}, quiet=True) as llm:
        assert (llm.target.precision, llm.draft.precision) == ("int8", "float32")
    arguments = ["generate", PROMPT, "--target", str(folder), "--draft", str(folder), "--max-tokens", "4", "--json"]
    code, out, _ = run(*arguments, "--dtype", "float32", "--draft-dtype", "int8")
    assert (code, json.loads(out)["precision"]) == (0, "float32")
    code, _, err = run(*arguments, "--draft-dtype", "int9")
    assert (code, "error: unknown draft_dtype 'int9', allowed are auto, bfloat16" in err) == (2, True)


def test_a_draft_of_layers_has_the_targets_precision_unless_another_is_named(folder: Path) -> None:
    with outpace.load(folder, "layers:0", dtype="float32") as llm:
        assert (llm.draft.name, llm.draft.precision, llm.draft.model.num_layers) == ("layers:0", "float32", 1)
    with outpace.load(folder, "layers:0-1", dtype="float32", draft_dtype="bfloat16") as llm:
        assert (llm.draft.name, llm.draft.precision, llm.draft.model.num_layers) == ("layers:0-1", "bfloat16", 2)
        assert llm.draft.again().model.num_layers == 2


@pytest.mark.parametrize("dtype", ["int8", *FLOATS])
def test_every_model_reports_its_precision(folder: Path, dtype: str) -> None:
    target = load_model(folder, dtype=dtype)
    made_by_hand = Loaded(target.model, target.tokenizer, "by hand")
    assert [one.precision for one in (target, load_draft("layers:0", target), made_by_hand)] == [dtype] * 3
    kind = "NativeLlama  cpu" if dtype == "int8" else f"Llama torch.{dtype} cpu"
    assert subject(target, None)["target"]["kind"] == kind, "profiles of the release before would not be found"
    other = load_model(folder, dtype=dtype, kv_dtype="float32" if dtype == "int8" else "float16")
    assert subject(other, None)["target"]["kind"] == f"{kind} {other.model.kv_dtype}"


def test_options_as_a_record_or_by_name(folder: Path) -> None:
    whole = LoadOptions(runtime="llama", dtype="bfloat16")
    for loaded in (
        load_model(folder, whole),
        load_model(folder, runtime="llama", dtype="bfloat16"),
        load_model(folder, LoadOptions(runtime="llama"), dtype="bfloat16"),
    ):
        assert loaded.precision == "bfloat16"
        assert loaded.again.args == (folder, whole)
    with outpace.load(folder, folder, whole, exact=False) as llm:
        assert [(one.precision, one.model.exact) for one in (llm.target, llm.draft)] == [("bfloat16", False)] * 2
    again = pickle.loads(pickle.dumps(load_draft(folder, llm.target, whole).again))
    assert again().precision == "bfloat16"


def test_the_load_options_of_a_draft() -> None:
    target = LoadOptions(device="cuda:1", dtype="int8", exact=False, trust_remote_code=True)
    expected = LoadOptions(device="cuda:1", dtype="int8", exact=False, trust_remote_code=True)
    assert target.of_draft() == LoadOptions(**vars(target) | {"device_map": "auto"}).of_draft() == expected
    assert replace(target, draft_device="cpu", draft_dtype="float32").of_draft() == LoadOptions(
        exact=False, dtype="float32", trust_remote_code=True
    )


def test_values_of_other_libraries_are_accepted(folder: Path) -> None:
    class Named:
        """A path of yet another library."""

        def __fspath__(self) -> str:
            return str(folder)

    given = LoadOptions(torch.device("cpu"), torch.float32, np.bool_(True), np.str_("llama"), layers=np.str_("0"))
    expected = LoadOptions("cpu", "float32", True, "llama", layers="0")
    assert given == expected
    assert [type(value) for value in vars(given).values()] == [type(value) for value in vars(expected).values()]
    loaded = load_model(Named(), given, layers=None)
    assert (loaded.precision, loaded.name) == ("float32", str(folder))
    draft = load_draft(Named(), loaded, dtype=torch.bfloat16, exact=torch.tensor(False))
    assert (draft.precision, draft.model.exact) == ("bfloat16", False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "int9"}, "unknown dtype 'int9', allowed are .*; did you mean 'int8'"),
        ({"dtype": torch.float64}, "unknown dtype 'float64', allowed are auto, bfloat16, file, float16"),
        ({"dtype": 3}, "unknown dtype '3'"),
        ({"exact": "yes"}, "exact is 'yes', it must be True, False or None"),
        ({"trust_remote_code": "no"}, "trust_remote_code is 'no', it must be True or False"),
        ({"graphs": np.array([1, 2])}, r"unknown graphs '\[1, 2\]', allowed are auto, cuda, eager, off"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(options: dict[str, Any], says: str) -> None:
    for refuse in (LoadOptions, lambda **given: outpace.load("nowhere", **given)):
        with pytest.raises(UserError, match=says):
            refuse(**options)


def test_unknown_option_names_are_refused(folder: Path) -> None:
    with pytest.raises(TypeError, match="runtme"):
        load_model(folder, runtme="llama")
    with pytest.raises(UserError, match="runtme"):
        outpace.load(folder, runtme="llama")
    with pytest.raises(UserError, match=r"option 'tp_plan' .* was removed: use pp_plan"):
        outpace.load(folder, tp_plan="auto")


def test_every_option_of_a_user_has_a_sentence() -> None:
    unnamed = {one.name for record in (LoadOptions, BuildOptions) for one in fields(record)}
    assert unnamed - help_of(LoadOptions).keys() - help_of(BuildOptions).keys() == {
        *("is_draft", "target_files", "part_options", "structured_drafter")
    }


def test_flags_have_the_defaults_of_the_options() -> None:
    flags = inspect.signature(generate).parameters
    for field in fields(LoadOptions):
        assert (field.name in LOAD_FLAGS) == (field.name in flags), field.name
        assert field.name not in flags or flags[field.name].default == field.default

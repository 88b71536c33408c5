"""The examples of CONTRIBUTING.md, installed as a package with entry points would be, keep what the guide promises."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from doubles import DRAFTERS, QuickToy, decode, make_drafter, make_request, write

from outpace.core import registry
from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.types import Drafter, Row, Rule
from outpace.drafters import build_drafter
from outpace.engine.engine import EngineOptions
from outpace.models.llama.config.families import FAMILIES, Family, late_layers

GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
EXAMPLES = {found[1]: block for block in BLOCKS if (found := re.match(r"# (\S+\.py)\n", block))}
METHODS = {"rules": "mirror", "drafters": "bigram", "decoders": "confident"}
TARGET = QuickToy(16, 2, 5)
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
SAMPLED = {"temperature": 0.8, "seed": 7}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with the examples as `my_package`, and the metadata of its installation."""
    inside, metadata = tmp_path / "my_package", tmp_path / "my_package-1.0.dist-info"
    inside.mkdir()
    metadata.mkdir()
    for path, text in EXAMPLES.items():
        (inside / Path(path).name).write_text(text)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    points = [f"[outpace.{kind}]\n{name} = my_package.{name}\n" for kind, name in METHODS.items()]
    (metadata / "entry_points.txt").write_text("\n".join(points))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    registry._fault.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def found(kind: str) -> ModuleType:
    return registry.find(kind, METHODS[kind])


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("kind", METHODS)
def test_a_method_is_listed_with_its_help_and_paper(kind: str) -> None:
    assert METHODS[kind] in registry.names(kind)
    method = registry.describe(kind, METHODS[kind])
    assert method.help
    assert re.search(r"\d{4}", method.paper)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import missing_library", "No module named 'missing_library'"),
        ("raise RuntimeError('no licence')", "no licence"),
        (EXAMPLES["outpace/drafters/bigram.py"].replace("class Options", "class Settings"), "no dataclass Options"),
        ("class Options: ...", "no dataclass Options"),
    ],
)
def test_a_package_that_does_not_load_is_left_out(package: Path, source: str, fault: str) -> None:
    (package / "my_package" / "bigram.py").write_text(source)
    with pytest.warns(UserWarning, match=f"drafter 'bigram' cannot be loaded from my_package.bigram: .*{fault}"):
        assert "bigram" not in registry.names("drafters")
    with pytest.raises(UserError, match=fault):
        registry.find("drafters", "bigram")


def test_the_words_on_a_paper_may_take_several_lines() -> None:
    assert registry.describe("decoders", "auto").paper.endswith("arXiv:2211.17192, section 3.")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_rule_writes_the_same_text_whatever_is_drafted(drafter: str) -> None:
    rule = found("rules")()
    request = make_request(PROMPT, rule, **SAMPLED)
    for method in ("speculative", "auto"):
        outcome = decode([request], method, make_drafter(drafter, TARGET), target=TARGET)
        assert outcome.texts == [write(TARGET, request)]
        assert drafter != "perfect" or outcome.figures.accepted > 0


@pytest.mark.usefixtures("package")
def test_the_rule_draws_from_p() -> None:
    rule = found("rules")()
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]], dtype=torch.float64)
    request = [make_request(PROMPT, rule, temperature=1.0, seed=seed) for seed in range(4000)]
    picks = rule.reduce(logits.expand(len(request), -1), [Row(one, PROMPT) for one in request])
    shares = torch.bincount(torch.tensor(picks), minlength=4) / len(picks)
    assert torch.allclose(shares.double(), torch.softmax(logits[0], 0), atol=0.03)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("rule", ["greedy", "gumbel", "match"])
def test_the_drafter_is_accepted_and_changes_nothing(rule: str) -> None:
    drafter = build_drafter("bigram", BuildContext(), {"run": 3})
    asked = {} if rule == "greedy" else SAMPLED
    requests = [make_request(prompt, rule, 60, **asked) for prompt in (PROMPT, PROMPT[::-1])]
    for method in ("speculative", "auto", "card"):
        worker = "inline" if method == "card" else None
        outcome = decode(requests, method, drafter, worker=worker, target=TARGET)
        assert outcome.texts == [write(TARGET, request) for request in requests]
        assert method != "speculative" or outcome.figures.accepted > 0  # the others verify what pays


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_decoder_writes_the_same_text_and_stops_where_it_is_not_confident(drafter: str) -> None:
    request = make_request(PROMPT, "gumbel", **SAMPLED)
    drafted = []
    for confidence in (0.0, 0.3, 1.0):
        options = {"engine": EngineOptions(nodes=12), "confidence": confidence}
        outcome = decode([request], "confident", make_drafter(drafter, TARGET), target=TARGET, **options)
        assert outcome.texts == [write(TARGET, request)]
        drafted.append(outcome.figures.drafted)
    assert drafted == sorted(drafted, reverse=True)
    assert (drafted[0] > drafted[-1]) == (drafter not in ("empty", "ngram"))  # n-grams come as one branch


@pytest.mark.usefixtures("package")
def test_a_wrong_option_is_named() -> None:
    with pytest.raises(UserError, match="run is 0"):
        found("drafters").Options(run=0)
    with pytest.raises(UserError, match="confidence is 2"):
        found("decoders").Options(confidence=2)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("drafter", ["ngram", "garbage"])
def test_the_model_scores_a_tree_as_it_scores_each_path(drafter: str) -> None:
    model = importlib.import_module("my_package.recent").Recent(16)
    request = make_request(PROMPT, "gumbel", 60, **SAMPLED)
    seen: Counter[int] = Counter()

    class Slow:
        @staticmethod
        def _row(text: list[int]) -> torch.Tensor:
            seen.clear()
            seen.update(text)
            return torch.tensor([seen[token] for token in range(16)], dtype=torch.float64).log1p()

    options = {"target": model, "check_storage": True}
    outcome = decode([request] * 2, "speculative", make_drafter(drafter, QuickToy(16, 2, 99)), **options)
    assert outcome.texts == [write(Slow, request)] * 2  # type: ignore[arg-type]


def test_the_models_script_runs(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(package / "my_package" / "run.py"), run_name="__main__")
    assert len(capsys.readouterr().out.split(",")) == 20


@pytest.mark.parametrize(("contract", "most"), [(Drafter, 9), (Rule, 8)])
def test_a_contract_has_few_names(contract: type, most: int) -> None:
    names = [name for name in {**vars(contract), **contract.__annotations__} if not name.startswith("_")]
    assert len(names) <= most, names


def test_the_entry_of_a_family_is_the_code_s_own() -> None:
    (block,) = [block for block in BLOCKS if block.startswith("Family(")]
    assert eval(block, {"Family": Family, "late_layers": late_layers}) == FAMILIES["qwen3"]

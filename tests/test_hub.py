"""Models on the hub: which files are asked for, and what is said where they cannot be had. The hub is a stand-in, the
cache folder is real."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from files import model_folder, write_gguf

from outpace.core.errors import UserError
from outpace.models.files import find, hub
from outpace.models.files.hub import HubName, choose_files
from outpace.models.load import load_model

errors = pytest.importorskip("huggingface_hub.errors")
constants = pytest.importorskip("huggingface_hub.constants")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = HubName("owner/name")
SHARDED = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
TEXTS = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


class Hub:
    """A repository, and where the library would put what is asked for."""

    def __init__(self, files: list[str], folder: Path) -> None:
        self.files, self.folder = files, folder
        self.config: dict[str, Any] | None = None
        self.asked: dict[str, Any] = {}
        self.error: Exception | None = None

    def model_info(self, repository: str, revision: str | None = None, timeout: float | None = None) -> Any:
        self.asked.update(repository=repository, revision=revision)
        if self.error:
            raise self.error
        siblings = [SimpleNamespace(rfilename=file) for file in self.files]
        return SimpleNamespace(siblings=siblings, config=self.config)

    def snapshot_download(self, repository: str, **options: Any) -> str:
        self.asked.update(options)
        bar = options["tqdm_class"](total=0, unit="B", unit_scale=True, desc="bytes")
        files = options["tqdm_class"](total=2, desc="files")
        bar.total, bar.mininterval = 100, 0
        for _ in range(4):
            bar.update(25)
            files.update(1)
        bar.close()
        return str(self.folder)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Hub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def make(*files: str) -> Hub:
        made = Hub(list(files), tmp_path / "snapshot")
        made.folder.mkdir(exist_ok=True)
        (made.folder / "config.json").write_text("{}")
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: made)
        monkeypatch.setattr("huggingface_hub.snapshot_download", made.snapshot_download)
        return made

    return make


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("owner/name", HubName("owner/name")),
        ("owner/name@v1.0", HubName("owner/name", "v1.0")),
        ("owner/name@refs/pr/3", HubName("owner/name", "refs/pr/3")),
        ("owner/name-GGUF:Q4_K_M", HubName("owner/name-GGUF", None, "Q4_K_M")),
        ("owner/name@main:sub/a-q8_0.gguf", HubName("owner/name", "main", "sub/a-q8_0.gguf")),
    ],
)
def test_names(spec: str, name: HubName) -> None:
    assert hub.parse_name(spec) == name
    assert str(name) == spec
    for other in (
        "name",
        "/owner/name",
        "owner/name/more",
        "owner/name@",
        "owner/name:",
        "owner/name:../../passwd",
    ):
        assert hub.parse_name(other) is None


def test_files_that_are_needed() -> None:
    more = ["README.md", "pytorch_model.bin", "original/params.json", "consolidated.safetensors", "tokenizer.model"]
    assert set(choose_files(NAME, ["model.safetensors", *TEXTS, *more])) == {"model.safetensors", *TEXTS}
    assert set(choose_files(NAME, [*SHARDED, *TEXTS, *more])) == {*SHARDED, *TEXTS}
    both = choose_files(NAME, ["model.safetensors", *SHARDED, *TEXTS, "chat_template.jinja"])
    assert set(both) == {"model.safetensors", *TEXTS, "chat_template.jinja"}
    bare = ["model.safetensors", "config.json", "tokenizer.model", "pytorch_model.bin.index.json"]
    assert set(choose_files(NAME, bare)) == set(bare[:3])
    assert choose_files(NAME, ["a.gguf", "README.md", "mmproj-a.gguf"]) == ["a.gguf"]
    assert "a.gguf" not in choose_files(NAME, ["model.safetensors", "config.json", "a.gguf"])


GGUF = ["name-Q4_K_M.gguf", "name-Q4_K_S.gguf", "name.Q8_0.gguf", "f16/name-f16.gguf"]


def test_gguf_files_by_name() -> None:
    wanted = {"name-Q4_K_M.gguf": 0, "q4_k_m": 0, "Q8_0": 2, "f16/name-f16.gguf": 3, "name-f16.gguf": 3}
    for name, number in wanted.items():
        assert choose_files(HubName("owner/name", None, name), GGUF) == [GGUF[number]]


@pytest.mark.parametrize(
    ("file", "listed", "words"),
    [
        (None, GGUF, r"several GGUF files.*owner/name:f16/name-f16\.gguf.*name-Q4_K_S\.gguf"),
        ("Q4_K", GGUF, "none of its files matches, there are .*Q8_0"),
        ("name", GGUF, "4 of its files match"),
        ("Q4_0", ["model.safetensors", "config.json"], "no GGUF file, leave out ':Q4_0'"),
        (None, ["config.json", "a.bin"], r"pickled weights only \(a\.bin\).*nothing is executed"),
        (None, ["config.json", "model.ckpt"], "pickled weights only"),
        (None, ["README.md"], "neither config.json with safetensors nor a GGUF file"),
        (None, ["model.safetensors"], "neither config.json"),
    ],
)
def test_repositories_that_cannot_be_read(file: str | None, listed: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        choose_files(HubName("owner/name", None, file), listed)


def test_download(stand_in: Callable[..., Hub], capfd: pytest.CaptureFixture[str]) -> None:
    made, stages = stand_in("model.safetensors", *TEXTS, "a [1].json", "pytorch_model.bin"), []
    path = find.resolve("owner/name@v2", progress=lambda stage, fraction: stages.append((stage, fraction)))
    assert path == made.folder
    assert (made.asked["repository"], made.asked["revision"]) == ("owner/name", "v2")
    assert set(made.asked["allow_patterns"]) == {"model.safetensors", *TEXTS, "a [[]1].json"}
    assert stages == [("downloading", fraction) for fraction in (0.25, 0.5, 0.75, 1.0, 1.0)]
    assert capfd.readouterr() == ("", ""), "the bars themselves are not shown"


def test_a_gguf_file_of_the_hub(stand_in: Callable[..., Hub], tmp_path: Path) -> None:
    made = stand_in("tiny-Q8_0.gguf", "tiny-F32.gguf")
    write_gguf(made.folder / "tiny-F32.gguf")
    folder = find.resolve("owner/name:F32", cache=tmp_path / "cache")
    assert made.asked["allow_patterns"] == ["tiny-F32.gguf"]
    assert folder.parent == tmp_path / "cache"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("LocalEntryNotFoundError", "cannot be reached"),
        ("RepositoryNotFoundError", "not on the hub.*hf auth login"),
        ("GatedRepoError", "gated: accept its terms at https://huggingface.co/owner/name"),
        ("RevisionNotFoundError", "no revision 'v9'"),
        ("OfflineModeIsEnabled", "HF_HUB_OFFLINE"),
        ("OSError", "cannot be downloaded"),
    ],
)
@pytest.mark.parametrize("when", ["listing", "downloading"])
def test_the_hub_refuses(
    stand_in: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch, kind: str, words: str, when: str
) -> None:
    def error_of(name: str) -> Exception:
        error = getattr(errors, name, OSError)
        return error.__new__(error)  # type: ignore[no-any-return]

    def refuse(name: str, **options: Any) -> str:
        raise error_of(kind if when == "downloading" else "LocalEntryNotFoundError")

    made = stand_in("model.safetensors", *TEXTS)
    made.error = error_of(kind) if when == "listing" else None
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(UserError, match=words):
        find.resolve("owner/name@v9")


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository's folder in a cache as the library lays it out, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "own"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub" / "models--owner--name"


def put(repository: Path, files: Path) -> Path:
    """Stores files as blobs with links to them in the snapshot, as the library does."""
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for file in files.iterdir():
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def test_out_of_the_cache(offline: Path, tmp_path: Path) -> None:
    snapshot = put(offline, model_folder(tmp_path))
    assert find.resolve("owner/name") == snapshot
    assert find.resolve(f"owner/name@{COMMIT}") == snapshot
    loaded = load_model("owner/name", exact=False)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello")) == "hello"
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        find.resolve("owner/name@other")


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("model.safetensors", r"HF_HUB_OFFLINE.*copy in the cache cannot be used.*neither config\.json"),
        ("config.json", r"HF_HUB_OFFLINE.*copy in the cache cannot be used.*neither config\.json"),
        (SHARDED[1], f"cannot be used.*{SHARDED[1]}"),
        (None, "no folder or file here, HF_HUB_OFFLINE is set"),
    ],
)
def test_an_incomplete_copy_in_the_cache(offline: Path, tmp_path: Path, missing: str | None, words: str) -> None:
    if missing is not None:
        files = model_folder(tmp_path)
        if missing == SHARDED[1]:
            (files / "model.safetensors").rename(files / SHARDED[0])
            (files / SHARDED[2]).write_text(json.dumps({"weight_map": {"a": SHARDED[0], "b": SHARDED[1]}}))
        else:
            (files / missing).unlink()
        put(offline, files)
    with pytest.raises(UserError, match=words):
        find.resolve("owner/name")


def test_a_hub_that_cannot_be_reached(offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ConnectError(Exception):
        """What the library's HTTP client raises; its package differs from version to version."""

    def refuse(*args: Any, **options: Any) -> list[str]:
        raise ConnectError("[Errno 111] Connection refused")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.HfApi.model_info", refuse)
    snapshot = put(offline, model_folder(tmp_path))
    assert find.resolve("owner/name") == snapshot


@pytest.mark.parametrize("runtime", ["auto", "transformers"])
def test_no_network_is_one_quick_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], runtime: str
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    asked, waits = [], []

    def no_network(host: str, *anything: Any, **options: Any) -> Any:
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    monkeypatch.setattr("time.sleep", waits.append)
    with pytest.raises(UserError, match="cannot be reached and no copy was downloaded before"):
        load_model("ownerr/nname", runtime=runtime)
    assert (len(asked), waits) == (1, [])
    assert capfd.readouterr() == ("", "")


def test_transformers_is_given_the_copy_where_there_is_no_network(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    snapshot = put(offline, model_folder(tmp_path))
    loaded = load_model("owner/name", runtime="transformers")
    assert (loaded.name, loaded.model.module.name_or_path) == ("owner/name", str(snapshot))


@pytest.mark.parametrize("runtime", ["auto", "llama", "transformers"])
def test_another_kind_of_model_is_not_downloaded(
    stand_in: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    pytest.importorskip("transformers")
    made = stand_in("model.safetensors", *TEXTS)
    made.config = {"architectures": ["LEDForConditionalGeneration"], "model_type": "led"}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *names, **options: pytest.fail("it is downloaded"))
    with pytest.raises(UserError, match=r"owner/name is a sequence-to-sequence model \(LEDForConditionalGeneration\)"):
        load_model("owner/name", runtime=runtime)

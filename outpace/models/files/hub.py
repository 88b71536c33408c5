"""Models on the Hugging Face hub: which files of a repository are needed, and how they get here, or out of its cache.

A name is owner/name, owner/name@revision, owner/name:file.gguf or owner/name:Q4_K_M.
"""

from __future__ import annotations

import glob
import io
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from outpace.core.errors import UserError, install_command
from outpace.models.files.checkpoint import INDEX, PICKLED, SINGLE
from outpace.models.files.gguf.header import part_files
from outpace.models.files.model_kind import check_kind_of_text
from outpace.models.files.reading import read_json

Progress = Callable[[str, float], None]
NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>\w[\w./-]*))?(:(?P<file>\w[\w./ -]*))?", re.ASCII
)
PLAIN = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)  # a repository's name and nothing more
NO_MODELS = ("mmproj", "imatrix")  # how the names of .gguf files that hold no language model start
TEXTS = (".json", ".jinja")


@dataclass(frozen=True)
class HubName:
    """A repository on the hub; `file` is a .gguf file's name or a part of it, such as Q8_0."""

    repository: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        revision, file = (f"@{self.revision}" if self.revision else ""), (f":{self.file}" if self.file else "")
        return self.repository + revision + file


def parse(spec: str) -> HubName | None:
    """The hub's name in `spec`, None if it is none."""
    found = NAME.fullmatch(spec)
    return HubName(**found.groupdict()) if found else None


def fetch(name: HubName, progress: Progress) -> Path:
    """The model's folder, or its .gguf file, in the hub's cache; what is missing there is downloaded.

    Without a network the cache alone is asked. UserError: no such repository, gated, no causal language model, no file
    that can be read, several GGUF files and none named, or nothing here and no network.
    """
    found = _ask(name)
    if isinstance(found, Exception):
        return _from_cache(name, found)
    from huggingface_hub import snapshot_download

    files = choose(name, found)
    bars = _bars(progress)
    try:
        patterns = [glob.escape(file) for file in files]
        folder = snapshot_download(name.repository, revision=name.revision, allow_patterns=patterns, tqdm_class=bars)
    except Exception as error:
        raise UserError(_reason(name, error)) from error
    return _found(Path(folder), files)


def cached(name: HubName) -> Path | None:
    """The repository's folder in the hub's cache where the hub gives no answer; None where it does.

    UserError where neither has it, or where it holds no causal language model.
    """
    found = _ask(name)
    return _snapshot(name, found) if isinstance(found, Exception) else None


def _ask(name: HubName) -> list[str] | Exception:
    """The repository's files, or why the hub does not tell. UserError if they are no causal language model's.

    One request of a few seconds: `list_repo_files` tries six times, half a minute long, where there is no network.
    """
    try:
        from huggingface_hub import HfApi, constants
    except ImportError:
        raise UserError(
            f"{str(name)!r} is no folder or file here, and a hub id needs `{install_command('hub')}`"
        ) from None
    try:
        info = HfApi().model_info(name.repository, revision=name.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # connection, proxy, and HTTP errors share no base class
        return error
    check_kind_of_text(info.config or {}, name)
    return [file.rfilename for file in info.siblings or ()]


def choose(name: HubName, listed: Sequence[str]) -> list[str]:
    """Those of a repository's files that are needed; UserError if there is no model among them that can be read."""
    top = sorted(file for file in listed if "/" not in file)
    gguf = sorted(file for file in listed if file.endswith(".gguf") and not Path(file).name.startswith(NO_MODELS))
    gguf = [file for file in gguf if _parts(file)[0] == file]  # a model in several files goes by the first
    if name.file is not None:
        return _whole(name, _gguf_named(name, gguf), listed)
    weights = [file for file in top if file.endswith(".safetensors") and not file.startswith("consolidated")]
    if SINGLE in weights:
        weights = [SINGLE]
    if "config.json" in top and weights:
        texts = [file for file in top if file.endswith(TEXTS) and (file != INDEX or weights != [SINGLE])]
        tokenizer = ["tokenizer.model"] if "tokenizer.model" in top and "tokenizer.json" not in top else []
        return [file for file in [*weights, *texts, *tokenizer] if not file.endswith(".bin.index.json")]
    if len(gguf) == 1:
        return _whole(name, gguf[0], listed)
    if gguf:
        raise UserError(f"{name} holds several GGUF files, name one as in {name}:{gguf[0]}: {', '.join(gguf)}")
    if pickled := [file for file in top if file.endswith(PICKLED)]:
        rule = "reading them can run any code and nothing is executed from a file; look for a revision with safetensors"
        raise UserError(f"{name} holds pickled weights only ({pickled[0]}): {rule}")
    raise UserError(f"{name} holds neither config.json with safetensors nor a GGUF file")


def _parts(file: str) -> list[str]:
    """All files of the model that this .gguf file is, or is a part of, in a repository's terms."""
    return [str(part) for part in part_files(PurePosixPath(file))]


def _whole(name: HubName, file: str, listed: Sequence[str]) -> list[str]:
    """A .gguf file with its further parts; UserError where the repository lacks one."""
    parts = _parts(file)
    missing = next((part for part in parts if part not in listed), None)
    if missing is not None:
        raise UserError(f"{name} holds {file} and no {missing}, which is a part of the same model")
    return parts


def _gguf_named(name: HubName, gguf: Sequence[str]) -> str:
    """The one file of that name, or the only one that has it between its dots and dashes."""
    wanted = name.file or ""
    if wanted in gguf:
        return wanted
    apart = rf"(?:.*[./-])?{re.escape(wanted.lower())}(?:[.-].*)?"
    fitting = [file for file in gguf if re.fullmatch(apart, file.lower())]
    if len(fitting) == 1:
        return fitting[0]
    if not gguf:
        raise UserError(f"{name.repository} holds no GGUF file, leave out {':' + str(name.file)!r}")
    said = f"{len(fitting)} of its files match" if fitting else "none of its files matches"
    raise UserError(f"{name} names no GGUF file: {said}, there are {', '.join(fitting or gguf)}")


def _from_cache(name: HubName, error: Exception) -> Path:
    """What an earlier download left; the reason why the hub was of no help is told if that is not enough."""
    path = _snapshot(name, error)
    listed = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
    try:
        return _found(path, choose(name, listed))
    except UserError as incomplete:
        raise UserError(f"{_reason(name, error)}; its copy in the cache cannot be used: {incomplete}") from error


def _snapshot(name: HubName, error: Exception) -> Path:
    """The folder that an earlier download left; UserError says why there is none."""
    from huggingface_hub import snapshot_download

    try:
        # No pattern: all that is here may be used, what is needed of it is checked by whoever reads it.
        folder = snapshot_download(name.repository, revision=name.revision, local_files_only=True, allow_patterns=[])
    except Exception:
        raise UserError(_reason(name, error)) from error
    return Path(folder)


def _found(folder: Path, files: Sequence[str]) -> Path:
    """The folder, checked for the shards that its index names; or the .gguf file."""
    if files[0].endswith(".gguf"):
        return folder / files[0]
    if INDEX in files:
        shards = read_json(folder / INDEX).get("weight_map")
        named = set(shards.values()) if isinstance(shards, dict) else set()
        missing = sorted(shard for shard in named if isinstance(shard, str) and not (folder / shard).is_file())
        if missing:
            raise UserError(f"{folder} holds no {missing[0]}, which {INDEX} names")
    return folder


def _reason(name: HubName, error: Exception) -> str:
    """One sentence for what the hub's library raised."""
    from huggingface_hub import errors

    said = f"{str(name)!r} is no folder or file here"
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its terms at https://huggingface.co/{name.repository}, then `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{said} and not on the hub; if it is private, log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name.repository} has no revision {name.revision!r} on the hub"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{said}, HF_HUB_OFFLINE keeps the hub out, and no copy was downloaded before"
    # the HTTP client that raises it is another package from version to version of the hub's library
    if isinstance(error, errors.LocalEntryNotFoundError) or "Connect" in type(error).__name__:
        return f"{said}, the hub cannot be reached and no copy was downloaded before"
    words = " ".join(str(error).split())
    return f"{name} cannot be downloaded ({type(error).__name__}: {words:.300})"


def _bars(progress: Progress) -> Any:
    """A class that the hub's library takes for a progress bar; the bytes that it counts go to `progress`."""
    from tqdm import tqdm

    lock, most = threading.Lock(), [0.0]

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.counts_bytes = options.get("unit") == "B"
            options.pop("name", None)
            super().__init__(*args, **{**options, "file": io.StringIO(), "disable": False})

        def display(self, *args: Any, **options: Any) -> bool:
            """Totals grow while files are found, and two bars count the same bytes: never step back."""
            if self.counts_bytes and self.total:
                with lock:
                    most[0] = max(most[0], min(1.0, self.n / self.total))
                    progress("downloading", most[0])
            return True

    return Bar

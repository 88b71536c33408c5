"""Selects, downloads and finds in its cache the files of a Hugging Face hub model.

A name is owner/name, owner/name@revision, owner/name:file.gguf or owner/name:Q4_K_M.
"""

from __future__ import annotations

import glob
import io
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from outpace.core.errors import UserError, install_command
from outpace.models.files.checkpoint import INDEX, PICKLED, SINGLE, other_contents, read_index
from outpace.models.files.gguf.header import part_files
from outpace.models.files.model_kind import check_text_model
from outpace.models.files.tokenizer_folder import MORE_TEMPLATES
from outpace.models.options import Progress

NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>\w[\w./-]*))?(:(?P<file>\w[\w./ -]*))?", re.ASCII
)
NO_MODELS = ("mmproj", "imatrix")  # prefixes of .gguf files without a language model
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


def parse_name(spec: str) -> HubName | None:
    """Parse `spec` as a hub name; None if it is none."""
    found = NAME.fullmatch(spec)
    return HubName(**found.groupdict()) if found else None


def fetch(name: HubName, progress: Progress) -> Path:
    """Return the model's folder, or its .gguf file, in the hub's cache, after downloading missing files.

    Without a network only the cache is used. Raises UserError: no such repository, gated, no causal language model, no
    readable file, several GGUF files and none named, or neither cached nor reachable.
    """
    found = _ask(name)
    if isinstance(found, list):
        files = choose_files(name, found)
        options = {"allow_patterns": [glob.escape(file) for file in files], "tqdm_class": _progress_bar(progress)}
        return _found(_snapshot(name, None, **options), files)
    path = _snapshot(name, found)  # what an earlier download left
    listed = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
    try:
        return _found(path, choose_files(name, listed))
    except UserError as incomplete:
        raise UserError(f"{_reason(name, found)}; its copy in the cache cannot be used: {incomplete}") from found


def cached_snapshot(name: HubName) -> Path | None:
    """Return the repository's folder in the hub's cache if the hub does not answer; None if it does.

    Raises UserError if neither has it, or if it holds no causal language model.
    """
    found = _ask(name)
    return _snapshot(name, found) if isinstance(found, Exception) else None


def _ask(name: HubName) -> list[str] | Exception:
    """Return the repository's files, or the exception if the hub does not answer. UserError if it is no causal language
    model.

    This is one request of a few seconds: `list_repo_files` retries six times, for half a minute without a network.
    """
    try:
        from huggingface_hub import HfApi, constants
    except ImportError:
        raise UserError(f"{str(name)!r} is no file here, and a hub id needs `{install_command('hub')}`") from None
    try:
        info = HfApi().model_info(name.repository, revision=name.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # connection, proxy, and HTTP errors share no base class
        return error
    check_text_model(info.config or {}, name)
    return [file.rfilename for file in info.siblings or ()]


def _snapshot(name: HubName, reason: Exception | None, **options: Any) -> Path:
    """Return the repository's folder in the hub's cache, after a download unless `reason` says why there is none.

    From the cache any file may be used; missing ones are reported when they are read.
    """
    from huggingface_hub import snapshot_download

    options = options or {"local_files_only": True, "allow_patterns": []}
    try:
        return Path(snapshot_download(name.repository, revision=name.revision, **options))
    except Exception as error:
        raise UserError(_reason(name, reason or error)) from error


def choose_files(name: HubName, listed: Sequence[str]) -> list[str]:
    """Select the files needed from a repository; UserError if there is no readable model among them."""
    top = sorted(file for file in listed if "/" not in file)
    gguf = sorted(file for file in listed if file.endswith(".gguf") and not Path(file).name.startswith(NO_MODELS))
    gguf = [file for file in gguf if _parts(file)[0] == file]  # a model in several files is named by its first
    if name.file is not None:
        return _check_parts(name, _gguf_named(name, name.file, gguf), listed)
    weights = [file for file in top if file.endswith(".safetensors") and not file.startswith("consolidated")]
    if SINGLE in weights:
        weights = [SINGLE]
    if "config.json" in top and weights:
        texts = [file for file in top if file.endswith(TEXTS) and (file != INDEX or weights != [SINGLE])]
        tokenizer = ["tokenizer.model"] if "tokenizer.model" in top and "tokenizer.json" not in top else []
        templates = sorted(file for file in listed if PurePosixPath(file).parent == PurePosixPath(MORE_TEMPLATES))
        return [file for file in [*weights, *texts, *templates, *tokenizer] if not file.endswith(".bin.index.json")]
    if len(gguf) == 1:
        return _check_parts(name, gguf[0], listed)
    if gguf:
        raise UserError(f"{name} holds several GGUF files, name one as in {name}:{gguf[0]}: {', '.join(gguf)}")
    if pickled := [file for file in top if file.endswith(PICKLED)]:
        rule = "reading them can run any code and nothing is executed from a file; look for a revision with safetensors"
        raise UserError(f"{name} holds pickled weights only ({pickled[0]}): {rule}")
    found = other_contents(listed)
    raise UserError(f"{name} holds neither config.json with safetensors nor a GGUF file{f'; {found}' if found else ''}")


def _parts(file: str) -> list[str]:
    """List all files of a .gguf model from the name of one of them."""
    return [str(part) for part in part_files(PurePosixPath(file))]


def _check_parts(name: HubName, file: str, listed: Sequence[str]) -> list[str]:
    """List a .gguf file with its other parts; UserError if the repository lacks one."""
    parts = _parts(file)
    missing = next((part for part in parts if part not in listed), None)
    if missing is not None:
        raise UserError(f"{name} holds {file} and no {missing}, which is a part of the same model")
    return parts


def _gguf_named(name: HubName, wanted: str, gguf: Sequence[str]) -> str:
    """Return the file with this name, or the only one that contains it between dots and dashes."""
    if wanted in gguf:
        return wanted
    pattern = rf"(?:.*[./-])?{re.escape(wanted.lower())}(?:[.-].*)?"
    fitting = [file for file in gguf if re.fullmatch(pattern, file.lower())]
    if len(fitting) == 1:
        return fitting[0]
    if not gguf:
        raise UserError(f"{name.repository} holds no GGUF file, leave out {':' + wanted!r}")
    found = f"{len(fitting)} of its files match" if fitting else "none of its files matches"
    raise UserError(f"{name} names no GGUF file: {found}, there are {', '.join(fitting or gguf)}")


def _found(folder: Path, files: Sequence[str]) -> Path:
    """Return the folder, after checking the shards that its index names, or the .gguf file."""
    if files[0].endswith(".gguf"):
        return folder / files[0]
    if INDEX in files:
        missing = sorted(shard for shard in set(read_index(folder / INDEX).values()) if not (folder / shard).is_file())
        if missing:
            raise UserError(f"{folder} holds no {missing[0]}, which {INDEX} names")
    return folder


def _reason(name: HubName, error: Exception) -> str:
    """Describe in one sentence what the hub's library raised."""
    from huggingface_hub import errors

    missing = f"{str(name)!r} is no folder or file here"
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its terms at https://huggingface.co/{name.repository}, then `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{missing} and not on the hub; if it is private, log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name.repository} has no revision {name.revision!r} on the hub"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{missing}, HF_HUB_OFFLINE is set, and no copy was downloaded before"
    # the hub's library has changed its HTTP client between versions
    if isinstance(error, errors.LocalEntryNotFoundError) or "Connect" in type(error).__name__:
        return f"{missing}, the hub cannot be reached and no copy was downloaded before"
    words = " ".join(str(error).split())
    return f"{name} cannot be downloaded ({type(error).__name__}: {words:.300})"


def _progress_bar(progress: Progress) -> Any:
    """Return a progress-bar class for the hub's library that reports bytes to `progress`."""
    from tqdm import tqdm

    lock, most = threading.Lock(), 0.0

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.counts_bytes = options.get("unit") == "B"
            options.pop("name", None)
            super().__init__(*args, **{**options, "file": io.StringIO(), "disable": False})

        def display(self, *args: Any, **options: Any) -> bool:
            """Report the largest fraction so far: totals grow, and two bars count the same bytes."""
            nonlocal most
            if self.counts_bytes and self.total:
                with lock:
                    most = max(most, min(1.0, self.n / self.total))
                    progress("downloading", most)
            return True

    return Bar

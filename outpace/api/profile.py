"""Profiles: what the cost model learnt about a pair of models on a machine, stored in the user's cache folder."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from outpace.core import machine, registry
from outpace.core.arrays import num_cores, num_threads
from outpace.core.errors import UserError
from outpace.core.types import Drafter
from outpace.models.files.cache import entry_path, lazy_sha256, new_file
from outpace.models.load import Loaded
from outpace.models.options import AUTO
from outpace.planning.cost_model import CostModel

VERSION = 8  # of fields and their meaning; part of the file name, so that other versions' profiles are not read
FEWEST = 50  # rounds that make a profile worth storing
_LARGEST = 1e6  # no time in seconds, row count or share is greater
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
FIELDS: dict[str, Any] = {
    "plain": dict,
    "rounds": dict,
    "draft": dict,
    "trust": dict,
    "acceptance": dict,
    "drafters": dict,
    "method": (str, type(None)),
}


def subject(target: Loaded, draft: Loaded | None) -> dict[str, Any]:
    """Return the identity of a profile: everything known in advance on which speeds and acceptance depend."""
    others = {"others": [_model(other) for other in draft.others]} if draft and draft.others else {}
    return {
        "version": VERSION,
        "target": _model(target),
        "draft": _model(draft) if draft else None,
        "processor": machine.processor(),
        "cores": num_cores(),
        "threads": num_threads(),
        **others,
    }


def path_of(about: Mapping[str, Any], cache: Path | None = None) -> Path:
    """Return the path of the profile with this identity."""
    name = lazy_sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    return entry_path(f"profiles/{name}.json", cache)


def read(about: Mapping[str, Any], cache: Path | None = None) -> dict[str, Any] | None:
    """Return the stored profile or None. A damaged one, or one of another identity, is deleted with a warning."""
    path = path_of(about, cache)
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
        if found["about"] != json.loads(json.dumps(about)):
            raise ValueError("it describes another pair or machine")
        return _checked(found["learnt"])
    except FileNotFoundError:
        return None
    except (OSError, *_DAMAGED) as error:
        _discard(path, error)
        return None


def write(about: Mapping[str, Any], learnt: Mapping[str, Any], cache: Path | None = None) -> Path | None:
    """Store a profile atomically; return None if the folder cannot be written or `read` would refuse the values."""
    path = path_of(about, cache)
    try:
        text = json.dumps({"about": about, "learnt": learnt}, indent=1, allow_nan=False)
        _checked(json.loads(text)["learnt"])
        with new_file(path) as part:
            part.write_text(text, encoding="utf-8")
    except (UserError, ValueError):  # a full or read-only disk must not end this run
        return None
    return path


class Profile:
    """The profile of a pair of models while an engine runs them."""

    def __init__(self, about: Mapping[str, Any], cache: Path | None = None) -> None:
        self._about, self._cache = about, cache
        self._known = read(about, cache)

    @property
    def method(self) -> str | None:
        """The method that tuning found best, or None if the pair was not tuned."""
        return self._known["method"] if self._known else None

    def load(self, costs: CostModel, drafters: Iterable[Drafter]) -> bool:
        """Load what is stored into the cost model and the drafters; return whether anything was."""
        if self._known is None:
            return False
        costs.load_state_dict(self._known)
        refused = []
        for drafter in drafters:
            kept, learnt = self._known["drafters"].get(drafter.name), drafter.capabilities.learnt
            if kept is not None and learnt is not None:
                try:
                    learnt.load_state_dict(kept)
                except _DAMAGED as error:
                    refused.append(f"drafters.{drafter.name}: {error}")
        if refused:
            _discard(path_of(self._about, self._cache), "; ".join(refused))
        return True

    def save(self, costs: CostModel, drafters: Iterable[Drafter], tuned: str | None = None) -> Path | None:
        """Store what was learnt if there were enough rounds. `tuned`: the method that was found best."""
        if costs.num_rounds < FEWEST:
            return None
        learnt = costs.state_dict() | {"method": tuned or self.method, "drafters": {}}
        for drafter in drafters:
            if (own := drafter.capabilities.learnt) is not None:
                learnt["drafters"][drafter.name] = own.state_dict()
        return write(self._about, learnt, self._cache)


def _discard(path: Path, reason: object) -> None:
    """Delete a profile that cannot be used, so that the warning about it is not repeated at every start."""
    try:
        path.unlink()
        what = "was deleted"
    except OSError:
        what = "is ignored"
    warnings.warn(f"the stored speeds in {path} are damaged ({reason}); the file {what}", stacklevel=3)


def _model(loaded: Loaded) -> dict[str, Any]:
    """Return a model's name, sizes and runtime."""
    model, config = loaded.model, loaded.config
    sizes = {key: config[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size") if key in config}
    held, usual = getattr(model, "kv_dtype", AUTO), getattr(model, "usual_kv", "float32")
    kind = f"{type(model).__name__} {model.dtype or ''} {model.device}" + ("" if held in (AUTO, usual) else f" {held}")
    return {"name": loaded.name, "kind": kind, **sizes}


def _checked(learnt: Any) -> dict[str, Any]:
    """Return the profile if it is well-formed; ValueError otherwise."""
    if not isinstance(learnt, dict) or set(learnt) != set(FIELDS):
        raise ValueError("its fields are not those of this version")
    for name, kind in FIELDS.items():
        if not isinstance(learnt[name], kind):
            raise ValueError(f"{name} is of the wrong kind")
    if learnt["method"] is not None and learnt["method"] not in registry.names("decoders"):
        raise ValueError(f"there is no method {learnt['method']!r:.80}")
    curves = [learnt["plain"], learnt["rounds"], *learnt["draft"].values()]
    if not all(_is_positive(value) for curve in curves for value in [*curve.values(), *map(int, curve)]):
        raise ValueError(f"a time or a row count is not a number above 0 and up to {_LARGEST:g}")
    levels = learnt["acceptance"].values()
    is_by_level = all(isinstance(values, list) and values for values in levels)
    if not is_by_level or not all(map(_is_number, [*learnt["trust"].values(), *chain(*levels)])):
        raise ValueError(f"trust or acceptance is not a number from 0 to {_LARGEST:g}")
    return learnt


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number")


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LARGEST

"""Finds a method by its file's name: `drafters/foo.py` is the drafter `foo`, and there is no other list.

The file of a rule or a decoder holds a subclass of `Rule` or `Decoder`; that of a drafter a subclass of `Drafter`, an
`Options` dataclass and, if the class needs more than these, a function `build`. The first line of its docstring is its
help, the second paragraph cites its paper.
Files that begin with an underscore, and `base`, are not methods. Other packages register modules of the same shape
under the entry-point groups `outpace.rules`, `outpace.drafters`, `outpace.decoders` and `outpace.heads`. The last are
the kinds of trained heads, classes in `models/heads/kinds` that are no methods of their own.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType, NoneType
from typing import Any, get_args, get_type_hints

from outpace.core.errors import UserError, unknown
from outpace.core.options import help_of
from outpace.core.tree import Siblings

DRAFT_MODEL = "a draft model"  # needed by drafters that run one
ON_TARGET = "no other model"  # needed by drafters that run the target's own layers
KINDS = ("decoders", "drafters", "rules")
_DRAFTING = {None: "no drafter", "sequential": "a drafter", "parallel": "a drafter in parallel with the target"}
_DRAFTS = {  # by a rule's traits siblings and several_draws
    (Siblings.PICKED, False): "any drafts",
    (Siblings.DRAWN, False): "a chain drawn from q, or picked drafts",
    (Siblings.DRAWN, True): "children drawn independently from q, or picked drafts",
    (Siblings.WITHOUT_REPLACEMENT, True): "children drawn from q without replacement, or picked drafts",
}
_CALLED = {"decoders": "method", "drafters": "drafter", "heads": "kind of head", "rules": "rule"}
_FOLDERS = {"heads": "models.heads.kinds"}  # where it is not the name of the kind
REMOVED_NAMES = {  # for one release: what to do instead
    ("drafters", "recycle"): "use suffix or ngram, which gain more on each measured kind of text",
    ("flags", "--pack"): "leave it out, a draft is stored whole",
    ("flags", "--unpack"): "name the packed draft, whose embeddings are read from its target, or write it by --gguf",
    ("flags", "--train"): "use the shares `optimal`, which need no training and gain more",
    ("flags", "--train-minutes"): "use the shares `optimal`, which need no training and gain more",
    ("flags", "--policy"): "use the shares `optimal`, which need no training and gain more",
    ("flags", "--glancing"): "leave it out, blocks are trained on masks only, as DSpark's are",
    ("flags", "--markdown"): "docs/methods.md has the whole list, and --json prints it",
    ("flags", "--url"): "open the server's address in a browser, which shows a chat page",
    ("flags", "--overhead"): "leave it out, or count it in --verify",
    ("flags", "--compare"): "compare the rows.json of the two folders of --out",
    ("flags", "--channel"): "leave it out, the channel is always that of 3GPP TR 38.901, UMi street canyon",
    ("flags", "--scenario"): "leave it out, the scenario is always UMi, a street canyon",
    ("flags", "--rate"): "leave it out, a link's rate is always log2(1 + SNR)",
    ("flags", "--inflate"): "use bench/gpu.py, which measures a target widened to 8B or 32B",
    ("flags", "--tp-plan"): "use pp_plan or device_map, which split a model by layers",
}
_DEFINES = {
    "decoders": "decode",
    "drafters": "grow",
    "rules": "walk",
}  # the method by which a file's class is found

# Options that became constants, with their values by method. For one release, so that those who set one learn of it.
FIXED_OPTIONS: dict[str, dict[str, str]] = {
    "acceptance_target": {"layer_skip": "0.9"},
    "ahead": {"prediction": "32"},
    "confidence_step": {"layer_skip": "0.01"},
    "confident": {"speculative": "0.4"},
    "copies": {"retrieval": "16", "suffix": "32"},
    "depth": {"suffix": "64"},
    "doubt": {"speculative": "0.3"},
    "floor": {"ouroboros": "0.005"},
    "followers": {"ouroboros": "8"},
    "forced": {"grammar": "24"},
    "from_text": {"lookahead": "true"},
    "leaders": {"ouroboros": "32768"},
    "least_chance": {"cacheback": "0.02", "ngram": "0", "retrieval": "0.1", "suffix": "0.05"},
    "leaves": {"grammar": "4"},
    "longest": {"retrieval": "16"},
    "most": {"bild": "10"},
    "offered": {"cacheback": "64", "retrieval": "64", "suffix": "24"},
    "places": {"ngram": "8", "retrieval": "16", "suffix": "16"},
    "shortest": {"retrieval": "2"},
    "skip_every": {"layer_skip": "4"},
    "skip_window": {"layer_skip": "50"},
    "suffixes": {"ouroboros": "3"},
    "window": {"ngram": "65536", "suffix": "65536"},
}


@dataclass(frozen=True)
class Method:
    """One row of the table of methods."""

    kind: str
    name: str
    help: str
    paper: str
    lossless: bool | None  # None for drafters: proposals never change the text
    options: tuple[str, ...]
    needs: str = ""
    cost: str = ""
    about: Mapping[str, str] = field(default_factory=dict)  # help of the options, by name


def names(kind: str) -> list[str]:
    """Return the names of all methods of one kind, sorted. Methods of other packages that cannot be loaded are left
    out, with a warning."""
    package = importlib.import_module(_package(kind))
    others = {point.name for point in _registered(kind) if _fault(kind, point.name, point.module) is None}
    return sorted(_files(tuple(package.__path__)) | others)


def _package(kind: str) -> str:
    return f"outpace.{_FOLDERS.get(kind, kind)}"


@lru_cache
def _files(folders: tuple[str, ...]) -> frozenset[str]:
    """Return the methods whose files are in these folders; cached, because every request looks up its rule."""
    found = (module.name for module in pkgutil.iter_modules(folders))
    return frozenset(name for name in found if name != "base" and not name.startswith("_"))


def find(kind: str, name: str) -> Any:
    """Return the module of a drafter or kind of head, or the class of a decoder or rule; UserError if there is none."""
    module = _module(kind, name)
    return module if kind in ("drafters", "heads") else _own_class(kind, module)


def _own_class(kind: str, module: ModuleType) -> Any:
    """Return the class of a method that its module defines: not one from which another of its classes inherits."""
    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    found = [value for value in own if isinstance(value, type) and hasattr(value, _DEFINES[kind])]
    for one in found:
        if not any(one in other.__mro__[1:] for other in found):
            return one
    raise UserError(f"module {module.__name__} defines no class with a method {_DEFINES[kind]}")


def drafter_class(name: str) -> Any:
    """Return the class that a drafter's module defines; raise UserError if there is none."""
    return _own_class("drafters", _module("drafters", name))


def _module(kind: str, name: str) -> ModuleType:
    for point in _registered(kind):
        if point.name == name:
            if fault := _fault(kind, name, point.module):
                raise UserError(fault)
            return importlib.import_module(point.module)
    if name not in names(kind):
        if instead := REMOVED_NAMES.get((kind, name)):
            raise UserError(f"{_CALLED[kind]} {name!r} was removed: {instead}")
        raise unknown(_CALLED[kind], str(name), names(kind))
    return importlib.import_module(f"{_package(kind)}.{name}")


@lru_cache
def _fault(kind: str, name: str, module: str) -> str | None:
    """Import a method of another package; if that fails, warn and return the reason."""
    try:
        found = importlib.import_module(module)
        if kind == "drafters" and not is_dataclass(getattr(found, "Options", None)):
            raise TypeError("it has no dataclass Options")
    except Exception as error:  # whatever its code raises
        fault = f"{_CALLED[kind]} {name!r} cannot be loaded from {module}: {type(error).__name__}: {error}"
        warnings.warn(fault, stacklevel=2)
        return fault
    return None


def _registered(kind: str) -> Sequence[EntryPoint]:
    """Return what other packages registered; cached by search path, because a look-up takes milliseconds."""
    return _look_up(f"outpace.{kind}", entry_points, tuple(sys.path))


@lru_cache
def _look_up(group: str, look: Callable[..., Iterable[EntryPoint]], path: tuple[str, ...]) -> Sequence[EntryPoint]:
    return tuple(look(group=group))


def describe(kind: str, name: str) -> Method:
    """Return a method's row in the table of methods."""
    module, method = _module(kind, name), find(kind, name)
    lines = (module.__doc__ or "").strip().splitlines()
    paper = " ".join("\n".join(lines[1:]).strip().partition("\n\n")[0].split())
    cls, options = _own_class(kind, module), option_names(method)
    lossless, cost = None, cls.capabilities.cost if kind == "drafters" else cls.cost
    if kind != "drafters":
        lossless = cls.lossless if kind == "decoders" else cls.traits.lossless
    return Method(
        kind=kind,
        name=name,
        help=lines[0].rstrip("."),
        paper=paper,
        lossless=lossless,
        options=options,
        needs=_needs(kind, cls),
        cost=cost,
        about=help_of(method.Options),
    )


def _needs(kind: str, method: Any) -> str:
    """Describe what a method needs, given its class."""
    if kind == "decoders":
        return _DRAFTING[method.drafting]
    if kind == "drafters":
        has = method.capabilities
        return ON_TARGET if has.needs.session else DRAFT_MODEL if has.runs_model else "no model"
    traits = method.traits
    return (
        "q after every token, from a draft model"
        if traits.q_at_leaves
        else _DRAFTS[traits.siblings, traits.several_draws]
    )


def option_names(module: Any) -> tuple[str, ...]:
    """Return the names of a method's options, as `name=default`."""
    return tuple(f"{f.name}={'?' if f.default is MISSING else f.default}" for f in fields(module.Options))


def build_options(module: Any, values: Mapping[str, Any]) -> Any:
    """Build the method's Options from the `values` that it knows; strings are converted to the option's type."""
    kinds = get_type_hints(module.Options)
    known = _fields(module)
    return module.Options(**{n: _read(n, kinds[n], values[n]) for n in values if n in known})


def check_known(modules: Mapping[str, Any], values: Mapping[str, Any], unnamed: Sequence[Any] = ()) -> None:
    """Raise UserError for a value that no chosen method has an option for: nothing is ignored silently.

    `unnamed` are methods in use that the user did not name; their options are known too.
    """
    allowed = set[str]().union(*map(_fields, (*modules.values(), *unnamed)))
    for name in values:
        if name not in allowed:
            raise _unknown_option(name, allowed, modules)


def check_kept(name: str, methods: Iterable[str] | None = None) -> None:
    """Raise UserError for an option that was removed from these methods (None: from all that had it), with the value
    that it has now or what to do instead."""
    if instead := REMOVED_NAMES.get(("flags", _flag(name))):
        raise UserError(f"option {name!r} ({_flag(name)}) was removed: {instead}")
    values = FIXED_OPTIONS.get(name, {})
    chosen = values.keys() if methods is None else values.keys() & set(methods)
    if chosen and (methods is not None or not owners(name)):
        fixed = " and ".join(f"{values[method]} for {method}" for method in sorted(chosen))
        raise UserError(f"option {name!r} ({_flag(name)}) was removed, leave it out: it is always {fixed}")


def owners(option: str) -> list[str]:
    """List the methods, drafters and rules that have an option of this name, grouped by kind."""
    having = {kind: [n for n in names(kind) if option in _fields(find(kind, n))] for kind in KINDS}
    return [f"{_CALLED[kind]} {', '.join(found)}" for kind, found in having.items() if found]


def _fields(module: Any) -> set[str]:
    return {field.name for field in fields(module.Options)}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _unknown_option(name: str, allowed: Iterable[str], modules: Iterable[str]) -> UserError:
    """Say which methods have the option, if any, and how it is written on the command line. UserError for one that was
    removed."""
    check_kept(name)
    check_kept(name, [module.rpartition(" ")[2] for module in modules])
    has, chosen = owners(name), ", ".join(modules)
    if not has:
        return unknown("option", name, allowed, of=chosen)
    return UserError(f"unknown option {name!r} ({_flag(name)}) of {chosen}; it belongs to {' and '.join(has)}")


def _read(name: str, kind: Any, value: Any) -> Any:
    if not isinstance(value, str) or kind is str:
        return value
    kind = next((one for one in get_args(kind) if one is not NoneType), kind)  # the option may be None
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise UserError(f"{name} is {value!r}, it must be true or false")
        return value.lower() == "true"
    try:
        return kind(value)
    except ValueError:
        raise UserError(f"{name} is {value!r}, it must be a number ({kind.__name__})") from None

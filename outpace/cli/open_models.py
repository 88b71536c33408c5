"""Opens the models of a command. With --target grpc://HOST:PORT only the draft is loaded here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from outpace.cli import display
from outpace.core.errors import UserError, require

if TYPE_CHECKING:
    from outpace.api.llm import LLM
    from outpace.cli.options import ModelFlags
    from outpace.cluster.remote_target import RemoteTarget

OWN_FLAGS = ("target", "draft", "drafter", "threads", "options")  # the fields of ModelFlags that concern the draft


def open_any(
    model: ModelFlags, extra: Mapping[str, Any], *, quiet: bool = False, is_chat: bool = False
) -> LLM | RemoteTarget:
    """Load the models, or the draft alone for a target on another machine. With `is_chat` the target needs a chat
    template, which is checked first."""
    from outpace.card.link import is_address
    from outpace.models.load import check_chat_template

    if is_address(model.target):
        return open_remote_target(model, extra, quiet)
    if is_chat:
        check_chat_template(model.target)
    return model.open(extra, quiet=quiet)


def open_remote_target(model: ModelFlags, extra: Mapping[str, Any], quiet: bool) -> RemoteTarget:
    """Load the draft model for a target on another machine. UserError for flags that its server sets."""
    require("a target on another machine", "remote", "grpc")
    from outpace.card.link import read_address
    from outpace.cluster.draft_model import build_card_drafter, load_own_draft
    from outpace.cluster.remote_target import RemoteTarget
    from outpace.core.lazy import set_num_threads

    defaults = type(model)()
    for one in fields(model):
        if one.name not in OWN_FLAGS and getattr(model, one.name) != getattr(defaults, one.name):
            raise UserError(f"leave out --{one.name.replace('_', '-')}: the server at {model.target} sets it")
    for name in ("tp_plan", "pp_plan"):
        if getattr(model.options, name) is not None:
            raise UserError(f"leave out --{name.replace('_', '-')}: it splits a target that is loaded here")
    chosen = model.only_draft("a target on another machine")
    address = read_address(str(model.target))
    if model.threads is not None:
        set_num_threads(model.threads)
    with display.loading_bar(quiet) as progress:
        draft = load_own_draft(chosen, model.options, progress)
    drafter = build_card_drafter(model.drafter or "model", draft, extra)
    return RemoteTarget(address, draft, drafter, address.key)

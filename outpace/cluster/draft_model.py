"""A draft model without its target, and the drafter that runs it for method card."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from outpace.core import registry
from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.types import Drafter
from outpace.decoders.card import Card
from outpace.drafters import build_drafter, drafter_modules
from outpace.models.files.find import is_packed, locate, shipped_model
from outpace.models.files.pairs import shipped_draft
from outpace.models.load import Progress, open_draft, silent
from outpace.models.options import LoadOptions
from outpace.models.runtimes import Loaded


def load_own_draft(name: str | None, options: LoadOptions, progress: Progress = silent) -> Loaded:
    """Load a whole draft model, None for the shipped one; UserError for one that needs its target's files."""
    target = shipped_model().stem if name is None else ""
    spec = name if name is not None else shipped_draft(target)
    if name is not None and is_packed(Path(name)):
        raise UserError(f"the draft {name} has the embeddings of its target, whose files are not here: name another")
    return open_draft(spec, target, partial(locate, None), options.of_draft(), progress=progress)


def build_card_drafter(name: str, draft: Loaded, values: Mapping[str, Any]) -> Drafter:
    """Build drafters joined by "+", with the defaults of method card; UserError for an option that none has."""
    modules = {f"drafter {part}": module for part, module in drafter_modules(name).items()}
    registry.check_known(modules, values)
    context = BuildContext(draft=draft.model, draft_tokenizer=draft.tokenizer)
    return build_drafter(name, context, Card.drafter_defaults(Card.Options()) | dict(values))

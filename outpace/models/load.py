"""Loads target and draft models by the names that users give them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from outpace.core.errors import UserError
from outpace.models import runtimes
from outpace.models.base import check_decoder_only
from outpace.models.devices import GIB, check_options
from outpace.models.files.cache import weights_digest
from outpace.models.files.find import is_packed, locate, open_source
from outpace.models.files.model_kind import is_encoder_decoder
from outpace.models.files.pairs import find_draft, sibling
from outpace.models.files.reading import read_optional_json
from outpace.models.heads.config import STEERING, fields_of, head_kind, kind_of_mtp
from outpace.models.options import AUTO, LoadOptions, silent
from outpace.models.runtimes import Loaded, Progress
from outpace.models.text.tokenizer import first_difference, tokenizer_of

MTP_DRAFT = "mtp"  # the MTP layer in the target's own files
TRANSLATED = "; drafter translated takes a draft with another tokenizer"
LAYERS = "layers:"  # a draft model of some of the target's layers: layers:0-24,26-29


def load_model(
    spec: Any, options: LoadOptions | None = None, *, tokenizer: Any = None, progress: Progress = silent, **changes: Any
) -> Loaded:
    """Load the model that `spec` names: a folder, a .gguf file, a hub id, or None for the shipped model.

    `spec` may also be a loaded transformers model, with its `tokenizer`. `changes` are fields of `LoadOptions`.
    """
    options = replace(options or LoadOptions(), **changes)
    if isinstance(spec, os.PathLike):
        spec = Path(spec)
    if spec is not None and not isinstance(spec, str | Path):
        for name, default in (("layers", None), ("kv_dtype", AUTO)):
            if getattr(options, name) != default:
                raise UserError(f"{name} is for models that are loaded by name, not for one that is loaded already")
        return _reduced(runtimes.wrap_loaded(spec, tokenizer), options)
    if tokenizer is not None:
        raise UserError("a tokenizer goes with a loaded model only, a model's name brings its own")
    check_options(options)
    if spec is not None and (kind := head_kind(read_optional_json(Path(spec) / "config.json"))):
        raise UserError(f"{spec} is a trained head ({kind}), which drafts for another model: name it as the draft")
    loaded = _reduced(runtimes.open_model(spec, options, progress), options)
    files = partial(locate, None if spec is None else str(spec))
    return replace(loaded, again=partial(load_model, spec, options), files=files)


def _reduced(loaded: Loaded, options: LoadOptions) -> Loaded:
    """Reduce the output layer of a draft model as the options say; return the model."""
    if options.is_draft and options.num_output_tokens != 0:
        loaded.model.reduce_output(options.num_output_tokens)
    return loaded


def load_draft(
    spec: Any,
    target: Loaded,
    options: LoadOptions | None = None,
    *,
    tokenizer: Any = None,
    progress: Progress = silent,
    same_tokens: bool = True,
    **changes: Any,
) -> Loaded:
    """Load a draft model for this target: another model, some of the target's layers ("layers:0-24,26-29"), the MTP
    layer in its files ("mtp"), or "auto".

    "auto" is the MTP layer, or the small sibling that is known for the target. Layers are loaded from the target's
    files. A loaded model gets the target's tokenizer unless one is given. Without `same_tokens`
    the draft may have other tokens, which its drafter translates.
    """
    if spec == "auto":
        spec = known_draft(target)
        try:
            return load_draft(spec, target, options, progress=progress, same_tokens=same_tokens, **changes)
        except UserError as error:
            raise UserError(f"draft auto is {spec} for {target.name}: {error}") from error
    if not isinstance(spec, str | os.PathLike):
        tokenizer = tokenizer or target.tokenizer
    if str(spec).startswith(LAYERS):
        if target.again is None:
            raise UserError(f"{spec} needs a target that is loaded by name, {target.name} is an object of this process")
        own = {"pp_plan": None, "is_draft": True, "layers": str(spec).removeprefix(LAYERS)}
        draft = target.again(progress=progress, **(vars(options) if options else {}) | changes | own)
        return fit_draft(replace(draft, name=str(spec), files=None), target)
    options = replace(options or LoadOptions(), **changes)
    if spec == MTP_DRAFT:
        if (files := find_mtp(target)) is None:
            known = "checkpoints of MiMo-7B, Qwen3-Next and Qwen3.5 to 3.8 have one, if it was not left out of a copy"
            raise UserError(f"{target.name} has no MTP layer that outpace runs: {known}")
        return _load_head(spec, files, target, options)
    if (path := find_head(spec, progress)) is not None:
        return _load_head(spec, path, target, options)
    draft = open_draft(spec, target.name, target.files, options, tokenizer=tokenizer, progress=progress)
    if bool(draft.model.decoder_start) != bool(target.model.decoder_start):
        kinds = ["an encoder-decoder model", "a decoder-only model"][:: 1 if draft.model.decoder_start else -1]
        pair = f"the draft {draft.name} is {kinds[0]}, the target {target.name} is {kinds[1]}"
        raise UserError(f"{pair}: name a smaller model of the target's kind")
    if not same_tokens:
        check_decoder_only(target.model, target.name, "drafter translated")
    return fit_draft(draft, target) if same_tokens else draft


def known_draft(target: Loaded) -> str:
    """Return the draft that "auto" is for a target, from the target's folder if it is there; UserError if none is."""
    spec = MTP_DRAFT if find_mtp(target) else find_draft(target.name, target.config)
    return sibling(target.name, spec) or spec


def find_mtp(target: Loaded) -> Path | None:
    """Return the target's files if they hold an MTP layer that outpace runs, else None."""
    if target.files is None or kind_of_mtp(target.config) is None:
        return None
    from outpace.models.heads.files import open_mtp

    path = target.files()
    return path if open_mtp(path).tensors else None


def find_head(spec: Any, progress: Progress = silent) -> Path | None:
    """Return the folder or file of a draft that is a trained head; None if it is anything else."""
    if not isinstance(spec, str | os.PathLike):
        return None
    name = os.fspath(spec)
    if name in ("auto", MTP_DRAFT) or name.startswith(LAYERS) or is_packed(Path(name)):
        return None
    try:
        path = locate(name, progress=progress)
    except UserError:  # transformers may know the name; if not, its loader reports the same
        return None
    from outpace.models.heads.files import kind_of_head

    return path if kind_of_head(path) is not None else None


def _load_head(spec: Any, path: Path, target: Loaded, options: LoadOptions) -> Loaded:
    """Load a head for this target; it runs on the target's device."""
    from outpace.models.heads.load import load_head

    check_decoder_only(target.model, target.name, f"the head {spec}")
    if options.device != str(target.model.device).split(":")[0] and options.device != str(target.model.device):
        raise UserError(
            f"the head {spec} runs on the device of the target, {target.model.device}: leave out draft_device"
        )
    if options.num_output_tokens:
        raise UserError(f"draft_vocab {options.draft_vocab} is for draft models, the head {spec} has its own")
    trained_on = fields_of(read_optional_json(path / "config.json"), "outpace") if path.is_dir() else {}
    tokenizer = target.tokenizer.fingerprint[:16] if "tokenizer" in trained_on else None
    if tokenizer != trained_on.get("tokenizer"):
        raise UserError(f"the head {spec} was trained for a target with another tokenizer than {target.name}")
    files, is_mtp = target.files, spec == MTP_DRAFT
    model = load_head(path, target.model, target.config, target.tokenizer.size, files, options, is_mtp)
    model.vocab_size = min(model.vocab_size, target.model.vocab_size)
    notices = [*filter(None, [model.notice]), *model.spec.notices]
    if "weights" in trained_on and target.files and weights_digest(target.files()) != trained_on["weights"]:
        notices.append("the head was trained on hidden states of other weights, so fewer drafts may be accepted")
    files = partial(Path, path)
    notice = "; ".join(notices) or None
    return Loaded(model, target.tokenizer, str(spec), notice=notice, files=files, drafter=model.drafter, is_head=True)


def open_draft(
    spec: Any,
    target: str,
    files: Callable[[], Path] | None,
    options: LoadOptions,
    *,
    tokenizer: Any = None,
    progress: Progress = silent,
) -> Loaded:
    """Load a draft model of its own for a target, given its name and `files`; the target may still be loading."""
    options = replace(options, is_draft=True)
    if isinstance(spec, str | os.PathLike) and is_packed(Path(spec)):
        if files is None:
            raise UserError(
                f"the draft {spec} has the embeddings of its target, and {target} is an object of this process: name"
                " the target's files, or another draft"
            )
        runtime = AUTO if options.runtime == "transformers" else options.runtime  # which reads no other model's files
        options = replace(options, runtime=runtime, target_files=files())
    return load_model(spec, options, tokenizer=tokenizer, progress=progress)


def check_tokens(target: Any, draft: Any) -> str | None:
    """Return why a draft's tokens are not its target's, as far as the headers of local files show; None where loading
    will fail or choose another runtime."""
    if find_head(draft) is not None or is_encoder_decoder_folder(target):  # whose fit loading checks
        return None
    try:
        with open_source(locate(target)) as large, open_source(locate(draft)) as small:
            differs = first_difference(large.vocabulary(), small.vocabulary())
            if differs and type(large) is not type(small):  # other formats may spell the same token in another way
                differs = tokenizer_of(large).tokens_differ(tokenizer_of(small))
    except UserError:
        return None
    return misfit(target, draft, differs) if differs else None


def check_chat_template(target: str | None) -> None:
    """Raise UserError if the header of a local model's files shows that it has no chat template. The shipped model
    (None) has one, and an encoder-decoder model needs none."""
    if target is None or not Path(target).expanduser().exists() or is_encoder_decoder_folder(target):
        return
    try:
        with open_source(locate(target)) as source:
            has_template = source.has_chat_template
    except UserError:  # loading reports it, or another runtime reads these files
        return
    if not has_template:
        raise UserError(without_template(target))


def is_encoder_decoder_folder(target: Any) -> bool:
    """Whether a model's name is that of a local folder with an encoder-decoder model."""
    return target is not None and is_encoder_decoder(read_optional_json(Path(target).expanduser() / "config.json"))


def without_template(target: str) -> str:
    """Return the sentence about a model without a chat template."""
    return f"{target} has no chat template: `outpace generate --raw` continues a text as it is"


def misfit(target: str, draft: str, differs: str, advice: str = TRANSLATED) -> str:
    """Return the sentence about a draft with other tokens than its target's."""
    return f"the draft {draft} does not fit the target {target}: {differs}{advice}"


def fit_draft(draft: Loaded, target: Loaded) -> Loaded:
    """Return the draft limited to the target's tokens, with its steering if it has one; UserError if their tokens
    differ or the steering does not fit."""
    differs = target.tokenizer.tokens_differ(draft.tokenizer)
    starts, coupled = draft.model.decoder_start, target.model.decoder_start
    if differs or starts != coupled:
        differs = differs or f"its answers start with the tokens {list(starts)}, the target's with {list(coupled)}"
        raise UserError(misfit(target.name, draft.name, differs, "" if coupled else TRANSLATED))
    draft.model.vocab_size = min(draft.model.vocab_size, target.model.vocab_size)  # one of them may be padded
    large, small = (one.model.weight_bytes or 0 for one in (draft, target))
    if large > small > 0:
        notice = f"it has {large / GIB:.1f} GiB of weights, more than its target, so drafting with it will hardly pay"
        draft = replace(draft, notice="; ".join(filter(None, (draft.notice, notice))))
    if draft.files is None or not (draft.files() / STEERING).is_file():
        return draft
    from outpace.models.heads.steering import attach_steering

    return attach_steering(draft, target)

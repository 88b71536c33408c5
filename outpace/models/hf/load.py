"""Loads models and tokenizers with transformers, or wraps loaded ones; errors become one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from weakref import finalize

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging

from outpace.core.errors import UserError
from outpace.models.files.model_kind import check_causal_lm
from outpace.models.hf.model import TransformersModel, probe
from outpace.models.hf.passes import ForwardPasses
from outpace.models.hf.tokenizer import wrap_tokenizer
from outpace.models.options import LoadOptions
from outpace.models.text.tokenizer import Tokenizer


def load(source: str | Path, revision: str | None, options: LoadOptions) -> tuple[TransformersModel, Tokenizer]:
    """Load the model and tokenizer of a folder, or of a hub id's `revision`. UserError for anything that does not load.

    With a `tp_plan` only rank 0 returns; the other ranks follow it until it ends, then exit.
    """
    if options.tp_plan is None:
        return wrap_pair(*_load(source, revision, options))
    from outpace.models.hf import split

    rank = split.join_processes()
    try:
        module, tokenizer = split.run_everywhere(lambda: _load(source, revision, options))
    except BaseException:
        split.leave_processes()
        raise
    if rank:
        try:
            split.follow(ForwardPasses(module), split.connect_to_leader())
        except Exception as error:
            raise SystemExit(f"outpace, rank {rank}: {error}") from error
        finally:
            split.leave_processes()
        raise SystemExit(0)
    lead = split.connect_followers()
    try:
        model, wrapped = wrap_pair(module, tokenizer, lead)
    except BaseException:
        lead.end()
        raise
    finalize(model, lead.end)  # at the latest when the program ends
    return model, wrapped


def _load(source: str | Path, revision: str | None, options: LoadOptions) -> tuple[Any, Any]:
    common: dict[str, Any] = {"trust_remote_code": options.trust_remote_code, "revision": revision or "main"}
    with _explained(f"the tokenizer of {source}"):
        tokenizer = AutoTokenizer.from_pretrained(source, **common)
    given = common | {"dtype": options.torch_dtype, "output_loading_info": True, "device_map": options.device_map}
    if options.tp_plan is not None:
        given |= _plan(source, common)
    with _explained(str(source)), _without_bars():
        module, info = cast(Any, AutoModelForCausalLM.from_pretrained(source, **given))
        if not options.is_spread and not getattr(module, "is_quantized", False):
            module.to(options.device)
    missing = sorted(info["missing_keys"])
    if missing:  # transformers would initialise them randomly
        raise UserError(f"{source} lacks {len(missing)} of the model's weights, the first is {missing[0]}")
    return module, tokenizer


def _plan(source: str | Path, common: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that make transformers split a model over all processes; UserError if it cannot."""
    from outpace.models.devices import num_processes
    from outpace.models.hf.split import check_tp_plan

    with _explained(str(source)):
        config = AutoConfig.from_pretrained(source, **common)
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    check_tp_plan(config, kind, num_processes(), source)
    try:
        from transformers.distributed import DistributedConfig
    except ImportError:  # before transformers 5.10
        return {"tp_plan": "auto"}
    return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=num_processes())}


def wrap_pair(module: Any, tokenizer: Any, lead: Any = None) -> tuple[TransformersModel, Tokenizer]:
    """Wrap a loaded model and its tokenizer. UserError without a tokenizer, or for objects of other types."""
    if tokenizer is None:
        raise UserError("a loaded model needs its tokenizer, give tokenizer=...")
    if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
        check_causal_lm(config.to_dict() | {"architectures": [type(module).__name__]}, "the loaded model")
    return adapt(module, lead), wrap_tokenizer(tokenizer, _stop_ids(module))


def adapt(module: Any, lead: Any = None) -> TransformersModel:
    """Wrap a loaded model after probing what it supports. `lead` connects to the other ranks of a split model.

    Raises UserError for a model without token scores, that is not causal, or that cannot remove a drafted token.
    """
    passes = ForwardPasses(module, lead)
    return TransformersModel(passes, probe(passes))


def _stop_ids(module: Any) -> list[int]:
    """Return the ids that end an answer: the generation config's, else the model's."""
    for config in (getattr(module, "generation_config", None), module.config):
        named = getattr(config, "eos_token_id", None)
        if named is not None:
            return list(named) if isinstance(named, list) else [named]
    return []


@contextmanager
def _without_bars() -> Iterator[None]:
    """Disable transformers' own progress bars."""
    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn the many exceptions that transformers raises for bad files and options into UserError.

    Three cases are recognised by their text, as transformers raises plain ValueErrors and ImportErrors for them.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        if "trust_remote_code" in text:
            reason = "brings its own Python code, which runs only with --trust-remote-code"
            raise UserError(f"{what} {reason} (trust_remote_code=True)") from error
        if "accelerate" in text:
            raise UserError(f"{what} is to be spread by a device map, which needs `pip install accelerate`") from error
        if "Unrecognized configuration class" in text:
            raise UserError(f"{what} is no causal language model that transformers knows") from error
        first = text.strip().partition("\n")[0]
        raise UserError(f"{what} cannot be loaded by transformers ({type(error).__name__}: {first})") from error

"""Drafts for vLLM, as a proposer class that vLLM loads by its name (method `custom_class`).

    vllm serve M --speculative-config '{"method": "custom_class", "model": "outpace.integrations.vllm.Proposer",
        "num_speculative_tokens": 6}' --additional-config '{"outpace": {"drafter": "ngram+suffix"}}'

vLLM verifies one chain per request and decides what is accepted. Its interface for custom proposers may change, so
other versions than those of `TESTED` are refused.
"""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from outpace.card.worker import DraftWorker
from outpace.core import registry
from outpace.core.drafting import BuildContext, is_address
from outpace.core.errors import UserError, check_whole, unknown
from outpace.core.types import Drafter
from outpace.drafters import build_drafter, drafter_modules
from outpace.engine.build import AUTO, REMOTE_METHOD, build_remote_worker
from outpace.engine.draft_runner import DraftRunner
from outpace.integrations.row_drafter import RowDrafter
from outpace.models.base import Model
from outpace.models.files.find import locate, resolve
from outpace.models.load import find_head, load_draft, load_model
from outpace.models.runtimes import Loaded
from outpace.models.text.tokenizer import Tokenizer
from outpace.planning.cost_model import CostModel

TESTED = ((0, 32), (0, 33))  # first and last version of vLLM that are accepted
FIELD = "outpace"  # of vLLM's additional_config
DRAFTERS = ("ngram", "suffix", "cacheback", "retrieval", "model")  # drafters that need only the target's tokens
BY_TOKENIZER = ("cacheback", "retrieval", "model")  # drafters whose files belong to a tokenizer
LOOKUPS, WITH_DRAFT = "ngram+suffix", "model+ngram"  # the default drafters, without and with a draft model
CPU_ROWS, GPU_ROWS = 64, 512  # default `max_rows`, as in outpace's own engine


class Proposer:
    """Proposes chains of tokens to vLLM; its options are the field `outpace` of vLLM's `additional_config`.

    `drafter`: one or several of DRAFTERS, joined by "+"; the default is ngram+suffix, with a draft model+ngram.
    `draft`: a draft model, which runs on the CPU. `worker`: instead of both, the address grpc://HOST:PORT of a draft
    worker. `max_rows`: maximum number of rows in a pass with drafts (64 on a CPU, else 512). `untested`: whether to
    allow other versions of vLLM. All others are options of method auto (with a worker: card) and of the drafters.
    """

    def __init__(self, vllm_config: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        """`vllm_config`: a vllm.config.VllmConfig. UserError for options that do not fit, or an untested vLLM."""
        options = _read_options(vllm_config.additional_config)
        _check_version(options.pop("untested", False))
        model, length = vllm_config.model_config, int(vllm_config.speculative_config.num_speculative_tokens)
        if length >= model.max_model_len:
            allowed = f"below {model.max_model_len}, the length of the model's context"
            raise UserError(f"num_speculative_tokens is {length}, it must be {allowed}")
        stages = vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1:
            raise UserError(f"pipeline_parallel_size is {stages}, it must be 1: vLLM does not speculate in a pipeline")
        on_cpu = str(vllm_config.device_config.device_type) == "cpu"
        max_rows = options.pop("max_rows", CPU_ROWS if on_cpu else GPU_ROWS)
        check_whole("max_rows", max_rows, 1)
        named, costs = {name: options.pop(name, None) for name in ("drafter", "draft", "worker")}, CostModel()
        method = AUTO if named["worker"] is None else REMOTE_METHOD
        decoder, drafters, worker = registry.find("decoders", method), dict[str, Drafter](), None
        if method == AUTO:
            drafters = _build_drafters(_target(model), named["drafter"], named["draft"], options, costs)
        else:
            worker = _connect(_target(model), named, options)
        runner = DraftRunner(drafters, worker, costs, clock, model.get_vocab_size())
        self._rows = RowDrafter(
            runner,
            costs,
            decoder,
            registry.build_options(decoder, options),
            draft_length=length,
            max_positions=model.max_model_len,
            max_rows=max_rows,
            clock=clock,
        )
        self._worker, self._has_failed = worker, False

    def close(self) -> None:
        """End the connection to a draft worker."""
        self._rows.close()
        if self._worker is not None:
            self._worker.close()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: vLLM calls this for weights on its device, and there are none."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a chain for each row, [] for none. After an exception it warns once and returns no more drafts."""
        if not self._has_failed:
            try:
                return self._rows.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            except Exception as error:
                self._has_failed = True
                reason = f"{type(error).__name__}: {error}"
                warnings.warn(f"outpace failed ({reason}); vLLM continues without drafts", stacklevel=2)
        return [[] for _ in sampled_token_ids]


class _Target(Model):
    """Describes vLLM's model to drafters: vocabulary, context length and size of the weights."""

    device = "cpu"

    def __init__(self, model: Any) -> None:
        self.vocab_size, self.max_positions = model.get_vocab_size(), model.max_model_len
        folder = Path(model.model)
        self._bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0

    @property
    def weight_bytes(self) -> int | None:
        return self._bytes or None


def _target(model: Any) -> Loaded:
    """Describe vLLM's model, given its ModelConfig, without its tokenizer."""
    name, config = str(model.model), model.hf_config.to_dict()
    return Loaded(_Target(model), None, name, config, again=partial(load_model, name), files=partial(locate, name))


def _with_tokenizer(target: Loaded) -> Loaded:
    return replace(target, tokenizer=Tokenizer.from_folder(resolve(target.name)))


def _read_options(additional: Any) -> dict[str, Any]:
    """Return the options of outpace in vLLM's additional_config."""
    options = additional.get(FIELD, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(options, Mapping):
        raise UserError(f"{FIELD} of additional_config is {options!r:.100}, it must be an object with options")
    return dict(options)


def _check_version(untested: Any) -> None:
    """Raise UserError for a version of vLLM outside `TESTED`, unless `untested` is true."""
    if not isinstance(untested, bool):
        raise UserError(f"untested is {untested!r:.50}, it must be true or false")
    version = str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))
    found = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if not (TESTED[0] <= found <= TESTED[1]) and not untested:
        first, last = (".".join(map(str, one)) for one in TESTED)
        raise UserError(
            f"vLLM is version {version}, outpace works with {first} to {last}; to try it nevertheless, set"
            f' {{"{FIELD}": {{"untested": true}}}} in additional_config'
        )


def _build_drafters(
    target: Loaded, drafter: str | None, draft: str | None, options: Mapping[str, Any], costs: CostModel
) -> dict[str, Drafter]:
    """Build the drafters of method auto, and set priors for the costs of a draft model."""
    name = drafter or (LOOKUPS if draft is None else WITH_DRAFT)
    parts = str(name).split("+")
    for part in parts:
        if part not in DRAFTERS:
            raise unknown("drafter for vLLM", part, DRAFTERS)
    if ("model" in parts) != (draft is not None):
        raise UserError(f"drafter is {name} and draft is {draft}: name a draft if, and only if, drafter model is used")
    modules = drafter_modules(name)
    decoder = registry.find("decoders", AUTO)
    registry.check_known({f"method {AUTO}": decoder} | {f"drafter {part}": modules[part] for part in modules}, options)
    if not {*parts}.isdisjoint(BY_TOKENIZER):
        target = _with_tokenizer(target)
    given = BuildContext(target=target.model, tokenizer=target.tokenizer)
    if draft is not None:
        if find_head(draft) is not None:
            raise UserError(f"the draft {draft} is a trained head, which reads hidden states that vLLM does not give")
        loaded = load_draft(draft, target)
        given = given._replace(draft=loaded.model, draft_tokenizer=loaded.tokenizer)
    built = build_drafter(name, given, {"width": 1, "branches": 1} | dict(options))  # vLLM verifies chains
    costs.expect_draft_steps(target.model, [built])
    return {name: built}


def _connect(target: Loaded, named: Mapping[str, Any], options: Mapping[str, Any]) -> DraftWorker:
    """Connect to a draft worker on another machine, which runs a drafter of its own."""
    worker = named["worker"]
    for name in ("drafter", "draft"):
        if named[name] is not None:
            raise UserError(f"the drafter runs at {worker}: name {name} {named[name]!r} there, not here")
    if not isinstance(worker, str) or not is_address(worker):
        raise UserError(f"worker is {worker!r:.100}, it must be the address of a draft worker, grpc://HOST:PORT")
    registry.check_known({f"method {REMOTE_METHOD}": registry.find("decoders", REMOTE_METHOD)}, options)
    return build_remote_worker(worker, _with_tokenizer(target)).start()

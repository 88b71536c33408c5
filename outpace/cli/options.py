"""Flags that several commands share: the models, and the decoding method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any

from outpace.cli.flags import flag
from outpace.cli.sampling_options import TEXT
from outpace.core.errors import UserError, check_range
from outpace.models.options import LoadOptions

if TYPE_CHECKING:
    from outpace.api.llm import LLM

MODEL = "Model"
METHOD = "Method"

Target = Annotated[
    str | None, flag("Target model: hub id, folder or .gguf file; the default is the shipped model.", MODEL)
]
DraftModel = Annotated[
    list[str] | None,
    flag(
        "Draft model: hub id, folder or .gguf file; auto (a known small model of the same family); some of the target's"
        " layers, as in layers:0,1,28,29; or none. The default is the shipped draft for the shipped model, else none."
        " May be repeated: each round then uses the best of them.",
        MODEL,
    ),
]
Drafter = Annotated[
    str | None,
    flag(
        "Drafters, joined by +, as in model+ngram; outpace methods lists them. The default depends on the method.",
        METHOD,
    ),
]
System = Annotated[str | None, flag("System message that opens the conversation.", TEXT)]
Json = Annotated[bool, flag("Write one line of JSON to stdout, and nothing else.", None, "--json")]

LOAD_FLAGS: dict[str, Any] = {  # the fields of LoadOptions that are flags
    "device": flag("Device of the target: cpu, cuda, cuda:1, ...", MODEL),
    "dtype": flag(
        "Precision: file (a GGUF, GPTQ or AWQ model's own weights, all else in int8; CPU only), int4 (as file, but four"
        " bits where file has int8 in its layers), int8 (CPU only), float32,"
        " bfloat16 or float16; auto: file on a CPU and bfloat16 on a GPU where available, else float32.",
        MODEL,
    ),
    "exact": flag(
        "Make every method compute bit-identical logits; the default is on where the device supports it.",
        MODEL,
        "--exact/--no-exact",
    ),
    "runtime": flag(
        "Runtime: auto, native (kernels for a CPU), llama (the Llama family by torch) or transformers (any causal"
        " model).",
        MODEL,
    ),
    "kv_dtype": flag(
        "Keys and values: float32, float16 (half of the memory) or int8 (about a quarter), of the draft's too; auto:"
        " float16 by the native kernels, else the runtime's own.",
        MODEL,
        "--kv-dtype",
    ),
    "graphs": flag(
        "Graph capture of the runtime llama: cuda (CUDA graphs), eager (the same forwards without capture, on any"
        " device) or off; auto: cuda on a GPU, else off.",
        MODEL,
    ),
    "tp_plan": flag(
        "auto: split each layer of the target over the processes that torch.distributed.run started, by transformers;"
        " only the first process writes output.",
        MODEL,
        "--tp-plan",
    ),
    "trust_remote_code": flag("Run the Python files that come with a model.", MODEL, "--trust-remote-code"),
}


@dataclass(frozen=True)
class ModelFlags:
    """The models to load, and the decoding method."""

    target: Target = None
    draft: DraftModel = None
    options: LoadOptions = field(default_factory=LoadOptions, metadata={"flags": LOAD_FLAGS})
    draft_device: Annotated[str | None, flag("Device of the draft; the default is the target's.", MODEL)] = None
    draft_dtype: Annotated[
        str | None,
        flag(
            "Precision of the draft; the default is the target's --dtype, where auto holds a draft in int4 on a CPU.",
            MODEL,
        ),
    ] = None
    threads: Annotated[int | None, flag("CPU threads of the target; the default is one for each core.", MODEL)] = None
    method: Annotated[
        str,
        flag(
            "Decoding method: auto (drafts as much as pays), card, speculative, ...; outpace methods lists them.",
            METHOD,
        ),
    ] = "auto"
    drafter: Drafter = None
    rule: Annotated[
        str,
        flag(
            "Acceptance rule: greedy, gumbel, rejection, ...; outpace methods lists them; auto: greedy at temperature"
            " 0, else gumbel.",
            METHOD,
        ),
    ] = "auto"
    worker: Annotated[
        str | None,
        flag(
            "Where a drafter runs that drafts in parallel with the target (card, planned, pearl, ssd): thread, process,"
            " or inline on a simulated clock; the default is thread.",
            METHOD,
        ),
    ] = None
    draft_threads: Annotated[int, flag("CPU threads of a drafter that drafts in parallel with the target.", METHOD)] = 1
    nodes: Annotated[
        int | None,
        flag(
            "Maximum number of tree nodes verified in a pass, with the root; the default is 32 for auto, else 8.",
            METHOD,
        ),
    ] = None
    kv_memory: Annotated[
        float | None,
        flag(
            "Memory for the KV cache, in GiB: the target's with its prefix cache, and that of drafts in this process;"
            " the default is half of the free memory.",
            METHOD,
        ),
    ] = None
    reuse: Annotated[
        bool,
        flag(
            "Start from the keys and values of an earlier text with the same beginning, and draft what followed the"
            " same prompt before.",
            METHOD,
        ),
    ] = True

    def open(self, extra: Mapping[str, Any], *, quiet: bool = False, bar_after: float = 0.5) -> LLM:
        """Load the models. `extra` are options of the method and the drafter."""
        from outpace.cli.display import LoadingBar, say

        self._check()
        from outpace.api.llm import load

        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "threads"}
        given["draft"] = one_or_all(self.draft)
        with LoadingBar(quiet, bar_after) as progress:
            llm = load(progress=progress, **given, **extra)
        if self.options.exact and not llm.target.model.exact:
            llm.close()
            raise UserError(
                "exact mode is not available here: without graphs it needs a CPU and a precision other than float16;"
                " leave out --exact"
            )
        names: dict[str, list[str]] = {}
        for loaded in (llm.target, llm.draft):
            if loaded and loaded.notice and not quiet:
                names.setdefault(loaded.notice, []).append(loaded.name)
        for notice, models in names.items():
            say(f"{' and '.join(models)}: {notice}")
        return llm

    def _check(self) -> None:
        """Raise UserError for mistakes that are known before a model is loaded."""
        from outpace.core import registry

        registry.find("decoders", self.method)
        if self.rule != "auto":
            registry.find("rules", self.rule)
        for part in self.drafter.replace(",", "+").split("+") if self.drafter is not None else ():
            registry.find("drafters", part)
        if self.threads is not None:
            from outpace.core.lazy import set_num_threads
            from outpace.core.machine import num_cores

            check_range("threads", self.threads, 1, num_cores())
            set_num_threads(self.threads)


def one_or_all(drafts: Sequence[str] | None) -> str | Sequence[str] | None:
    """Return what the library takes: a draft by name, or a list of several."""
    return None if not drafts else drafts[0] if len(drafts) == 1 else drafts

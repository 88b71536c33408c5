"""`outpace doctor --plan`: what fits where, what a pass must cost, and which method pays, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from outpace.core.errors import UserError, check_range, check_share, check_whole, unknown
from outpace.core.plan import (
    DEVICES,
    GIB,
    MOST_NODES,
    DeviceSpec,
    MethodGain,
    ModelSize,
    Placement,
    best_method,
    method_gains,
    most_context,
    passes,
    placements,
)

PLAN = "Plan"
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0}
SHOWN = (1, 2, 4, 8, 16, 32, 64)
HERE = "here"
PRODUCT = 1024  # rows and columns of the products by which this machine's operations a second are found


@dataclass(frozen=True)
class Planning:
    """For which models and which device."""

    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Estimate instead, for --target, --draft and a device: what fits into memory, the least time of a"
            " pass, and which method pays. By formulas; no model is loaded.",
            rich_help_panel=PLAN,
        ),
    ] = False
    target: Annotated[
        str | None,
        typer.Option(
            help="Target: 1B, 3B, 8B, 32B or 70B (the shapes of Llama 3), or a folder, .gguf file or hub id.",
            rich_help_panel=PLAN,
        ),
    ] = None
    draft: Annotated[str | None, typer.Option(help="Draft, named as the target is.", rich_help_panel=PLAN)] = None
    gpu: Annotated[
        str,
        typer.Option(help=f"Device: {', '.join(DEVICES)}, or here for this machine.", rich_help_panel=PLAN),
    ] = HERE
    device_memory: Annotated[
        float | None,
        typer.Option(help="Memory of the device, in GiB, instead of the known value.", rich_help_panel=PLAN),
    ] = None
    bandwidth: Annotated[
        float | None, typer.Option(help="Memory bandwidth of the device, in GB/s.", rich_help_panel=PLAN)
    ] = None
    flops: Annotated[float | None, typer.Option(help="Speed of the device, in TFLOP/s.", rich_help_panel=PLAN)] = None
    dtype: Annotated[str, typer.Option(help=f"Weights: {', '.join(BYTES)}.", rich_help_panel=PLAN)] = "bfloat16"
    context: Annotated[int, typer.Option(help="Context length, in tokens.", rich_help_panel=PLAN)] = 2048
    requests: Annotated[int, typer.Option("--batch", help="Requests at once.", rich_help_panel=PLAN)] = 1
    acceptance: Annotated[
        float, typer.Option(help="Chance that a drafted token is accepted.", rich_help_panel=PLAN)
    ] = 0.8
    width: Annotated[int, typer.Option(help="Tree nodes in each forward of the draft.", rich_help_panel=PLAN)] = 8

    def check(self) -> None:
        """UserError for a value that makes no sense."""
        if self.target is None:
            raise UserError("--plan needs --target: 1B, 3B, 8B, 32B, 70B, or a model's folder, file or hub id")
        if self.gpu not in (*DEVICES, HERE):
            raise unknown("gpu", self.gpu, (*DEVICES, HERE))
        if self.dtype not in BYTES:
            raise unknown("dtype", self.dtype, BYTES)
        for name in ("device_memory", "bandwidth", "flops"):
            if (value := getattr(self, name)) is not None:
                check_range(name, value, 0.001, 1e9)
        check_whole("context", self.context, 1, 1 << 24)
        check_whole("batch", self.requests, 1, 4096)
        check_whole("width", self.width, 1, MOST_NODES)
        check_share("acceptance", self.acceptance)


def collect(asked: Planning) -> dict[str, Any]:
    """The plan, as `--json` prints it; UserError where nothing fits, with what would."""
    asked.check()
    machine = _machine(asked)
    target = _size(asked.target or "", asked)
    draft = None if asked.draft is None else _size(asked.draft, asked)
    found = placements(target, draft, machine, asked.context, asked.requests)
    fitting = [layout for layout in found if layout.fits]
    if not fitting:
        raise _too_large(asked, target, draft, machine, found)
    plans = [_plan(asked, target, draft, machine, layout) for layout in _distinct(fitting)]
    return {
        "machine": machine._asdict(),
        "context": asked.context,
        "batch": asked.requests,
        "acceptance": asked.acceptance,
        "models": [size._asdict() for size in (target, draft) if size],
        "layouts": [
            {"name": layout.name, "fits": layout.fits, "needed": list(layout.needed), "memory": layout.memory}
            | {"most_context": most_context(target, draft, layout, asked.requests)}
            for layout in found
        ],
        "plans": plans,
    }


def report(found: dict[str, Any]) -> Group:
    """The tables for people."""
    where = Table("layout", "largest need", "of", "fits", "context that fits", box=None, padding=(0, 2, 0, 0))
    for layout in found["layouts"]:
        cells = (f"{max(layout['needed']) / GIB:.1f} GiB", f"{layout['memory'] / GIB:.1f} GiB")
        where.add_row(layout["name"], *cells, "yes" if layout["fits"] else "no", f"{layout['most_context']}")
    models = ", ".join(f"{model['name']} ({model['held'] / 1e9:.2f} billion weights)" for model in found["models"])
    said = f"{models} on {found['machine']['name']}, {found['batch']} x {found['context']} tokens; floors, not measured"
    return Group(said, where, *(part for plan in found["plans"] for part in _parts(plan)))


def _parts(plan: dict[str, Any]) -> Iterator[Table | str]:
    times = Table("ms, at least", *map(str, SHOWN), box=None, padding=(0, 2, 0, 0), title=plan["layout"])
    for name in ("target", "draft"):
        if plan[name]:
            times.add_row(f"{name}, by nodes", *(f"{1000 * seconds:.3f}" for seconds in plan[name].values()))
    yield times
    methods = Table("method", "drafted", "tokens a round", "times plain", box=None, padding=(0, 2, 0, 0))
    for gain in plan["methods"]:
        style = "bold" if gain["method"] in plan["pays"] else ""
        name = "card (a bound)" if gain["method"] == "card" else gain["method"]
        cells = (str(gain["length"]), f"{gain['tokens']:.2f}", f"{gain['speedup']:.2f}")
        methods.add_row(name, *cells, style=style)
    yield methods
    yield _verdict(plan)


def _verdict(plan: dict[str, Any]) -> str:
    """Which method pays and how much; CARD's gain is never more than a bound."""
    gained = {gain["method"]: f"{gain['speedup']:.2f}x" for gain in plan["methods"]}
    gained |= {"card": f"at most {gained['card']}, a bound"} if "card" in gained else {}
    paying = plan["pays"].split(" or ")
    if paying == ["autoregressive"]:
        return "pays: plain decoding, no method gains"
    beside = ["card"] if "card" in gained and "card" not in paying else []
    beside += ["pearl"] if paying == ["card"] else []  # what is sure, by which CARD was chosen
    said = "pays: " + " or ".join(f"{name} ({gained[name]})" for name in paying)
    return said + "".join(f"; {name} {gained[name]}" for name in beside)


def _distinct(fitting: list[Placement]) -> list[Placement]:
    """The smallest layout with the draft beside the target, and the smallest with it apart."""
    chosen: dict[bool, Placement] = {}
    for layout in fitting:
        chosen.setdefault(layout.is_apart, layout)
    return list(chosen.values())


def _plan(
    asked: Planning, target: ModelSize, draft: ModelSize | None, machine: DeviceSpec, layout: Placement
) -> dict[str, Any]:
    counts = range(1, MOST_NODES + 1)
    mine = passes(target, machine.times(layout.split), asked.context, asked.requests, counts)
    its = passes(draft, machine, asked.context, asked.requests, counts) if draft else []
    methods = (
        method_gains(mine, its, asked.acceptance, asked.width, layout.is_apart)
        if draft
        else [MethodGain("autoregressive", 0, 1.0, 1.0)]
    )
    return {
        "layout": layout.name,
        "target": {str(count): mine[count - 1] for count in SHOWN},
        "draft": {str(count): its[count - 1] for count in SHOWN} if its else {},
        "free_rows": target.batch(machine, asked.context).free_rows,
        "methods": [gain._asdict() for gain in methods],
        "pays": best_method(methods),
    }


def _too_large(
    asked: Planning, target: ModelSize, draft: ModelSize | None, machine: DeviceSpec, found: list[Placement]
) -> UserError:
    last = found[-1]
    of_target = f"{target.held * target.weight_bytes / GIB:.1f} GiB of weights"
    cache = f"{asked.requests * asked.context * target.token_bytes / GIB:.1f} GiB of keys and values"
    beside = f", the draft {draft.needs(asked.context, asked.requests) / GIB:.1f} GiB" if draft else ""
    context = max(most_context(target, draft, layout, asked.requests) for layout in found)
    instead = f"a context of {context} tokens would fit {last.name}" if context else "not even the weights would"
    if not context and asked.dtype in ("float32", "bfloat16", "float16"):
        instead += ", take fewer bytes a weight (--dtype) or a smaller model"
    return UserError(
        f"{target.name} needs {of_target} and {cache}{beside}, {machine.name} has {machine.memory / GIB:.1f} GiB and"
        f" even {last.split} of them are too few; {instead}"
    )


def _size(name: str, asked: Planning) -> ModelSize:
    from outpace.models.llama.config.footprint import NAMED, size_of

    config = NAMED.get(name.upper())
    if config is None:
        config = _read(name)
    return size_of(name, config, BYTES[asked.dtype], 4 if asked.dtype == "float32" else 2)


def _read(name: str) -> Any:
    """The sizes in a model's files."""
    from outpace.models.files.find import locate, open_source
    from outpace.models.llama.config.footprint import NAMED
    from outpace.models.llama.config.llama_config import from_dict

    try:
        with open_source(locate(name)) as source:
            return from_dict(source.config)
    except UserError as error:
        raise UserError(f"{error}; or name one of the shapes {', '.join(NAMED)}") from None


def _machine(asked: Planning) -> DeviceSpec:
    known = DEVICES.get(asked.gpu) or _here(asked)
    memory = known.memory if asked.device_memory is None else asked.device_memory * GIB
    bandwidth = known.bandwidth if asked.bandwidth is None else asked.bandwidth * 1e9
    flops = known.flops if asked.flops is None else asked.flops * 1e12
    return DeviceSpec(known.name, memory, bandwidth, flops)


def _here(asked: Planning) -> DeviceSpec:
    """This machine: its GPU where it is a known one, else its processor, measured as far as it is not told."""
    import torch

    from outpace.core import machine
    from outpace.engine.kv_memory import free_bytes

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        for known in DEVICES.values():
            if known.name.removeprefix("RTX ") in name and " MIG " not in name:  # a slice has a share of the rates
                return known._replace(name=name, memory=torch.cuda.mem_get_info()[1])
        if asked.bandwidth is None or asked.flops is None:
            raise UserError(f"the rates of {name} are not known here: give --bandwidth and --flops")
        return DeviceSpec(name, torch.cuda.mem_get_info()[1], 0.0, 0.0)
    bandwidth = machine.memory_bandwidth() if asked.bandwidth is None else 0.0
    flops = _product_rate() if asked.flops is None else 0.0
    return DeviceSpec(machine.processor(), free_bytes("cpu"), bandwidth, flops)


def _product_rate() -> float:
    """Operations a second of float32 products on this processor: the best of a few."""
    import time

    import torch

    one = torch.ones(PRODUCT, PRODUCT)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        one @ one
        best = min(best, time.perf_counter() - start)
    return 2 * PRODUCT**3 / best

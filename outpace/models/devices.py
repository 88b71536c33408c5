"""Checks before loading: whether the device exists and supports the options, and whether the model fits in memory."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from typing import Any

from outpace.core.errors import UserError, require
from outpace.core.kernels import kernels
from outpace.core.lazy import num_cores, torch
from outpace.core.machine import available_bytes, free_bytes
from outpace.models.llama.config.footprint import StoredSize, float_bytes, has_blocks, native_bytes, token_bytes
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict, tensor_shapes
from outpace.models.llama.native.binding import read_formats
from outpace.models.llama.weight_sources import source_of
from outpace.models.options import AUTO, CUDA, FILE, FLOATS, INT4, INT8, NATIVE_KV, OFF, LoadOptions, has_bfloat16

GIB = 1 << 30
OVERHEAD = 1.05  # factor for libraries, and for preparing one tensor at a time
LEAST = 256  # tokens of keys and values that must fit next to the weights
FEWEST = 0.1  # smallest model, in billions of weights, that an error suggests


def check_device(device: str) -> None:
    """Raise UserError for a device that does not exist."""
    if device == "cpu":
        return
    require(f"device {device}", "torch")
    try:
        torch.zeros(1, device=device).item()  # the device meta creates tensors, but they have no values
    except Exception as error:
        have = ["cpu"] + [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        raise UserError(f"device {device!r} is not available here, allowed are {', '.join(have)}") from error


def check_options(options: LoadOptions) -> None:
    """Raise UserError if the device does not exist or does not support the options."""
    check_device(options.device)
    if options.tp_plan is not None or options.pp_plan is not None:
        check_split(options)
    if options.graphs == CUDA and not options.is_on_cuda:
        raise UserError(f"graphs cuda needs a device of CUDA, not {options.device}: say graphs eager, off or {AUTO}")
    if not options.is_on_cuda:
        return
    if options.dtype in (FILE, INT4, INT8):
        raise UserError(
            f"dtype {options.dtype} runs on a CPU, not on {options.device}: use bfloat16, float16 or float32 there"
        )
    if options.dtype == "bfloat16" and not has_bfloat16(options.device):
        raise UserError(f"{options.device} cannot compute in bfloat16: use float16 or float32")
    if options.exact and options.graphs == OFF:
        raise UserError("exact mode on CUDA needs graphs: leave out exact, or graphs off")


def check_split(options: LoadOptions) -> None:
    """Raise UserError if a model cannot be split over processes as `tp_plan` or `pp_plan` says."""
    if options.tp_plan is not None and options.pp_plan is not None:
        raise UserError("tp_plan and pp_plan both split the target: leave out one of them")
    plan, runtimes = ("pp_plan", ("native", "llama")) if options.tp_plan is None else ("tp_plan", ("transformers",))
    require(plan, "torch")
    if options.runtime not in (AUTO, *runtimes):
        names = " and ".join(runtimes)
        raise UserError(f"{plan} is for the runtime {names}, not for {options.runtime}: leave out one of them")
    if options.device_map is not None:
        raise UserError(f"{plan} and device_map both say where a model's parts go: leave out one of them")
    if num_processes() < 2:
        raise UserError(
            f"{plan} splits a model over several processes, and this one runs alone: start it with"
            " `python -m torch.distributed.run --nproc-per-node 2 -m outpace ...`, one for each device"
        )
    here, devices = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes())), torch.cuda.device_count()
    if devices and here > devices and (options.pp_plan is None or options.is_on_cuda):
        raise UserError(f"{plan} wants a GPU for each process: {here} were started here, and {devices} are present")
    if options.pp_plan is not None:
        if options.graphs not in (AUTO, OFF):
            raise UserError(f"graphs {options.graphs} does not go with pp_plan: leave it out")
        return
    if importlib.util.find_spec("accelerate") is None:
        raise UserError("tp_plan needs `pip install accelerate`, by which transformers splits a model")


def num_processes() -> int:
    """Return the number of processes of torch.distributed that work together."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_pair(options: LoadOptions, draft_device: str | None) -> None:
    """Do the same as `check_options`, also for the draft model's device, before the target is loaded."""
    check_options(options)
    if draft_device is not None and draft_device != options.device:
        check_device(draft_device)


def check_memory(shapes: Mapping[str, tuple[int, ...]], options: LoadOptions) -> None:
    """Raise UserError if a model's weights do not fit in the free memory of its GPU."""
    if not options.is_on_cuda:
        return
    free = free_bytes(options.device)
    needed = int(OVERHEAD * torch_bytes(shapes, options))
    if needed > free:
        fitting = sum(map(math.prod, shapes.values())) * free / needed
        name = str(options.torch_dtype).removeprefix("torch.")
        raise UserError(
            f"the weights need {needed / GIB:.1f} GiB in {name}, "
            f"{options.device} has {free / GIB:.1f} GiB free: a model of at most {fitting / 1e9:.1f} billion weights"
            " fits"
        )


def torch_bytes(shapes: Mapping[str, tuple[int, ...]], options: LoadOptions) -> int:
    """Return the bytes of a model's weights in torch.

    In float32 a norm is folded into the output layer, which is therefore a copy of the embedding even if it is tied.
    """
    count = sum(map(math.prod, shapes.values()))
    if "lm_head.weight" not in shapes and options.torch_dtype == torch.float32:
        count += math.prod(shapes.get("model.embed_tokens.weight", (0,)))
    return count * options.torch_dtype.itemsize


def check_host(source: Any, config: LlamaConfig, options: LoadOptions, formats: tuple[str, ...] | None) -> None:
    """Raise UserError if a model on a CPU does not fit in the free memory, with keys and values for a short text.

    `source`: where its weights are read from. `formats`: a file's formats that the native kernels read; None: torch
    runs it.
    """
    if not options.is_on_cpu:
        return
    free, text = available_bytes(), _text_bytes(config, options, formats)
    chosen, choices = _weight_bytes(source, config, options, formats)
    needed = choices[chosen] + text
    if needed <= free:
        return
    fitting = [f"dtype {name} needs {(size + text) / GIB:.1f}" for name, size in choices.items() if size + text <= free]
    weights = sum(map(math.prod, tensor_shapes(config).values()))
    most = weights * (free - text) / min(choices.values()) / 1e9
    smaller = f"a model of at most {most:.1f} billion weights fits so" if most >= FEWEST else "make some of it free"
    what = f"{needed / GIB:.1f} GiB of memory with dtype {chosen} and keys and values for {LEAST} tokens"
    raise UserError(f"{source.path} needs {what}, and {free / GIB:.1f} are free: {' and '.join(fitting) or smaller}")


def host_bytes(source: Any, options: LoadOptions) -> int:
    """Return the bytes that a model on a CPU needs at least: its weights, and keys and values for a short text."""
    config, is_by_torch = from_dict(source.config), options.dtype in FLOATS or options.has_graphs
    formats = None if is_by_torch else read_formats(kernels)
    chosen, choices = _weight_bytes(source, config, options, formats)
    return choices[chosen] + _text_bytes(config, options, formats)


def _text_bytes(config: LlamaConfig, options: LoadOptions, formats: tuple[str, ...] | None) -> int:
    return LEAST * token_bytes(config, options.kv_dtype_or("float32" if formats is None else NATIVE_KV))


def _weight_bytes(
    source: Any, config: LlamaConfig, options: LoadOptions, formats: tuple[str, ...] | None
) -> tuple[str, dict[str, int]]:
    """Return the format that the options choose, and the bytes in it and in every smaller format."""
    shapes = tensor_shapes(config)
    layers = [layer % source.config["num_hidden_layers"] for layer in range(config.num_layers)]

    def stored(name: str) -> StoredSize:
        """Return the size of a weight, which may be wider than in the file."""
        of_file = source_of(name, layers)
        size: StoredSize = source.held(of_file)
        return size._replace(bytes=size.bytes * math.prod(shapes[name]) // math.prod(source.shape(of_file)))

    readable = read_formats(kernels) if formats is None else formats
    sizes = {INT8: native_bytes(shapes, stored, readable, False)}
    if formats is None:
        name = "float32" if options.dtype == AUTO else options.dtype
        sizes[name] = float_bytes(shapes, 4 if name == "float32" else 2)
        return name, sizes
    kept = native_bytes(shapes, stored, formats, True)
    small = native_bytes(shapes, stored, formats, True, in_four=True, threads=min(num_cores(), config.num_layers))
    if options.dtype == INT4:
        return INT4, {INT4: small}
    if small < min(kept, sizes[INT8]):
        sizes[INT4] = small
    keeps = any(len(shape) > 1 and has_blocks(stored(name).kind, formats) for name, shape in shapes.items())
    if options.dtype == FILE or (options.dtype == AUTO and keeps):
        return FILE, {FILE: kept} | (sizes if sizes[INT8] < kept else {})
    return INT8, sizes | ({FILE: kept} if kept < sizes[INT8] else {})

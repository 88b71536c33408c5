"""Checks before loading: whether the device exists and supports the options, and whether the model fits in memory."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from outpace.core.arrays import torch
from outpace.core.errors import UserError, require
from outpace.core.machine import free_bytes
from outpace.models.llama.config import gemma4
from outpace.models.llama.config.llama_config import LlamaConfig, tensor_shapes
from outpace.models.llama.weight_sources import FLOATS, source_of
from outpace.models.options import AUTO, CUDA, FILE, INT4, INT8, OFF, LoadOptions, has_bfloat16

GIB = 1 << 30
INT8_BYTES = 34 / 32  # per weight: a byte, and a half-precision scale for 32 of them
INT4_BYTES = 20 / 32  # per weight: half a byte, and a scale and a minimum for 32 of them


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
    if options.pp_plan is not None:
        check_pipeline(options)
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


def check_pipeline(options: LoadOptions) -> None:
    """Raise UserError if a model cannot be split over processes by `pp_plan`."""
    require("pp_plan", "torch")
    if options.device_map is not None:
        raise UserError("pp_plan and device_map both say where a model's parts go: leave out one of them")
    if num_processes() < 2:
        raise UserError(
            "pp_plan splits a model over several processes, and this one runs alone: start it with"
            " `python -m torch.distributed.run --nproc-per-node 2 -m outpace ...`, one for each device"
        )
    here, devices = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes())), torch.cuda.device_count()
    if devices and here > devices and options.is_on_cuda:
        raise UserError(f"pp_plan wants a GPU for each process: {here} were started here, and {devices} are present")
    if options.graphs not in (AUTO, OFF):
        raise UserError(f"graphs {options.graphs} does not go with pp_plan: leave it out")


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


def check_memory(
    source: Any, config: LlamaConfig, options: LoadOptions, formats: tuple[str, ...] | None, layers: Sequence[int]
) -> None:
    """Raise UserError if a model's weights do not fit in the free memory of its device.

    `source`: where they are read from. `formats`: a file's formats that the native kernels read; None: torch runs it.
    `layers`: the file's layers that `config` has.
    """
    if not (options.is_on_cpu or options.is_on_cuda):
        return
    needed, free = _weight_bytes(source, config, options, formats, layers), free_bytes(options.device)
    if needed > free:
        needs = f"{source.path} needs about {needed / GIB:.1f} GiB of memory, and {free / GIB:.1f} are free"
        raise UserError(f"{needs}: choose a smaller model or dtype, or make some of it free")


def _weight_bytes(
    source: Any, config: LlamaConfig, options: LoadOptions, formats: tuple[str, ...] | None, layers: Sequence[int]
) -> int:
    """Estimate the bytes of a model's weights from their shapes and, for the kernels, their formats in the file."""
    shapes, total = tensor_shapes(config), 0.0
    shapes.pop(gemma4.TABLE, None)  # it stays in its file
    if formats is None:
        return sum(map(math.prod, shapes.values())) * options.torch_dtype.itemsize
    for name, shape in shapes.items():
        count, stored = math.prod(shape), source_of(name, layers)
        kind, size = source.held(stored)
        if len(shape) < 2:
            total += 4 * count
        elif config.experts and ".experts." in name and options.dtype != INT4 and kind in formats:
            total += size / config.experts.count  # experts are packed when they are chosen; one a layer must fit
        elif kind in formats and kind not in FLOATS and options.dtype != INT8:
            total += size * count / math.prod(source.shape(stored))  # a stage of a pipeline may have no embedding
        else:
            total += count * (INT4_BYTES if options.dtype == INT4 and ".layers." in name else INT8_BYTES)
    return int(total)

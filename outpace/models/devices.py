"""Whether a device can do what is asked of it, told before anything is loaded: is it there, the dtype, the memory."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping

from outpace.core.errors import UserError
from outpace.core.extras import install
from outpace.core.lazy import torch
from outpace.models.options import AUTO, CUDA, FILE, OFF, LoadOptions, has_bfloat16

GIB = 1 << 30
ROOM = 1.05  # times the weights: what libraries, and the layout of one tensor at a time, need beside them


def check_device(device: str) -> None:
    """UserError for a device that is not there."""
    if device == "cpu":
        return
    try:
        torch.zeros(1, device=device).item()  # the device meta makes tensors, and holds no values
    except Exception as error:
        have = ["cpu"] + [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        raise UserError(f"device {device!r} is not available here, allowed are {', '.join(have)}") from error


def check_asked(options: LoadOptions) -> None:
    """UserError where the device is not there or cannot compute in this way."""
    check_device(options.device)
    if options.tp_plan is not None:
        check_split(options)
    is_cuda = not options.is_spread and options.device.split(":")[0] == "cuda"
    if options.graphs == CUDA and not is_cuda:
        raise UserError(f"graphs cuda needs a device of CUDA, not {options.device}: say graphs eager, off or {AUTO}")
    if options.quantized:
        check_quantized(options)
    if not is_cuda:
        return
    if options.dtype == FILE:
        raise UserError(f"dtype file runs on a CPU, not on {options.device}: use bfloat16, float16, int8 or fp8 there")
    if options.dtype == "bfloat16" and not has_bfloat16(options.device):
        raise UserError(f"{options.device} cannot compute in bfloat16: use float16 or float32")
    if options.exact and options.graphs == OFF:
        raise UserError("exact mode on CUDA needs graphs: leave out exact, or graphs off")


def check_split(options: LoadOptions) -> None:
    """UserError where a model cannot be split over processes as `tp_plan` says."""
    if options.runtime not in (AUTO, "transformers"):
        raise UserError(f"tp_plan is for the runtime transformers, not for {options.runtime}: leave out one of them")
    if options.device_map is not None:
        raise UserError("tp_plan and device_map both say where a model's parts go: leave out one of them")
    if processes() < 2:
        raise UserError(
            "tp_plan splits a model over several processes, and this one runs alone: start it with"
            " `python -m torch.distributed.run --nproc-per-node 2 -m outpace ...`, one for each device"
        )
    here, devices = int(os.environ.get("LOCAL_WORLD_SIZE", processes())), torch.cuda.device_count()
    if devices and here > devices:
        raise UserError(f"tp_plan wants a GPU for each process: {here} were started here, and {devices} are present")
    if importlib.util.find_spec("accelerate") is None:
        raise UserError("tp_plan needs `pip install accelerate`, by which transformers splits a model")


def processes() -> int:
    """How many processes work together, as torch.distributed.run started them or the program itself."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_quantized(options: LoadOptions) -> None:
    """UserError where weights cannot be held in 8 bits by torch."""
    if options.runtime in ("native", "transformers") or options.is_spread:
        raise UserError(f"dtype {options.dtype} by torch is for the runtime llama, without a device map or tp_plan")
    if options.exact:
        raise UserError(f"exact mode is not available with dtype {options.dtype} by torch: leave out exact")
    if importlib.util.find_spec("torchao") is None:
        raise UserError(f"dtype {options.dtype} by torch needs `{install('torchao')}`")


def check_pair(options: LoadOptions, draft_device: str | None) -> None:
    """As `check_asked`, for a draft's own device too: before the target is loaded."""
    check_asked(options)
    if draft_device is not None and draft_device != options.device:
        check_device(draft_device)


def check_memory(shapes: Mapping[str, tuple[int, ...]], options: LoadOptions) -> None:
    """UserError where a model's weights do not fit into what is free on its GPU; other devices are not asked."""
    if options.is_spread or options.device.split(":")[0] != "cuda":
        return
    free = torch.cuda.mem_get_info(options.device)[0]
    name = options.quantized or str(options.torch_dtype).removeprefix("torch.")
    needed = int(ROOM * held_bytes(shapes, options))
    if needed > free:
        fitting = sum(map(math.prod, shapes.values())) * free / needed
        raise UserError(
            f"the weights need {needed / GIB:.1f} GiB in {name}, "
            f"{options.device} has {free / GIB:.1f} GiB free: a model of at most {fitting / 1e9:.1f} billion weights "
            "fits there, `outpace doctor --plan` shows what fits where"
        )


def held_bytes(shapes: Mapping[str, tuple[int, ...]], options: LoadOptions) -> int:
    """Bytes of a model's weights by torch. The embedding is in the model's dtype, whatever matrices are held in. The
    output layer is a copy of its own, though tied, where it is in 8 bits or, in float32, has a norm folded in."""
    itemsize = options.torch_dtype.itemsize
    embedding = math.prod(shapes.get("model.embed_tokens.weight", (0,)))
    matrices = sum(map(math.prod, shapes.values())) - embedding
    if "lm_head.weight" not in shapes and (options.quantized or options.torch_dtype == torch.float32):
        matrices += embedding
    return embedding * itemsize + matrices * (1 if options.quantized else itemsize)

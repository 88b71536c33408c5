"""Whether a device can do what is asked of it, told before anything is loaded: is it there, the dtype, the memory."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from typing import Any

from outpace.core.errors import UserError, install_command
from outpace.core.lazy import torch
from outpace.core.machine import available_bytes
from outpace.models.llama.config.footprint import StoredSize, float_bytes, has_blocks, native_bytes, token_bytes
from outpace.models.llama.config.llama_config import LlamaConfig, tensor_shapes
from outpace.models.llama.native.binding import load_kernels, read_formats, usable_cores
from outpace.models.llama.weight_sources import source_of
from outpace.models.options import AUTO, CUDA, FILE, FP8, INT4, INT8, NATIVE_KV, OFF, LoadOptions, has_bfloat16

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


def check_options(options: LoadOptions) -> None:
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
        raise UserError(f"dtype {options.dtype} by torch needs `{install_command('torchao')}`")


def check_pair(options: LoadOptions, draft_device: str | None) -> None:
    """As `check_asked`, for a draft's own device too: before the target is loaded."""
    check_options(options)
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
            f"{options.device} has {free / GIB:.1f} GiB free: a model of at most {fitting / 1e9:.1f} billion weights fits"
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


FEWEST = 0.1  # billions of weights that are worth naming
LEAST = 256  # tokens of keys and values that there must be room for


def check_host(source: Any, config: LlamaConfig, options: LoadOptions, formats: tuple[str, ...] | None) -> None:
    """UserError where the weights, with a short text, need more than is free; for a model on a CPU alone.

    `source`: where they are read from. `formats`: those of a file that the native kernels take; None: by torch.
    """
    if not options.is_on_cpu:
        return
    kv_dtype = options.kv_dtype_or("float32" if formats is None else NATIVE_KV)
    free, text = available_bytes(), LEAST * token_bytes(config, kv_dtype)
    chosen, ways = _ways(source, config, options, formats)
    needed = ways[chosen] + text
    if needed <= free:
        return
    fitting = [f"dtype {name} needs {(size + text) / GIB:.1f}" for name, size in ways.items() if size + text <= free]
    weights = sum(map(math.prod, tensor_shapes(config).values()))
    most = weights * (free - text) / min(ways.values()) / 1e9
    smaller = f"a model of at most {most:.1f} billion weights fits so" if most >= FEWEST else "make some of it free"
    what = f"{needed / GIB:.1f} GiB of memory in {chosen}, with keys and values for {LEAST} tokens"
    raise UserError(f"{source.path} needs {what}, and {free / GIB:.1f} are free: {' and '.join(fitting) or smaller}")


def _ways(
    source: Any, config: LlamaConfig, options: LoadOptions, formats: tuple[str, ...] | None
) -> tuple[str, dict[str, int]]:
    """How it is to be held, and bytes by each way that is none larger."""
    shapes = tensor_shapes(config)

    def held(name: str) -> StoredSize:
        found: StoredSize = source.held(source_of(name, source.config["num_hidden_layers"]))
        return found

    ways = {INT8: native_bytes(shapes, held, _read_by_kernels() if formats is None else formats, False)}
    if formats is None:
        name = "float32" if options.dtype == AUTO else options.dtype
        ways[name] = float_bytes(shapes, {"float32": 4, INT8: 1, FP8: 1}.get(name, 2))
        return name, ways
    kept = native_bytes(shapes, held, formats, True)
    small = native_bytes(shapes, held, formats, True, in_four=True, threads=min(usable_cores(), config.num_layers))
    if options.dtype == INT4:
        return INT4, {INT4: small}
    if small < min(kept, ways[INT8]):
        ways[INT4] = small
    keeps = any(len(shape) > 1 and has_blocks(held(name).kind, formats) for name, shape in shapes.items())
    if options.dtype == FILE or (options.dtype == AUTO and keeps):
        return FILE, {FILE: kept} | (ways if ways[INT8] < kept else {})
    return INT8, ways | ({FILE: kept} if kept < ways[INT8] else {})


def _read_by_kernels() -> tuple[str, ...]:
    """The formats that the native kernels would read where they lie; none where they are not installed."""
    try:
        return read_formats(load_kernels())
    except UserError:
        return ()

"""Whether a model fits into this machine's memory, told before it is loaded: what it needs, what is free, what fits."""

from __future__ import annotations

import math
from typing import Any

from outpace.core.available import available_bytes
from outpace.core.errors import UserError
from outpace.models.devices import GIB
from outpace.models.llama.config.footprint import Held, float_bytes, has_blocks, native_bytes, token_bytes
from outpace.models.llama.config.llama_config import LlamaConfig, tensor_shapes
from outpace.models.llama.inflate import source_of
from outpace.models.llama.native_kernels import load_kernels, read_formats, usable_cores
from outpace.models.options import AUTO, FILE, FP8, INT4, INT8, NATIVE_KV, LoadOptions

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

    def held(name: str) -> Held:
        found: Held = source.held(source_of(name, source.config["num_hidden_layers"]))
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

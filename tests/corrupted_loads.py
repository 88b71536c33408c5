"""Run as a script: loads damaged models by number and prints a line of JSON for each: what became of it.

Arguments: a folder to work in, the first number, how many, bytes of memory beyond those in use, seconds for each.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from corruptions import Damage

from outpace.core.errors import UserError
from outpace.models.base import chain
from outpace.models.load import load_model


def use(path: Path, number: int) -> None:
    """Load the model; encode and decode text, run a pass, and in some cases render a chat."""
    loaded = load_model(path, exact=None if number % 10 == 0 else False, runtime="llama")
    tokenizer, model = loaded.tokenizer, loaded.model
    ids = tokenizer.encode("hello world 12")[:8] or [0]
    tokenizer.decode(ids)
    stream = tokenizer.stream()
    stream.push(ids)
    stream.finish()
    session = model.open(16, 4)
    model.score([chain(session, ids[: session.free], [0])])
    if number % 20 == 3:
        tokenizer.chat([{"role": "user", "content": "Hi"}])


def outcome(work: Callable[[], None]) -> str:
    """Return "loaded", "refused: ..." or "failed: ..."."""
    try:
        work()
    except UserError as error:
        return f"refused: {error}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of the Rust libraries is not an Exception
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
        return f"failed: {type(error).__name__}: {error!s:.200} ({where})"
    return "loaded"


def main(folder: Path, first: int, count: int, memory: int, patience: float) -> None:
    """A case that takes longer than `patience` ends the process, with its stack on stderr."""
    torch.set_num_threads(1)
    os.environ["OUTPACE_CACHE"] = str(folder / "cache")
    damage = Damage(folder)
    use(damage.plain, 0)  # whatever is loaded at a first use is loaded now
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + memory, in_use + memory))
    for number in range(first, first + count):
        path, words = damage.case(number)
        faulthandler.dump_traceback_later(patience, exit=True)
        result = outcome(partial(use, path, number))
        faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(folder / "cache", ignore_errors=True)
        executed = damage.canary.exists()
        print(json.dumps({"number": number, "damage": words, "outcome": result, "executed": executed}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))

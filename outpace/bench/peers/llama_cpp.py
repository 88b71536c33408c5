"""llama.cpp with the target's GGUF file, or with 8-bit weights (Q8_0) converted from a folder: greedy.

llama.cpp, https://github.com/ggml-org/llama.cpp, by llama-cpp-python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outpace.bench.peer import Peer, PeerSettings, TimedAnswer
from outpace.bench.peers._rounds import RoundRecorder, check_length, require
from outpace.core.errors import UserError, install_command
from outpace.models.files.gguf.writer import gguf_file, main_kind

INSTALL = f"`{install_command('llama-cpp')}` (it is compiled, which takes minutes)"
BATCH = 512  # rows per forward, llama.cpp's default
Propose = Callable[[np.ndarray], np.ndarray]


def build(settings: PeerSettings) -> Peer:
    """Load the target's file, or its weights converted once; UserError if llama-cpp-python is not installed."""
    return LlamaCpp("llama_cpp", settings)


class LlamaCpp:
    """The target as a GGUF file.

    `propose` returns drafts, int32 [drafts], for the text so far, int32 [tokens]; `draft` is the llama.cpp model that
    it uses, if any.
    """

    def __init__(self, name: str, settings: PeerSettings, propose: Propose | None = None, draft: Any = None) -> None:
        file = gguf_file(settings.target)
        self.name, self.precision = name, main_kind(file)
        self._settings = settings
        self._adapter: Any = None if propose is None else _adapt(propose)
        flash = propose is None  # a few percent faster for one row, as much slower for several
        self._llama = open_llama(name, file, settings, self._adapter, flash)
        self._models = [self._llama] if draft is None else [self._llama, draft]

    def answer(self, prompt: Sequence[int], max_tokens: int) -> TimedAnswer:
        check_length(self.name, self._settings, prompt, max_tokens)
        for llama in self._models:
            llama.reset()  # else it keeps the KV cache of the prefix shared with the last prompt
        if self._adapter is not None:
            self._adapter.begin()
        recorder = RoundRecorder(self._settings.stop_ids, max_tokens)
        num_calls = -1
        for token in self._llama.generate(list(prompt), temp=0.0):
            if self._adapter is None:
                recorder.begin()
            elif self._adapter.num_calls != num_calls:  # a round's tokens come singly, then drafts are requested
                num_calls = self._adapter.num_calls
                recorder.begin(self._adapter.last_drafts)
            recorder.write(token)
            if recorder.is_over:
                break
        return recorder.finish()

    def close(self) -> None:
        for llama in self._models:
            llama.close()


def open_llama(name: str, file: Path, settings: PeerSettings, draft_model: Any = None, flash: bool = False) -> Any:
    """Open a GGUF file, with flash attention if `flash`. UserError if llama.cpp is missing or refuses the file."""
    require(name, "llama_cpp", INSTALL)
    import llama_cpp

    options: dict[str, Any] = {"n_ctx": settings.max_context, "n_batch": BATCH, "n_ubatch": BATCH, "verbose": False}
    options |= {"n_threads": settings.threads, "n_threads_batch": settings.threads}
    # verifying drafts needs the logits of every position, which llama-cpp-python only stores with logits_all
    options |= {"draft_model": draft_model, "logits_all": draft_model is not None, "flash_attn": flash}
    try:
        return llama_cpp.Llama(str(file), **options)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"peer {name} cannot load {file} ({error!s:.200})") from error


def _adapt(propose: Propose) -> Any:
    """Wrap a function that drafts in llama-cpp-python's interface; it counts calls and stores the last drafts."""
    from llama_cpp.llama_speculative import LlamaDraftModel

    class Adapter(LlamaDraftModel):
        def begin(self) -> None:
            self.num_calls, self.last_drafts = 0, list[int]()

        def __call__(self, input_ids: np.ndarray, /, **kwargs: Any) -> np.ndarray:
            proposed = propose(input_ids)
            self.num_calls, self.last_drafts = self.num_calls + 1, proposed.tolist()
            return proposed

    return Adapter()

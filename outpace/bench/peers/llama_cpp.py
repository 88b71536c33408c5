"""llama.cpp with 8-bit weights (Q8_0): greedy, by llama-cpp-python.

llama.cpp, https://github.com/ggml-org/llama.cpp; its quantisation Q8_0 has a scale for every 32 weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from outpace.bench.peer import Answered, Peer, PeerSettings
from outpace.bench.peers._gguf import gguf_file
from outpace.bench.peers._rounds import Rounds, check_room, need
from outpace.core.errors import UserError, install_command

INSTALL = f"`{install_command('llama-cpp')}` (it is compiled, which takes minutes)"
BATCH = 512  # rows at once, llama.cpp's default


class Drafts(Protocol):
    """What proposes tokens to llama.cpp."""

    def propose(self, text: np.ndarray) -> np.ndarray:
        """Drafts [drafts] int32 for the text so far. [tokens] int32"""

    def forget(self) -> None:
        """Another prompt comes."""

    def close(self) -> None:
        """Frees its memory."""


class LlamaCpp:
    """The target as a GGUF file with matrices of `kind`, and what drafts for it."""

    def __init__(self, name: str, settings: PeerSettings, kind: str, drafts: Drafts | None = None) -> None:
        self.name, self.precision = name, kind
        self._settings, self._drafts = settings, drafts
        self._watch: Any = None if drafts is None else _watched(drafts)
        flash = drafts is None  # a few percent faster for one row, as much slower for several
        self._llama = open_llama(name, gguf_file(settings.target, kind), settings, self._watch, flash)

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answered:
        """Continues the prompt until a stop token, which counts, or `max_tokens`."""
        check_room(self.name, self._settings, prompt, max_tokens)
        self._llama.reset()  # else it goes on from where the last prompt was alike
        if self._drafts is not None:
            self._drafts.forget()
            self._watch.begin()
        rounds = Rounds(self._settings.stop_ids, max_tokens)
        num_asked = -1
        for token in self._llama.generate(list(prompt), temp=0.0):
            if self._watch is None:
                rounds.begin()
            elif self._watch.num_asked != num_asked:  # a round's tokens come one by one, then it asks for drafts
                num_asked = self._watch.num_asked
                rounds.begin(self._watch.found)
            rounds.write(token)
            if rounds.is_over:
                break
        return rounds.answered()

    def close(self) -> None:
        """Frees its memory."""
        self._llama.close()
        if self._drafts is not None:
            self._drafts.close()


class ModelDrafts:
    """Drafts `count` tokens by another model, which goes on from where the text is still what it saw."""

    def __init__(self, llama: Any, count: int) -> None:
        self._llama, self._count = llama, count

    def propose(self, text: np.ndarray) -> np.ndarray:
        """Its own greedy continuation."""
        return np.array(list(islice(self._llama.generate(text.tolist(), temp=0.0), self._count)), dtype=np.intc)

    def forget(self) -> None:
        """Another prompt comes."""
        self._llama.reset()

    def close(self) -> None:
        """Frees its memory."""
        self._llama.close()


def open_llama(name: str, file: Path, settings: PeerSettings, draft_model: Any = None, flash: bool = False) -> Any:
    """llama.cpp on a GGUF file, `flash`: with flash attention. UserError where it is missing or refuses the file."""
    need(name, "llama_cpp", INSTALL)
    import llama_cpp

    options: dict[str, Any] = {"n_ctx": settings.max_context, "n_batch": BATCH, "n_ubatch": BATCH, "verbose": False}
    options |= {"n_threads": settings.threads, "n_threads_batch": settings.threads}
    # with drafts it scores every position, and its table of scores is large enough for that only if told so
    options |= {"draft_model": draft_model, "logits_all": draft_model is not None, "flash_attn": flash}
    try:
        return llama_cpp.Llama(str(file), **options)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"peer {name} cannot load {file} ({error!s:.200})") from error


def _watched(drafts: Drafts) -> Any:
    """The drafts as llama-cpp-python asks for them; it remembers the last ones and how often it was asked."""
    from llama_cpp.llama_speculative import LlamaDraftModel

    class Watched(LlamaDraftModel):
        def begin(self) -> None:
            self.num_asked, self.found = 0, list[int]()

        def __call__(self, input_ids: np.ndarray, /, **kwargs: Any) -> np.ndarray:
            proposed = drafts.propose(input_ids)
            self.num_asked, self.found = self.num_asked + 1, proposed.tolist()
            return proposed

    return Watched()


def build(settings: PeerSettings) -> Peer:
    """The peer on the target's weights, converted once; UserError where it is not installed."""
    return LlamaCpp("llama_cpp", settings, "Q8_0")

"""transformers' generate: greedy, float32, with its key-value cache.

Wolf et al., "Transformers: State-of-the-Art Natural Language Processing", EMNLP 2020, arXiv:1910.03771.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outpace.bench.peer import Peer, PeerSettings, TimedAnswer
from outpace.bench.peers._rounds import RoundRecorder, check_length, require
from outpace.core.arrays import torch
from outpace.core.errors import UserError, install_command
from outpace.models.files.find import resolve

INSTALL = f"`{install_command('bench')}`"


def build(settings: PeerSettings) -> Peer:
    """Load the target; UserError if transformers is not installed."""
    return Generate("transformers", settings)


class Generate:
    """A loaded model and the options of its generate method."""

    precision = "float32"

    def __init__(self, name: str, settings: PeerSettings, **options: Any) -> None:
        self.name = name
        self._settings, self._options = settings, options
        self._model = load(name, settings.target)
        torch.set_num_threads(settings.threads)

    def answer(self, prompt: Sequence[int], max_tokens: int) -> TimedAnswer:
        check_length(self.name, self._settings, prompt, max_tokens)
        ids = torch.tensor([list(prompt)])
        stop_ids = sorted(self._settings.stop_ids)
        fixed = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_tokens, "do_sample": False}
        ends = {"eos_token_id": stop_ids or None, "pad_token_id": stop_ids[0] if stop_ids else 0}
        streamer = _Streamer(RoundRecorder(self._settings.stop_ids, max_tokens), is_drafting=bool(self._options))
        hook = self._model.register_forward_pre_hook(streamer.observe, with_kwargs=True)
        try:
            self._model.generate(ids, streamer=streamer, **fixed, **ends, **self._options)
        finally:
            hook.remove()
        return streamer.recorder.finish()

    def close(self) -> None:
        self._model = None
        self._options = {}


class _Streamer:
    """Receives the prompt, then each round's tokens; the input ids of the round's forward end with its drafts."""

    def __init__(self, recorder: RoundRecorder, is_drafting: bool) -> None:
        self.recorder, self._is_drafting = recorder, is_drafting
        self._ids: list[int] = []
        self._num_text = 0  # input ids before the drafts: the prompt, later the last token

    def observe(self, module: Any, args: Any, kwargs: Any) -> None:
        self._ids = kwargs["input_ids"][0].tolist()

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt [1, tokens] or new tokens, [tokens] or [1, tokens]."""
        tokens = value.flatten().tolist()
        if not self._num_text:
            self._num_text = len(tokens)
        else:
            self.recorder.begin(self._ids[self._num_text :] if self._is_drafting else None)
            self.recorder.write(*tokens)
            self._num_text = 1

    def end(self) -> None:
        """Do nothing; transformers calls this at the end."""


def load(name: str, spec: str | Path | None) -> Any:
    """Load a model in float32 from the tensors that outpace's own runtimes read; UserError if that fails."""
    require(name, "transformers", INSTALL)
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = resolve(None if spec is None else str(spec))
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # transformers raises many classes for bad files
        raise UserError(f"peer {name} cannot load {folder} ({type(error).__name__}: {error!s:.200})") from error
    model, info = loaded
    if info["missing_keys"]:  # transformers fills them with random numbers
        raise UserError(f"peer {name} misses weights in {folder}, the first is {min(info['missing_keys'])}")
    model.generation_config = GenerationConfig()  # a file's penalties and temperatures are no part of greedy
    return model.eval()

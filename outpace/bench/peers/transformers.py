"""transformers' generate: greedy, float32, with its key-value cache.

Wolf et al., "Transformers: State-of-the-Art Natural Language Processing", EMNLP 2020, arXiv:1910.03771.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from outpace.bench.peer import Peer, PeerSettings, TimedAnswer
from outpace.bench.peers._rounds import RoundRecorder, check_length, require
from outpace.core.errors import UserError, install_command

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

    def answer(self, prompt: Sequence[int], max_tokens: int) -> TimedAnswer:
        """Continue the prompt until a stop token, which is included, or `max_tokens`."""
        check_length(self.name, self._settings, prompt, max_tokens)
        ids = torch.tensor([list(prompt)])
        stop_ids = sorted(self._settings.stop_ids)
        fixed = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_tokens, "do_sample": False}
        ends = {"eos_token_id": stop_ids or None, "pad_token_id": stop_ids[0] if stop_ids else 0}
        with quiet(), num_threads(self._settings.threads), _InputIds(self._model) as inputs:
            recorder = RoundRecorder(self._settings.stop_ids, max_tokens)
            streamer = _Streamer(recorder, inputs if self._options else None)
            self._model.generate(ids, streamer=streamer, **fixed, **ends, **self._options)
            return recorder.finish()

    def close(self) -> None:
        """Free the weights."""
        self._model = None
        self._options = {}


class _InputIds:
    """Observes the input ids of the model's forwards; after the first, all but one of them are drafts."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._ids: list[int] = []
        self._is_first = True

    def __enter__(self) -> _InputIds:
        self._hook = self._model.register_forward_pre_hook(self._observe, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def _observe(self, module: Any, args: Any, kwargs: Any) -> None:
        self._ids = kwargs["input_ids"][0].tolist()

    def drafts(self, num_prompt: int) -> list[int]:
        """Return the drafts in the last forward, after the text; the prompt has `num_prompt` tokens."""
        text = num_prompt if self._is_first else 1
        self._is_first = False
        return self._ids[text:]


class _Streamer:
    """Receives the prompt first, then each round's tokens."""

    def __init__(self, recorder: RoundRecorder, inputs: _InputIds | None) -> None:
        self._recorder, self._inputs = recorder, inputs
        self._num_prompt: int | None = None

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt [1, tokens] or new tokens, [tokens] or [1, tokens]."""
        tokens = value.flatten().tolist()
        if self._num_prompt is None:
            self._num_prompt = len(tokens)
        else:
            self._recorder.begin(self._inputs.drafts(self._num_prompt) if self._inputs else None)
            self._recorder.write(*tokens)

    def end(self) -> None:
        """Do nothing; transformers calls this at the end."""


def load(name: str, spec: str | Path | None) -> Any:
    """Load a model in float32 from the tensors that outpace's own runtimes read; UserError if that fails."""
    require(name, "transformers", INSTALL)
    from transformers import AutoModelForCausalLM, GenerationConfig

    from outpace.models.files.find import resolve

    folder = resolve(None if spec is None else str(spec))
    with quiet():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        except Exception as error:  # transformers raises many classes for bad files
            raise UserError(f"peer {name} cannot load {folder} ({type(error).__name__}: {error!s:.200})") from error
    model, info = loaded
    if info["missing_keys"]:  # transformers fills them with random numbers
        raise UserError(f"peer {name} misses weights in {folder}, the first is {min(info['missing_keys'])}")
    model.generation_config = GenerationConfig()  # a file's penalties and temperatures are no part of greedy
    return model.eval()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and warnings."""
    from transformers.utils import logging

    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads temporarily."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

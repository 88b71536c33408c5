"""transformers' generate as a peer: float32, greedy, its own cache; what it is shown tells what was drafted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from outpace.bench.peer import Answered, PeerSettings
from outpace.bench.peers._rounds import Rounds, check_room, need
from outpace.core.errors import UserError, install_command

INSTALL = f"`{install_command('bench')}`"


class Generate:
    """A loaded model of transformers; `options` go to its generate."""

    precision = "float32"

    def __init__(self, name: str, settings: PeerSettings, **options: Any) -> None:
        self.name = name
        self._settings, self._options = settings, options
        self._model = load(name, settings.target)

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answered:
        """Continues the prompt until a stop token, which counts, or `max_tokens`."""
        check_room(self.name, self._settings, prompt, max_tokens)
        ids = torch.tensor([list(prompt)])
        stop_ids = sorted(self._settings.stop_ids)
        fixed = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_tokens, "do_sample": False}
        ends = {"eos_token_id": stop_ids or None, "pad_token_id": stop_ids[0] if stop_ids else 0}
        with quiet(), num_threads(self._settings.threads), _Shown(self._model) as shown:
            rounds = Rounds(self._settings.stop_ids, max_tokens)
            streamer = _Streamer(rounds, shown if self._options else None)
            self._model.generate(ids, streamer=streamer, **fixed, **ends, **self._options)
            return rounds.answered()

    def close(self) -> None:
        """Lets go of the weights."""
        self._model = None
        self._options = {}


class _Shown:
    """The tokens of the model's last pass; of each pass behind the first, all but one are drafts."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._ids: list[int] = []
        self._is_first = True

    def __enter__(self) -> _Shown:
        self._hook = self._model.register_forward_pre_hook(self._note, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def _note(self, module: Any, args: Any, kwargs: Any) -> None:
        self._ids = kwargs["input_ids"][0].tolist()

    def drafts(self, num_prompt: int) -> list[int]:
        """What the last pass was shown behind the text, whose prompt has `num_prompt` tokens."""
        text = num_prompt if self._is_first else 1
        self._is_first = False
        return self._ids[text:]


class _Streamer:
    """Takes the prompt first, then every round's tokens, as transformers hands them out."""

    def __init__(self, rounds: Rounds, shown: _Shown | None) -> None:
        self._rounds, self._shown = rounds, shown
        self._num_prompt: int | None = None

    def put(self, value: torch.Tensor) -> None:
        """The prompt [1, tokens], or what was written. [tokens] or [1, tokens]"""
        tokens = value.flatten().tolist()
        if self._num_prompt is None:
            self._num_prompt = len(tokens)
        else:
            self._rounds.begin(self._shown.drafts(self._num_prompt) if self._shown else None)
            self._rounds.write(*tokens)

    def end(self) -> None:
        """The answer is over."""


def load(name: str, spec: str | Path | None) -> Any:
    """The model in float32 from the very tensors that our own runtimes read; UserError where it does not load."""
    need(name, "transformers", INSTALL)
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
    """transformers without its bars and its advice on its own calls."""
    from transformers.utils import logging

    level, drawn = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if drawn:
            logging.enable_progress_bar()


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """torch on so many threads, and then on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Plain decoding of many texts at once by one graph, with which the host interacts only now and then.

The graph runs one step of all texts, samples each text's next token on the device and feeds it to the next step.
Prompts are read token by token among the other texts' answers, so every step is the same graph. It writes the training
text of a draft model, where only throughput counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.core.arrays import to_device
from outpace.core.noise import exponential_from_words, row_words
from outpace.core.sampling import race_winners
from outpace.core.types import Request
from outpace.models.llama.cuda.captures import MAX_PENDING, WORDS, Captures
from outpace.models.llama.cuda.pool import Pool
from outpace.models.llama.cuda.runtime import GraphLlama

CHUNK = 128  # of the vocabulary, for the two steps of top-k


class FinishedText(NamedTuple):
    """A finished answer, int64 [tokens], with the top k tokens at each position and their log-probabilities.

    int64 and float32 [tokens, k], highest first, at temperature 1.
    """

    row: int
    tokens: np.ndarray
    top_ids: np.ndarray
    top_log_p: np.ndarray


class WritingLoop:
    """Writes up to `rows` texts of at most `length` tokens, prompts included, by a captured model with its own pool.

    Requests are greedy or sampled by rule gumbel, without filters and adjustments.
    """

    def __init__(self, model: GraphLlama, rows: int, length: int, top: int) -> None:
        self.rows, self.length, self.top = rows, length, top
        self._model, device = copy(model), model.device
        self._model.captures = Captures(model.captures.is_eager)
        self._model.pool = Pool(model.config, model._kv_format, device, model.min_slots)
        self._model.pool.resize(rows, length)
        self._model._rope.grow_to(length)
        self._model._hidden = torch.zeros(rows, model.config.hidden_size, dtype=model.dtype, device=device)
        whole = {"dtype": torch.int64, "device": device}
        self._texts = torch.zeros(rows, length + 1, **whole)  # the last column is unused
        self._ids = torch.zeros(rows, length + 1, top, **whole)
        self._log_p = torch.zeros(rows, length + 1, top, device=device)
        self._keys = torch.zeros(rows, length + 1, 2, dtype=torch.int32, device=device)
        self._place = torch.zeros(rows, **whole)  # position of the next token to read
        self._prompt, self._end = torch.ones(rows, **whole), torch.zeros(rows, **whole)  # an end of 0: the row is free
        self._temperature = torch.ones(rows, device=device)
        self._is_greedy = torch.ones(rows, dtype=torch.bool, device=device)
        bits = torch.zeros(rows, 1, WORDS, **whole)
        bits[..., 0] = 1  # a token sees itself and everything before it
        self._inputs = {
            "bits": bits,
            "depths": torch.zeros(rows, 1, **whole),
            "below": torch.zeros(rows, MAX_PENDING, **whole),
        }
        self._begun: dict[int, Request] = {}  # by busy row

    @property
    def free(self) -> list[int]:
        """Rows without a text."""
        return [row for row in range(self.rows) if row not in self._begun]

    @torch.inference_mode()
    def begin(self, requests: Sequence[tuple[int, Request]]) -> None:
        if not requests:
            return
        device, count = self._texts.device, len(requests)
        tokens, keys = np.zeros((count, self.length + 1), np.int64), np.zeros((count, self.length + 1, 2), np.int32)
        for number, (row, request) in enumerate(requests):
            start, end = len(request.prompt), _end(request)
            tokens[number, :start] = request.prompt
            keys[number, start:end] = row_words(request.seed, request.choice, np.arange(start, end))
            self._begun[row] = request
        at = to_device([row for row, _ in requests], np.int64, device)
        self._texts[at] = to_device(tokens, np.int64, device)
        self._keys[at] = to_device(keys, np.int32, device)
        self._place[at] = 0
        self._prompt[at] = to_device([len(request.prompt) for _, request in requests], np.int64, device)
        self._end[at] = to_device([_end(request) for _, request in requests], np.int64, device)
        temperatures = [request.sampling.temperature or 1.0 for _, request in requests]
        self._temperature[at] = to_device(temperatures, np.float32, device)
        self._is_greedy[at] = to_device([request.sampling.is_greedy for _, request in requests], np.bool_, device)

    @torch.inference_mode()
    def run(self, steps: int) -> list[FinishedText]:
        """Run `steps` steps of all rows; return the texts that finished and free their rows.

        A text may go on after a stop token until the steps are over; what follows it is dropped.
        """
        captures, key = self._model.captures, ("loop",)
        tables = self._model._rope.tables
        captures.forget_if_moved(self._model.pool.kv, *tables)
        captures.prepare(key, self._step, self._model.pool.kv, *tables, self._model._hidden, self._texts, self._place)
        for _ in range(steps):
            captures.replay(key)
        ends = self._ends(steps)
        return self._finished(ends) if ends else []

    def _ends(self, steps: int) -> dict[int, int]:
        """Return where the texts end that finished in the last steps, by row."""
        back = torch.arange(steps - 1, -1, -1, device=self._place.device)
        latest = self._texts.gather(1, (self._place[:, None] - back).clamp(min=0)).cpu().numpy()  # [rows, steps]
        places, found = self._place.tolist(), {}
        for row, request in self._begun.items():
            place = places[row]  # of the last token
            first = max(len(request.prompt), place + 1 - steps)
            if place >= first:
                stop = request.until_stop(latest[row, first - place - 1 :].tolist())
                if stop is not None or place + 1 >= _end(request):
                    found[row] = place + 1 if stop is None else first + stop
        return found

    def _finished(self, ends: Mapping[int, int]) -> list[FinishedText]:
        at = to_device(list(ends), np.int64, self._texts.device)
        self._end[at] = 0
        longest = max(ends.values())
        texts, ids, log_p = (part[at, :longest].cpu().numpy() for part in (self._texts, self._ids, self._log_p))
        found = []
        for number, (row, end) in enumerate(ends.items()):
            answer = slice(len(self._begun.pop(row).prompt), end)
            found.append(FinishedText(row, texts[number, answer], ids[number, answer], log_p[number, answer]))
        return found

    def _step(self) -> None:
        """Captured: read every row's next token, and sample the one after it unless it is part of the prompt."""
        place = self._place[:, None]
        now = {"tokens": self._texts.gather(1, place), "positions": place, "slots": place, "lengths": self._place}
        self._model._layers_pass(0, self._inputs | now, self.length)
        logits = self._model._logits(self._model._hidden).float()  # [rows, vocab]
        log_p, ids = _top_k(torch.log_softmax(logits, -1), self.top)
        after = place + 1
        keys = self._keys.gather(1, after[..., None].expand(-1, 1, 2))[:, 0]
        scaled = torch.log_softmax(logits / self._temperature[:, None], -1)
        sampled = race_winners(scaled, exponential_from_words(keys, scaled.shape[-1]))
        picked = torch.where(self._is_greedy, logits.argmax(-1), sampled)
        is_answer, is_live = after[:, 0] >= self._prompt, after[:, 0] < self._end
        token = torch.where(is_answer, picked, self._texts.gather(1, after)[:, 0])
        self._texts.scatter_(1, after, token[:, None])
        self._ids.scatter_(1, after[..., None].expand(-1, 1, self.top), ids[:, None])
        self._log_p.scatter_(1, after[..., None].expand(-1, 1, self.top), log_p[:, None])
        self._place.add_(is_live)  # finished rows stop


def _end(request: Request) -> int:
    """Return the most tokens of a text, prompt included."""
    return len(request.prompt) + request.max_tokens


def _top_k(log_p: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest values of each row, largest first, and their indices: [rows, count] both

    They are in the chunks with the largest maxima, so only a few numbers are sorted.
    """
    parts = F.pad(log_p, (0, -log_p.shape[1] % CHUNK), value=-math.inf).unflatten(1, (-1, CHUNK))
    maxima = parts.amax(-1)
    at = maxima.topk(min(count, maxima.shape[1]), -1).indices  # [rows, chosen]
    inside = parts.gather(1, at[..., None].expand(-1, -1, CHUNK)).flatten(1)
    top = inside.topk(count, -1)
    return top.values, at.gather(1, top.indices // CHUNK) * CHUNK + top.indices % CHUNK

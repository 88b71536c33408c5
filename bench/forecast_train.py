"""Train the shipped pair of `outpace forecast`: a target, and a draft that learns from it (KL): first both together,
in the last fifth of the time the draft alone.

The data are SimBench's load profiles of a year (`pip install --no-deps simbench`; ODbL). 15 series and the last fifth
of time are held out. The run may be stopped and started again; it continues from its last checkpoint.

    python bench/forecast_train.py --out FOLDER [--minutes 30] [--threads 1] [--draft-length 0]

--minutes of processor time; --draft-length, which `bench/forecast.py times` finds, is drafted if a seed is given.
"""

from __future__ import annotations

import math
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import parse, run
from torch import Tensor
from torch.distributions import Distribution
from transformers import LlamaConfig

from outpace.studies.timeseries.transformer import PatchTransformer

POINTS = 8  # of a patch
CONTEXT = 112  # most patches of history
LENGTH = CONTEXT + 16  # patches of a training window
FACTORS = {"15min": 1, "30min": 2, "h": 4}  # by frequency: quarter hours in a point
SHARES = (0.7, 0.15, 0.15)
HELD_OUT = 15  # series
TRAIN_SHARE = 0.8  # of time
TARGET = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4, "num_attention_heads": 4}
DRAFT = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 3}
TOGETHER = 0.8  # share of the time in which both learn
ROWS, RATE, WARMUP, CLIP, DRAWS = 16, 2e-3, 100, 1.0, 4  # DRAWS: from the target for each patch, for the draft's KL


def load_profiles() -> dict[str, np.ndarray]:
    """Return SimBench's load profiles by name, without those that stand still for a tenth of the steps or longer and
    those that repeat another one."""
    spec = find_spec("simbench")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("this script needs the data of `pip install --no-deps simbench`")
    folder = Path(spec.submodule_search_locations[0]) / "networks" / "1-complete_data-mixed-all-0-sw"
    table = pd.read_csv(folder / "LoadProfile.csv", sep=";").drop(columns="time")
    values = {name: column.to_numpy(np.float64) for name, column in table.items()}
    moving = {name: x for name, x in values.items() if x.std() > 0 and (np.diff(x) == 0).mean() < 0.1}
    alike = np.abs(np.corrcoef(list(moving.values()))) > 0.999
    return {name: x for number, (name, x) in enumerate(moving.items()) if not alike[number, :number].any()}


def split() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the training part of the training series, and the last fifth of the held-out series.

    A profile's active and reactive power (`_pload`, `_qload`) are on the same side.
    """
    profiles = load_profiles()
    places = sorted({name.rpartition("_")[0] for name in profiles})
    held: list[str] = []
    for place in np.random.default_rng(1).permutation(places):
        members = [name for name in profiles if name.rpartition("_")[0] == place]
        if len(held) + len(members) <= HELD_OUT:
            held += members
    cut = int(TRAIN_SHARE * len(next(iter(profiles.values()))))
    train = {name: x[:cut] for name, x in profiles.items() if name not in held}
    return train, {name: profiles[name][cut:] for name in held}


def averaged(series: np.ndarray, factor: int) -> np.ndarray:
    """Return the means of each `factor` points."""
    return series[: len(series) // factor * factor].reshape(-1, factor).mean(1)


def draw_windows(series: list[list[np.ndarray]], rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Draw windows [rows, LENGTH + 1, points], scaled by the mean and deviation of their history, and the numbers of
    patches that are history; `series` are lists by frequency."""
    windows, contexts = [], []
    while len(windows) < ROWS:
        values = series[rng.integers(len(series))][rng.choice(len(SHARES), p=SHARES)]
        start, context = rng.integers(len(values) - (LENGTH + 1) * POINTS), int(rng.integers(12, CONTEXT + 1))
        window = values[start : start + (LENGTH + 1) * POINTS].reshape(-1, POINTS)
        deviation = window[:context].std()
        if deviation > 1e-6:
            windows.append((window - window[:context].mean()) / deviation)
            contexts.append(context)
    return torch.tensor(np.array(windows), dtype=torch.float32), torch.tensor(contexts)


def build(shape: dict[str, int]) -> PatchTransformer:
    """Build a model with random weights; the table of token embeddings, which is unused, has one row."""
    config = LlamaConfig(**shape, vocab_size=1, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None)
    config.patch_length, config.frequencies, config.draft_length = POINTS, list(FACTORS), None
    return PatchTransformer(config)


def acceptance(p: Distribution, q: Distribution) -> Tensor:
    """Return the estimated chance that a patch drawn from q is accepted, by patch."""
    draws = q.sample(torch.Size([8]))
    return (p.log_prob(draws) - q.log_prob(draws)).exp().clamp(max=1.0).mean(0)


class Run:
    """The models, their optimizer and the time spent; saved and loaded as one file."""

    def __init__(self, folder: Path, minutes: float) -> None:
        torch.manual_seed(1)
        self.target, self.draft = build(TARGET), build(DRAFT)
        weights = [*self.target.parameters(), *self.draft.parameters()]
        self.optimizer = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.98), weight_decay=0.05)
        self.folder, self.seconds, self.spent, self.step = folder, 60.0 * minutes, 0.0, 0
        self.file = folder / "checkpoint.pt"
        if self.file.exists():
            saved = torch.load(self.file, weights_only=True)
            for name, part in self._parts().items():
                part.load_state_dict(saved[name])
            self.spent, self.step = saved["spent"], saved["step"]

    def _parts(self) -> dict[str, Any]:
        return {"target": self.target, "draft": self.draft, "optimizer": self.optimizer}

    def save(self) -> None:
        """Write the checkpoint; a run that is killed meanwhile leaves the earlier one."""
        state = {name: part.state_dict() for name, part in self._parts().items()}
        torch.save({**state, "spent": self.spent, "step": self.step}, self.file.with_suffix(".new"))
        self.file.with_suffix(".new").replace(self.file)

    @property
    def share(self) -> float:
        """Share of the time that is spent."""
        return min(1.0, self.spent / self.seconds)

    def set_rate(self) -> None:
        """Warm up, then lower the learning rate along a cosine of the time spent in each of the two parts."""
        is_alone = self.share >= TOGETHER
        share = (self.share - TOGETHER) / (1.0 - TOGETHER) if is_alone else self.share / TOGETHER
        rate = RATE * min(1.0, (self.step + 1) / WARMUP) * 0.5 * (1.0 + math.cos(math.pi * share))
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def learn(self, windows: Tensor, contexts: Tensor) -> tuple[float, float, float]:
        """Take one step; return the target's loss, the draft's and the acceptance after the history."""
        inputs, labels = windows[:, :-1], windows[:, 1:]
        after = torch.arange(LENGTH)[None] >= contexts[:, None] - 1
        weights = torch.where(after, 1.0, 0.3)  # patches of the history help, though their scale knows the future
        weights = weights / weights.sum()
        with torch.set_grad_enabled(self.share < TOGETHER):
            p = self.target(inputs)
        q = self.draft(inputs)
        target_loss = -(p.log_prob(labels) * weights).sum()
        with torch.no_grad():
            draws = p.sample(torch.Size([DRAWS]))
            known = p.log_prob(draws)
        draft_loss = ((known - q.log_prob(draws)).mean(0) * weights).sum()
        self.optimizer.zero_grad()
        (target_loss + draft_loss).backward()
        for part in (self.target, self.draft):
            torch.nn.utils.clip_grad_norm_(part.parameters(), CLIP)
        self.optimizer.step()
        with torch.no_grad():
            accepted = acceptance(p, q)[after].mean()
        return target_loss.item() / POINTS, draft_loss.item(), accepted.item()

    def train(self) -> None:
        """Train until the time is spent, with a checkpoint every minute."""
        series = [[averaged(x, factor) for factor in FACTORS.values()] for x in split()[0].values()]
        rng, seen, saved = np.random.default_rng(self.step), [], time.monotonic()
        while self.spent < self.seconds:
            begin = time.process_time()
            self.set_rate()
            seen.append(self.learn(*draw_windows(series, rng)))
            self.step += 1
            self.spent += time.process_time() - begin
            if time.monotonic() - saved > 60:
                target, draft, accepted = np.mean(seen, axis=0)
                print(
                    f"step {self.step}, {self.spent:.0f} s: loss a point {target:.3f}, draft's KL {draft:.3f}, "
                    f"acceptance {accepted:.3f}",
                    flush=True,
                )
                self.save()
                seen, saved = [], time.monotonic()
        self.save()

    def export(self, draft_length: int) -> None:
        """Write both models as transformers' folders, in half precision."""
        self.draft.config.draft_length = draft_length
        for name, model in (("target", self.target), ("draft", self.draft)):
            model.half().save_pretrained(self.folder / name)


def main() -> None:
    """Read the options, train and write the pair."""
    options = parse(__doc__, out=..., minutes=30.0, threads=1, draft_length=0)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    training = Run(options.out, options.minutes)
    training.train()
    training.export(options.draft_length)


if __name__ == "__main__":
    run(main)

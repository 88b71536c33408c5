"""The target's text on disk: one safetensors file for some hundred answers, whole or not there, and a manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.distill.writer import Written

MANIFEST = "manifest.json"
PATTERN = "shard-*.safetensors"
KEPT = ("target", "top")  # settings that all shards of a folder share


@dataclass(frozen=True)
class Shard:
    """Some answers, end to end. Token i of answer n stands at starts[n] + i of `tokens`, its prompt included; its row
    in `top_ids` and `top_log_p` counts answer tokens alone."""

    tokens: np.ndarray  # int32 [tokens]: prompt, answer, prompt, answer, ...
    starts: np.ndarray  # int64 [answers + 1]
    prompts: np.ndarray  # int32 [answers]: the prompts' lengths
    top_ids: np.ndarray  # int32 [answer tokens, k], likeliest first
    top_log_p: np.ndarray  # float16 [answer tokens, k], at temperature 1
    temperatures: np.ndarray  # float32 [answers]
    jobs: np.ndarray  # int64 [answers]: what was asked, by number
    held_out: np.ndarray  # bool [answers]: never to be trained on

    @classmethod
    def of(cls, answers: Sequence[Written]) -> Shard:
        """Answers put together."""
        texts = [np.concatenate([np.array(answer.job.prompt, np.int32), answer.tokens]) for answer in answers]
        return cls(
            tokens=np.concatenate(texts),
            starts=np.cumsum([0, *map(len, texts)], dtype=np.int64),
            prompts=np.array([len(answer.job.prompt) for answer in answers], np.int32),
            top_ids=np.concatenate([answer.top_ids for answer in answers]),
            top_log_p=np.concatenate([answer.top_log_p for answer in answers]),
            temperatures=np.array([answer.job.temperature for answer in answers], np.float32),
            jobs=np.array([answer.job.number for answer in answers], np.int64),
            held_out=np.array([answer.job.held_out for answer in answers], bool),
        )


class TextFolder:
    """The shards of one target in one folder. Files are written under another name and renamed when they are whole."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Opens `folder` or makes it; UserError where it holds another target's text."""
        self.folder, self.settings = folder, dict(settings)
        self.dropped: list[str] = []  # torn files that were found and removed
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be made ({error.strerror})") from error
        self._check_manifest()
        self.shards: dict[str, tuple[int, int]] = {}  # file name -> answers, answer tokens
        self.finished: set[int] = set()  # numbers of the jobs
        for file in shard_files(folder):
            self._adopt(file)

    @property
    def tokens(self) -> int:
        """Answer tokens in all shards."""
        return sum(tokens for _, tokens in self.shards.values())

    def add(self, answers: Sequence[Written]) -> None:
        """Writes one more shard. UserError where the disk refuses; what was finished before stays good."""
        number = max((int(name.split("-")[1].split(".")[0]) for name in self.shards), default=-1) + 1
        file = self.folder / f"shard-{number:05d}.safetensors"
        shard = Shard.of(answers)
        self._write(file, lambda part: _save(shard, part))
        self._remember(file.name, shard)
        manifest = self.settings | {
            "tokens": self.tokens,
            "shards": [{"file": name, "answers": a, "tokens": t} for name, (a, t) in self.shards.items()],
        }
        self._write(self.folder / MANIFEST, lambda part: part.write_text(json.dumps(manifest, indent=1) + "\n"))

    def _write(self, file: Path, write: Any) -> None:
        part = file.with_name(f".{file.name}.part")
        try:
            write(part)
            with part.open("rb") as stream:
                os.fsync(stream.fileno())
            part.rename(file)
        except Exception as error:  # safetensors has an error class of its own
            part.unlink(missing_ok=True)
            reason = getattr(error, "strerror", None) or error
            kept = f"the {len(self.shards)} finished shards beside it stay good"
            raise UserError(f"{file} cannot be written ({reason}); {kept}") from error

    def _adopt(self, file: Path) -> None:
        try:
            shard = read_shard(file)
        except UserError:
            self.dropped.append(file.name)
            file.unlink()
        else:
            self._remember(file.name, shard)

    def _remember(self, name: str, shard: Shard) -> None:
        self.shards[name] = (len(shard.jobs), len(shard.top_ids))
        self.finished.update(shard.jobs.tolist())

    def _check_manifest(self) -> None:
        file = self.folder / MANIFEST
        if not file.exists():
            return
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            found = {name: found[name] for name in KEPT}
        except (OSError, ValueError, KeyError, TypeError):
            return  # only a summary: the shards say what there is
        for name in KEPT:
            if name in self.settings and found[name] != self.settings[name]:
                here, there = self.settings[name], found[name]
                raise UserError(f"{self.folder} holds text with {name} {there!r}, not {here!r}; choose another folder")


def shard_files(folder: Path) -> list[Path]:
    """The whole shards of a folder, in the order in which they were written."""
    return sorted(folder.glob(PATTERN))


def read_shards(folder: Path) -> Iterator[Shard]:
    """All whole shards, in the order in which they were written; UserError where there is none."""
    files = shard_files(folder)
    if not files:
        raise UserError(f"{folder} holds no text yet: run `outpace distill --stage text` first")
    for file in files:
        yield read_shard(file)


def read_shard(file: Path) -> Shard:
    """One shard; UserError where it is torn or its parts do not fit together."""
    from safetensors.numpy import load_file

    try:
        shard = Shard(**load_file(file))
        answers = len(shard.jobs)
        lengths = np.diff(shard.starts) - shard.prompts
        fits = answers == len(lengths) == len(shard.temperatures) == len(shard.held_out)
        fits = fits and len(shard.tokens) == shard.starts[-1] and bool((lengths > 0).all())
        fits = fits and int(lengths.sum()) == len(shard.top_ids) and shard.top_ids.shape == shard.top_log_p.shape
    except Exception as error:  # safetensors raises its own error, by the kind of damage
        raise UserError(f"{file} is not a whole shard ({error})") from error
    if not fits:
        raise UserError(f"{file} is not a whole shard (its parts do not fit together)")
    return shard


def _save(shard: Shard, file: Path) -> None:
    from safetensors.numpy import save_file

    save_file(vars(shard), file)

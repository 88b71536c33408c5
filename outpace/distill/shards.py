"""Stores the target's text in shards, safetensors files of some hundred answers written atomically, and a manifest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.distill.writer import WrittenAnswer
from outpace.models.files.cache import new_file

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Shard:
    """Some answers, concatenated. Token i of text n, prompt included, is tokens[starts[n] + i].

    The rows of `top_ids` and `top_log_p` count answer tokens only.
    """

    tokens: np.ndarray  # int32 [tokens]: prompt, answer, prompt, answer, ...
    starts: np.ndarray  # int64 [answers + 1]
    prompts: np.ndarray  # int32 [answers]: the prompts' lengths
    top_ids: np.ndarray  # int32 [answer tokens, k], likeliest first
    top_log_p: np.ndarray  # float16 [answer tokens, k], at temperature 1
    temperatures: np.ndarray  # float32 [answers]
    jobs: np.ndarray  # int64 [answers]: the jobs' numbers
    held_out: np.ndarray  # bool [answers]: not for training

    @classmethod
    def of(cls, answers: Sequence[WrittenAnswer]) -> Shard:
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
    """The folder of one target's shards. Torn shards are removed when it is opened."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Open or create `folder`; UserError if it holds another target's text."""
        self.folder, self.settings = folder, dict(settings)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be made ({error.strerror})") from error
        self._check_manifest()
        self.shards: dict[str, tuple[int, int]] = {}  # file name -> answers, answer tokens
        self.finished: set[int] = set()  # numbers of the jobs
        self.num_dropped = 0  # torn shards
        for file in shard_files(folder):
            try:
                shard = read_shard(file)
            except UserError:
                self.num_dropped += 1
                file.unlink()
            else:
                self._add_entry(file.name, shard)

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.shards.values())

    def add(self, answers: Sequence[WrittenAnswer]) -> None:
        """Write a shard; UserError if writing fails, which leaves the earlier shards intact."""
        from safetensors.numpy import save_file

        number = max((int(name.split("-")[1].split(".")[0]) for name in self.shards), default=-1) + 1
        name, shard = f"shard-{number:05d}.safetensors", Shard.of(answers)
        after_failure = f"the {len(self.shards)} finished shards stay good"
        with new_file(self.folder / name, after_failure) as part:
            save_file(vars(shard), part)
        self._add_entry(name, shard)
        manifest = self.settings | {
            "tokens": self.tokens,
            "shards": [{"file": name, "answers": a, "tokens": t} for name, (a, t) in self.shards.items()],
        }
        with new_file(self.folder / MANIFEST, after_failure) as part:
            part.write_text(json.dumps(manifest, indent=1) + "\n")

    def _add_entry(self, name: str, shard: Shard) -> None:
        self.shards[name] = (len(shard.jobs), len(shard.top_ids))
        self.finished.update(shard.jobs.tolist())

    def _check_manifest(self) -> None:
        try:
            found = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
            differing = [name for name in ("target", "top") if self.settings.get(name, found[name]) != found[name]]
        except (OSError, ValueError, KeyError, TypeError):
            return  # the manifest is only a summary of the shards
        for name in differing:
            here, there = self.settings[name], found[name]
            raise UserError(f"{self.folder} holds text with {name} {there!r}, not {here!r}; choose another folder")


def shard_files(folder: Path) -> list[Path]:
    """Return a folder's complete shards in the order in which they were written."""
    return sorted(folder.glob("shard-*.safetensors"))


def read_shards(folder: Path) -> Iterator[Shard]:
    """Read all shards in the order in which they were written; UserError if there are none."""
    files = shard_files(folder)
    if not files:
        raise UserError(f"{folder} holds no text yet: run `outpace distill --stage text` first")
    yield from map(read_shard, files)


def read_shard(file: Path) -> Shard:
    """Read a shard; UserError if it is torn or its parts do not fit together."""
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

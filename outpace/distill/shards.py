"""Stores the target's text in shards, safetensors files of some hundred answers written atomically, and a manifest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outpace.core.errors import UserError
from outpace.distill.writer import SCALES, TAPS, Taps, WrittenAnswer
from outpace.models.files.cache import new_file

MANIFEST = "manifest.json"


class StoredTaps(NamedTuple):
    """Where a shard holds the hidden states of one answer's tokens."""

    file: Path
    start: int
    stop: int

    def read(self) -> np.ndarray:
        """Return float32 [tokens, layers * width]."""
        opened = _open_shard(self.file)
        return Taps(*(opened.get_slice(name)[self.start : self.stop] for name in (TAPS, SCALES))).floats()


@lru_cache(maxsize=4096)
def _open_shard(file: Path) -> Any:
    """Open a shard, whose content is mapped and not read."""
    from safetensors import safe_open

    return safe_open(str(file), framework="np")


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
    file: Path | None = None  # from which it was read
    origin: Mapping[str, str] = field(default_factory=dict)  # what wrote it, by name: weights, tokenizer, ..., taps

    @classmethod
    def from_answers(cls, answers: Sequence[WrittenAnswer]) -> Shard:
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

    def taps(self, answer: int) -> StoredTaps:
        """Return where the hidden states of an answer and its prompt are."""
        assert self.file is not None
        return StoredTaps(self.file, *(int(start) for start in self.starts[answer : answer + 2]))


class TextFolder:
    """The folder of one target's shards. Torn shards are removed when it is opened."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], origin: Mapping[str, str] | None = None) -> None:
        """Open or create `folder`; UserError if it holds another target's text.

        `origin` describes what writes the text; a text with hidden states must have one origin.
        """
        self.folder, self.settings, self._origin = folder, dict(settings), dict(origin or {})
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
                check_origin(shard, self._origin)
                self._add_entry(file.name, shard)

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.shards.values())

    def add(self, answers: Sequence[WrittenAnswer]) -> None:
        """Write a shard; UserError if writing fails, which leaves the earlier shards intact."""
        from safetensors.numpy import save_file

        number = max((int(name.split("-")[1].split(".")[0]) for name in self.shards), default=-1) + 1
        name, shard = f"shard-{number:05d}.safetensors", Shard.from_answers(answers)
        after_failure = f"the {len(self.shards)} finished shards stay good"
        tensors = {name: value for name, value in vars(shard).items() if isinstance(value, np.ndarray)}
        if taps := [answer.taps for answer in answers if answer.taps is not None]:
            tensors |= {
                name: np.concatenate(arrays)
                for name, arrays in zip((TAPS, SCALES), zip(*taps, strict=True), strict=True)
            }
        with new_file(self.folder / name, after_failure) as part:
            save_file(tensors, part, self._origin or None)
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
    from safetensors import safe_open

    try:
        with safe_open(str(file), framework="np") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys() if name not in (TAPS, SCALES)}  # noqa: SIM118
            shard = Shard(**tensors, file=file, origin=opened.metadata() or {})
            counts = [opened.get_slice(name).get_shape()[0] for name in (TAPS, SCALES) if TAPS in shard.origin]
        answers = len(shard.jobs)
        lengths = np.diff(shard.starts) - shard.prompts
        fits = answers == len(lengths) == len(shard.temperatures) == len(shard.held_out)
        fits = fits and len(shard.tokens) == shard.starts[-1] and bool((lengths > 0).all())
        fits = fits and int(lengths.sum()) == len(shard.top_ids) and shard.top_ids.shape == shard.top_log_p.shape
        fits = fits and all(count == len(shard.tokens) for count in counts)
    except Exception as error:  # safetensors raises its own error, by the kind of damage
        raise UserError(f"{file} is not a whole shard ({error})") from error
    if not fits:
        raise UserError(f"{file} is not a whole shard (its parts do not fit together)")
    return shard


def check_origin(shard: Shard, origin: Mapping[str, str]) -> None:
    """Raise UserError if a shard's text is not of this origin; any is accepted if no hidden states are needed."""
    if TAPS not in origin:
        return
    for name, value in origin.items():
        if (found := shard.origin.get(name)) != value:
            there = f"of {name} {found}" if found else f"without {name}"
            raise UserError(f"{shard.file} holds text {there}, and {name} {value} is needed: choose another folder")

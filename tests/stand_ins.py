"""Fake peers for the bench's tests: files that `outpace.bench.peers` finds in a second folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from outpace.bench import peers

Answers = Sequence[tuple[Sequence[int], Sequence[int]]]  # prompts, and the tokens that continue them

HEAD = '''"""A stand-in for another engine, which reads its answers from a file."""

import json
from pathlib import Path

from outpace.bench.peer import TimedAnswer
from outpace.core.errors import UserError


class Engine:
    name, precision = "stand-in", "float32"

    def __init__(self, settings):
        self.known = dict(json.loads((Path(__file__).parent / "answers.json").read_text()))

    def tokens(self, prompt, max_tokens):
        return tuple(self.known[str(list(prompt))][:max_tokens])

    def answer(self, prompt, max_tokens):
        tokens = self.tokens(prompt, max_tokens)
        times = tuple(0.5 + 0.25 * place for place in range(len(tokens)))
        return TimedAnswer(tokens, times[-1], times[0], times, (1,) * len(tokens))

    def close(self):
        pass
'''
BODIES = {
    "right": "def build(settings):\n    return Engine(settings)\n",
    "coarse": "def build(settings):\n    engine = Engine(settings)\n    engine.precision = 'Q4_0'\n    return engine\n",
    "wrong": (
        "class Wrong(Engine):\n"
        "    def tokens(self, prompt, max_tokens):\n"
        "        found = list(super().tokens(prompt, max_tokens))\n"
        "        found[3] = 5 if found[3] != 5 else 6\n"
        "        return tuple(found)\n\n\n"
        "def build(settings):\n    return Wrong(settings)\n"
    ),
    "failing": (
        "class Failing(Engine):\n"
        "    def tokens(self, prompt, max_tokens):\n"
        "        raise RuntimeError('out of paper')\n\n\n"
        "def build(settings):\n    return Failing(settings)\n"
    ),
    "dying": (
        "import os\n\n\n"
        "class Dying(Engine):\n"
        "    def answer(self, prompt, max_tokens):\n"
        "        print('on its way out')\n"
        "        os._exit(3)\n\n\n"
        "def build(settings):\n    return Dying(settings)\n"
    ),
    "silent": (
        "class Silent(Engine):\n"
        "    def answer(self, prompt, max_tokens):\n"
        "        return TimedAnswer((), 0.0, 0.0, (), ())\n\n\n"
        "def build(settings):\n    return Silent(settings)\n"
    ),
    "absent": "def build(settings):\n    raise UserError('peer absent is not installed: run `pip install absent`')\n",
    "crashing": "def build(settings):\n    raise OSError('no such library')\n",
}


def install(folder: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the fake peers to `folder` and let the bench find them there during the test."""
    (folder / "answers.json").write_text(json.dumps([(str(list(prompt)), answer) for prompt, answer in answers]))
    for name, body in BODIES.items():
        (folder / f"{name}.py").write_text(f"{HEAD}\n\n{body}")
        monkeypatch.delitem(sys.modules, f"{peers.__name__}.{name}", raising=False)
    monkeypatch.setattr(peers, "__path__", [*peers.__path__, str(folder)])

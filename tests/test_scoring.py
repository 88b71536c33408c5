"""The scorer: numbers, choices, exact texts and programs, the references of task files, and what is refused."""

from __future__ import annotations

import json
import socket
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from outpace.api import scoring
from outpace.api.scoring import Reference, is_right
from outpace.bench import tasks
from outpace.core.errors import UserError


def missing_sandbox() -> str:
    """Why programs cannot be run here; empty if they can."""
    try:
        scoring.check_sandbox()
    except UserError as error:
        return str(error)
    return ""


MISSING = missing_sandbox()
needs_sandbox = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("It is 4, no, 5.", 5),
        ("1,250 dollars", 1250),
        ("that makes $18.50.", Fraction(37, 2)),
        ("-3", -3),
        ("10-20", 20),
        ("9 - 4 = 5", 5),
        ("#### 7\nThe answer is 8", 7),
        (r"so \boxed{12} is it, 3 times", 12),
        ("The answer is 6. I took 2 from 8.", 6),
        ("the answer: 6, not 7", 6),
        ("The answer is simple: 4 and 4 make 8", 4),
        ("**42**", 42),
        ("v2 has no number but x3", None),
        ("none", None),
        ("", None),
    ],
)
def test_the_number_of_an_answer(answer: str, number: int | None) -> None:
    assert scoring.number_in(answer) == number


@pytest.mark.parametrize(
    ("answer", "choices", "chosen"),
    [
        ("The capital is Rome, not Milan.", ["Milan", "Rome"], "Rome"),
        ("Milan? No, the answer is Rome.", ["Milan", "Rome"], "Rome"),
        ("romeo", ["Milan", "Rome"], None),
        ("rome", ["Milan", "Rome"], "Rome"),
        ("A) chair. The correct answer is C) spoon.", ["A", "B", "C"], "C"),
        ("A good question", ["A", "B"], None),
        ("B", ["A", "B"], "B"),
        ("(B) it is", ["A", "B"], "B"),
        ("", ["A", "B"], None),
    ],
)
def test_the_choice_of_an_answer(answer: str, choices: list[str], chosen: str | None) -> None:
    assert scoring.choice_in(answer, choices) == chosen


@pytest.mark.parametrize(
    ("answer", "right"),
    [("The cat sleeps.", True), (' "the  cat sleeps" ', True), ("The cat sleeps here.", False), ("", False)],
)
def test_an_exact_text(answer: str, right: bool) -> None:
    assert is_right(Reference(scoring.TEXT, "The cat sleeps."), answer) is right


TEST = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n"
HEAD = "from typing import List\n\n\ndef twice(x: int) -> int:\n    '''Twice x.'''\n"
PROGRAM = Reference(scoring.PROGRAM, TEST, entry_point="twice", head=HEAD)


@needs_sandbox
@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("    return 2 * x\n", True),
        ("    return x\n", False),
        ("def twice(x: int):\n    return x + x\n", True),
        ("Here:\n```python\ndef twice(x):\n    both: List[int] = [x, x]\n    return sum(both)\n```\nThat is it.", True),
        ("```\nprint(1)\n```\n```python\ndef twice(x):\n    return x * 2\n", True),
        ("```python\ndef other(x):\n    return x * 2\n```", False),
        ("    raise SystemExit(77)\n", False),
        ("    import os; os._exit(0)\n", False),
        ("    while True: pass\n", False),
        ("I do not know.", False),
        ("", False),
    ],
)
def test_programs_are_right_if_they_pass_the_tests(answer: str, right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring.runs_to_end, "__defaults__", (2.0,) if "while" in answer else (30.0,))
    assert is_right(PROGRAM, answer, runs_tests=True) is right
    assert is_right(PROGRAM, answer) is None, "nothing is run unless requested"


FORBIDDEN = {
    "connect": "import socket; socket.create_connection(('{host}', {port}), 2)",
    "write": "open('{folder}/new', 'w')",
    "append": "open('{folder}/kept', 'a').write('x')",
    "truncate": "import os; os.open('{folder}/kept', os.O_TRUNC)",
    "delete": "import os; os.unlink('{folder}/kept')",
    "rename": "import os; os.rename('{folder}/kept', '{folder}/new')",
    "make a folder": "import os; os.mkdir('{folder}/new')",
    "fill /tmp": "open('/tmp/new', 'w', buffering=1).write('x\\n' * 10**6)",
    "mount": "import ctypes; assert ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
}


@needs_sandbox
@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_program_in_the_sandbox_may_not(what: str) -> None:
    with TemporaryDirectory(dir=Path.home()) as folder, socket.create_server(("127.0.0.1", 0)) as server:
        kept = Path(folder) / "kept"  # not below /tmp, which the sandbox has empty
        kept.write_text("unchanged")
        host, port = server.getsockname()
        program = FORBIDDEN[what].format(folder=folder, host=host, port=port)
        caught = f"try:\n    {program}\nexcept (OSError, AssertionError):\n    pass\nelse:\n    raise SystemExit(1)"
        assert not scoring.runs_to_end(program, 30)
        assert scoring.runs_to_end(caught, 30)
        assert [(file.name, file.read_text()) for file in Path(folder).iterdir()] == [("kept", "unchanged")]


@needs_sandbox
def test_a_program_in_the_sandbox_may_compute_and_read_within_its_limits() -> None:
    program = "import math, json, re, hashlib\nassert sum(range(10**6))\nassert not open('/dev/null').read()"
    assert scoring.runs_to_end(program, 30)
    alone = "import os; assert not os.listdir('/tmp') and set(os.environ) <= {'PWD', 'LC_CTYPE'}"
    assert scoring.runs_to_end(alone + "\nassert sum(map(str.isdigit, os.listdir('/proc'))) < 5", 30)
    assert scoring.runs_to_end("try:\n    bytearray(2 << 30)\nexcept MemoryError:\n    pass\nelse:\n    exit(1)", 30)
    assert not scoring.runs_to_end("import time; time.sleep(60)", 1.0)
    assert not scoring.runs_to_end("while True: pass", 1.0)
    assert not scoring.runs_to_end("import os\nos.fork()\nwhile True: pass", 1.0)
    assert not scoring.runs_to_end("not a program", 30)
    assert not scoring.runs_to_end("\udcff", 30)


def test_nothing_is_run_without_a_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="not installed: install it"):
        scoring.check_sandbox()
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o700)
    with pytest.raises(UserError, match="does not work here") as error:
        scoring.check_sandbox()
    assert "(bwrap: No permissions to create new namespace)" in str(error.value)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({}, None),
        ({"reference": "She has 3.\n#### 1,018"}, Reference("number", "1,018")),
        ({"reference": 18}, Reference("number", "18")),
        ({"reference": "$5"}, Reference("number", "$5")),
        ({"reference": "a text of 5 words"}, Reference("text", "a text of 5 words")),
        ({"reference": "B", "choices": ["A", "B"]}, Reference("choice", "B", ("A", "B"))),
        ({"test": TEST, "entry_point": "twice"}, Reference("program", TEST, entry_point="twice", head="p")),
    ],
)
def test_references_select_the_kind_of_scoring(entry: dict[str, Any], expected: Reference | None) -> None:
    assert scoring.read(entry, "p", "here") == expected


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"reference": []}, r"the reference is \[\], it must be a string or a number"),
        ({"reference": True}, "the reference is True"),
        ({"reference": "#### many"}, "has 'many' after ####, it must be a number"),
        ({"reference": "C", "choices": ["A", "B"]}, "the reference 'C' must be one of at least two"),
        ({"reference": "A", "choices": ["A", "A"]}, "at least two different choices"),
        ({"reference": "A", "choices": "AB"}, "choices must be a list of strings, it is 'AB'"),
        ({"test": TEST}, r"entry_point \(None\) the function's name"),
        ({"test": TEST, "entry_point": "x; y"}, "entry_point"),
        ({"test": 3, "entry_point": "x"}, "test must be a program"),
    ],
)
def test_an_invalid_reference_names_its_line(entry: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"turns": ["a"]}) + "\n" + json.dumps({"turns": ["b"], **entry}) + "\n")
    with pytest.raises(UserError, match=f"t.jsonl, line 2: .*{message}"):
        tasks.collect([str(file)], 5)


def test_the_references_of_the_shipped_questions_are_right() -> None:
    found = tasks.collect(["answers"], 99)
    assert len(found) == 36
    for prompt in found:
        assert prompt.reference is not None
        assert is_right(prompt.reference, prompt.reference.value)
        sentence = f"The answer is {prompt.reference.value}."
        assert is_right(prompt.reference, sentence) is (prompt.task != "sentences"), "a sentence must be exact"
        assert not is_right(prompt.reference, "I cannot say.")

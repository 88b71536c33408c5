"""Scores answers: numbers, choices, exact texts, and programs with tests.

The fields of a line of a task file select the kind of scoring:
- `test` and `entry_point`, as HumanEval has them: the answer's program must pass the tests;
- `choices`, a list of words or letters, and `reference`, one of them: the answer must choose it;
- `reference` that is a number, or ends with one after `####` as in GSM8K: the answer's last number must equal it;
- any other `reference`: the answer must be that text, ignoring case, spaces, quotes and a final full stop.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from outpace.core.errors import UserError

NUMBER, CHOICE, TEXT, PROGRAM = "number", "choice", "text", "program"
_SIGNED = re.compile(r"(?<![\w.])-?\$?\d[\d,]*(?:\.\d+)?")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_SAYS = re.compile(r"answer(?:\s+is|\s*:)", re.IGNORECASE)
_BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_LETTER = r"(?<![\w]){}(?=[).:\]]|\s*$)"  # a letter as a choice, not as the article
_AROUND = "\"'`*“”‘’ \n\t"
_SECONDS = 5.0  # of a program
_PASSED = 77  # exit status of a program that ran to its end; one that calls exit() has another
# What the sandbox runs: it sets limits, then executes the program read from standard input.
_RUN = f"""
import os, resource, sys
limits = {{"CPU": int(sys.argv.pop()), "AS": 1 << 30, "FSIZE": 0, "CORE": 0, "NPROC": 1}}
for name, value in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
try:
    exec(compile(sys.stdin.buffer.read(), "program", "exec"), {{"__name__": "program"}})
except BaseException:
    os._exit(1)
os._exit({_PASSED})
"""


class Reference(NamedTuple):
    """A right answer: `value` is the number, choice, text or tests; `head` is the prompt that a program continues."""

    kind: str
    value: str
    choices: tuple[str, ...] = ()
    entry_point: str = ""
    head: str = ""


def read(entry: Mapping[str, Any], prompt: str, where: str) -> Reference | None:
    """Return the reference of a task file's line, None if it has none; UserError for an invalid one."""
    if entry.get("test") is not None:
        return _program_reference(entry, prompt, where)
    value = entry.get("reference")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise UserError(f"{where}: the reference is {value!r}, it must be a string or a number")
    text = str(value).strip()
    if entry.get("choices") is not None:
        return _choice_reference(text, entry["choices"], where)
    final = text.rpartition("####")[2].strip() if "####" in text else text
    if _SIGNED.fullmatch(final):
        return Reference(NUMBER, final)
    if final is not text:
        raise UserError(f"{where}: the reference has {final!r} after ####, it must be a number")
    return Reference(TEXT, text)


def _program_reference(entry: Mapping[str, Any], prompt: str, where: str) -> Reference:
    test, name = entry["test"], entry.get("entry_point")
    if not isinstance(test, str) or not isinstance(name, str) or not name.isidentifier():
        raise UserError(f"{where}: test must be a program and entry_point ({name!r}) the function's name")
    return Reference(PROGRAM, test, entry_point=name, head=prompt)


def _choice_reference(value: str, choices: Any, where: str) -> Reference:
    if not isinstance(choices, list) or not all(isinstance(one, str) and one.strip() for one in choices):
        raise UserError(f"{where}: choices must be a list of strings, it is {choices!r}")
    if value not in choices or len(set(choices)) < max(2, len(choices)):
        raise UserError(f"{where}: the reference {value!r} must be one of at least two different choices, {choices}")
    return Reference(CHOICE, value, tuple(choices))


def is_right(reference: Reference, answer: str, runs_tests: bool = False) -> bool | None:
    """Whether the answer is right; None for a program unless `runs_tests`."""
    if reference.kind == PROGRAM:
        return passes(reference, answer) if runs_tests else None
    final, right = final_answer(reference, answer), reference.value
    if reference.kind == NUMBER:
        return final == _value(right)
    return final == (_normalised(right) if reference.kind == TEXT else right)


def final_answer(reference: Reference, answer: str) -> Fraction | str | bool | None:
    """Return the part of an answer that is compared: the number, the choice, the text regardless of case and spaces, or
    whether the program passes the reference's test."""
    if reference.kind == NUMBER:
        return number_in(answer)
    if reference.kind == CHOICE:
        return choice_in(answer, reference.choices)
    return _normalised(answer) if reference.kind == TEXT else passes(reference, answer)


def passes(reference: Reference, answer: str) -> bool:
    """Whether the answer's program passes the reference's test."""
    return runs_to_end(program_of(reference, answer))


def check_sandbox() -> None:
    """Raise UserError if programs cannot be run here in a sandbox."""
    why = "--run-tests runs programs in the sandbox of bubblewrap"
    if shutil.which("bwrap") is None:
        raise UserError(f"{why}, which is not installed: install it (Debian: apt install bubblewrap), or leave it out")
    done = subprocess.run(_sandboxed(_SECONDS), input=b"", capture_output=True, check=False)
    if done.returncode != _PASSED:
        says = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2] or f"status {done.returncode}"
        raise UserError(f"{why}, which does not work here ({says}): leave it out")


def runs_to_end(program: str, seconds: float = _SECONDS) -> bool:
    """Whether a Python program runs to its end within this time, both elapsed and of a processor, and one GiB.

    It runs in a sandbox without network, with a read-only file system and an empty /tmp.
    """
    try:
        done = subprocess.run(
            _sandboxed(seconds),
            input=program.encode("utf-8", "replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            env={},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == _PASSED


def _sandboxed(seconds: float) -> list[str]:
    """Return the command that runs the program on its standard input in a sandbox."""
    return [
        shutil.which("bwrap") or "bwrap",
        *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/run"),
        *("--chdir", "/", "--unshare-all", "--cap-drop", "ALL", "--new-session", "--die-with-parent", "--clearenv"),
        *(os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", _RUN, str(max(1, round(seconds)))),
    ]


def number_in(answer: str) -> Fraction | None:
    """Return the number after the last `####`, else in the last box, else the first after the last "answer is", else
    the last number of the answer; None without any."""
    places = [answer.rpartition("####")[2]] if "####" in answer else []
    places += [*_BOXED.findall(answer)[-1:], *_after_answer(answer), answer]
    for place in places:
        found = _SIGNED.findall(place)
        if found:
            return _value(found[0] if place is not answer else found[-1])
    return None


def _value(text: str) -> Fraction:
    return Fraction(text.replace("$", "").replace(",", ""))


def choice_in(answer: str, choices: Sequence[str]) -> str | None:
    """Return the first choice named after the last "answer is", else the first named at all; None without any."""
    for place in (*_after_answer(answer), answer):
        found = [(match.start(), one) for one in choices if (match := _choice_pattern(one).search(place))]
        if found:
            return min(found)[1]
    return None


def _after_answer(answer: str) -> list[str]:
    """Return the text after the last "answer is", as a list that is empty without one."""
    found = list(_SAYS.finditer(answer))
    return [answer[found[-1].end() :]] if found else []


def _choice_pattern(choice: str) -> re.Pattern[str]:
    if len(choice) == 1 and choice.isalpha():
        return re.compile(_LETTER.format(choice))
    return re.compile(rf"(?<!\w){re.escape(choice)}(?!\w)", re.IGNORECASE)


def _normalised(text: str) -> str:
    return " ".join(text.casefold().strip(_AROUND).rstrip(".").strip(_AROUND).split())


def program_of(reference: Reference, answer: str) -> str:
    """Return the answer's program with its tests: the first code block that defines the entry point, else the first
    block, else the whole answer. A program that does not define it continues the prompt."""
    defines = re.compile(rf"^def {reference.entry_point}\b", re.MULTILINE)
    blocks = [*_BLOCK.findall(answer), answer]
    code = next((block for block in blocks[:-1] if defines.search(block)), blocks[0])
    found = defines.search(reference.head)
    head = reference.head[: found.start()] if found and defines.search(code) else reference.head
    return f"{head}\n{code}\n{reference.value}\ncheck({reference.entry_point})\n"

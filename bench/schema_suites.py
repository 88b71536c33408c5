"""Public suites of JSON schemas: nothing that is invalid may be written, and every finished answer must validate.

python bench/schema_suites.py instances JSON-Schema-Test-Suite/tests/draft2020-12
python bench/schema_suites.py answers FOLDER --url http://127.0.0.1:8000 --count 1000 --known answers.jsonl

`instances` asks of each document of the suite whether the grammar allows it: one that is invalid must be refused, one
that is valid may be (the order of properties is that of the schema). `answers` has a server write by each schema (files
of JSON, as JSONSchemaBench has them), with speculation and without; what is in `--known` is not asked again, so it can
be stopped. Neither suite is part of outpace. One JSON line last; status 1 where something invalid is written.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema

from outpace.core.errors import UserError
from outpace.grammar.compiler import Grammars
from outpace.grammar.structure import schema_of
from outpace.models.load import load_model

CLIENTS = 16


def groups(folder: Path) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Schemas of the test suite, each with its documents; those that follow references to other files are left out."""
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text()):
            if "localhost:1234" not in json.dumps(group["schema"]):
                yield f"{file.stem}: {group['description']}", group["schema"], group["tests"]


def instances(folder: Path) -> dict[str, Any]:
    """Counts of documents by whether they are valid and whether the grammar allows them."""
    tokenizer = load_model(None).tokenizer
    grammars, counts, refused, wrong = Grammars(tokenizer), Counter[str](), Counter[str](), list[str]()
    for name, schema, tests in groups(folder):
        try:
            grammars.compile(schema_of(schema))
        except UserError as error:
            counts["schemas refused"] += 1
            refused[name.partition(":")[0]] += 1
            counts["schemas refused without a reason"] += len(str(error)) < 20
            continue
        counts["schemas enforced"] += 1
        for test in tests:
            is_allowed = any(allows(grammars, tokenizer, schema, text) for text in texts(test["data"]))
            counts[f"{'valid' if test['valid'] else 'invalid'}, {'allowed' if is_allowed else 'refused'}"] += 1
            if is_allowed and not test["valid"]:
                wrong.append(f"{name}: {test['description']}: {json.dumps(test['data'])}")
    return {**counts, "wrong": wrong, "refused": dict(refused.most_common())}


def texts(data: Any) -> set[str]:
    """A document as it may be written."""
    separators = ((",", ":"), (", ", ": "))
    return {json.dumps(data, ensure_ascii=e, separators=s) for e in (True, False) for s in separators}


def allows(grammars: Grammars, tokenizer: Any, schema: Any, text: str) -> bool:
    """Whether a text is one whole answer."""
    constraint = grammars.constraint(schema_of(schema), 0)
    tokens, end = tokenizer.continuation(text), sorted(tokenizer.stop_ids)[:1]
    if constraint.allowed([], tokens) < len(tokens):
        return False
    return constraint.is_over([], tokens) or constraint.allowed(tokens, end) == 1


class Answers:
    """What a server answered to each schema, kept in a file line by line."""

    def __init__(self, url: str, known: Path, most: int) -> None:
        parts = urlsplit(url)
        self._where, self._file, self._most = (parts.hostname or "127.0.0.1", parts.port or 80), known, most
        lines = known.read_text().splitlines() if known.exists() else []
        rows = [row for row in map(json.loads, lines) if row["status"] not in (429, 503)]  # those are asked again
        self.rows: dict[str, dict[str, Any]] = {row["file"]: row for row in rows}
        self._lock = threading.Lock()

    def work(self, files: list[Path]) -> None:
        """Takes one after the other until none is left."""
        connection = http.client.HTTPConnection(*self._where, timeout=600)
        while True:
            with self._lock:
                if not files:
                    return
                file = files.pop()
            row = {"file": file.name, **self._judged(connection, json.loads(file.read_text()))}
            with self._lock, self._file.open("a") as known:
                known.write(json.dumps(row) + "\n")
                self.rows[file.name] = row

    def _judged(self, connection: http.client.HTTPConnection, schema: Any) -> dict[str, Any]:
        """By the library jsonschema, and against the answer without speculation."""
        status, answer = self._asked(connection, schema, True)
        if status != 200:
            return {"status": status, "said": answer["error"]["message"][:200]}
        choice = answer["choices"][0]
        row = {"status": 200, "reason": choice["finish_reason"], "tokens": answer["usage"]["completion_tokens"]}
        row |= {"draft_n": answer["timings"]["draft_n"], "accepted": answer["timings"]["draft_n_accepted"]}
        plain = self._asked(connection, schema, False)[1]
        row["equal"] = plain["choices"][0]["message"]["content"] == choice["message"]["content"]
        if choice["finish_reason"] == "stop":
            row["valid"] = is_valid(schema, choice["message"]["content"])
        return row

    def _asked(self, connection: http.client.HTTPConnection, schema: Any, speculation: bool) -> tuple[int, Any]:
        about = json.dumps(schema)[:500]
        form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        body = {
            "messages": [{"role": "user", "content": f"Write a short example of JSON with this schema: {about}"}],
            "response_format": form,
            "max_tokens": self._most,
            "temperature": 0,
            "outpace": {"speculation": speculation},
        }
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


def is_valid(schema: Any, text: str) -> bool:
    """By the draft that the schema names, or else the newest. Numbers are decimal: 10000.89 is a multiple of 0.01."""
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        kind(json.loads(json.dumps(schema), parse_float=Decimal)).validate(json.loads(text, parse_float=Decimal))
    except (jsonschema.ValidationError, ValueError):
        return False
    return True


def answers(
    folder: Path, url: str, count: int, known: Path, most: int, seconds: float, largest: int = 20_000
) -> dict[str, Any]:
    """Asks for those of `count` schemas, drawn from the folder, that are not known yet, for so long. `largest`: bytes
    of a schema, at most."""
    files = sorted(file for file in folder.rglob("*.json") if file.stat().st_size <= largest)
    chosen = random.Random(0).sample(files, min(count, len(files)))
    found = Answers(url, known, most)
    left = [file for file in chosen if file.name not in found.rows]
    timer = threading.Timer(seconds, left.clear)
    timer.start()
    threads = [threading.Thread(target=found.work, args=(left,)) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timer.cancel()
    rows = list(found.rows.values())
    told = Counter(f"status {row['status']}" for row in rows) + Counter(
        row["reason"] for row in rows if "reason" in row
    )
    sums = {name: sum(row.get(name, 0) for row in rows) for name in ("tokens", "draft_n", "accepted")}
    unequal = [row["file"] for row in rows if row.get("equal") is False]
    invalid = [row["file"] for row in rows if row.get("valid") is False]
    return {"schemas": len(rows), **told, **sums, "unequal": unequal, "invalid": invalid}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("instances", "answers"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--known", type=Path, default=Path("answers.jsonl"))
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=36000.0, help="no schema is begun after so long")
    parser.add_argument("--largest", type=int, default=20_000, help="bytes of a schema, at most")
    given = parser.parse_args()
    if given.what == "instances":
        told = instances(given.folder)
    else:
        told = answers(
            given.folder, given.url, given.count, given.known, given.max_tokens, given.seconds, given.largest
        )
    print(json.dumps(told))
    wrong = told.get("wrong") or told.get("unequal") or told.get("invalid") or told.get("status 500")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

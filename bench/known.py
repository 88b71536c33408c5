"""What a bench has found so far, kept in a file, so that it may stop and go on later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Known:
    """`found` holds it by name, as JSON can. Without a file nothing is kept."""

    def __init__(self, file: Path | None, asked: dict[str, Any], **found: Any) -> None:
        """`found`: what stands for nothing known. SystemExit where the file is of a command that asked otherwise."""
        self._file, self._asked, self.found = file, asked, found
        if file is not None and file.is_file():
            kept = json.loads(file.read_text(encoding="utf-8"))
            if kept["asked"] != asked:
                raise SystemExit(f"error: {file} is of {kept['asked']}, not of {asked}: name another --state folder")
            self.found = {name: kept[name] for name in found}

    def save(self) -> None:
        """Writes the file, whole or not at all."""
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({"asked": self._asked, **self.found}), encoding="utf-8")
        new.replace(self._file)

"""Makes a site of the documents for mkdocs: pages from files outside docs/, and links that lead there or nowhere.

The README is the home page. A link to a file that is no page of the site (a source file) becomes its text.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

HOUSE = Path(__file__).parents[1]
PAGES = {  # file of the repository -> page of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "kernels/README.md": "kernels.md",
    "outpace/drafts/smollm2-135m-instruct/README.md": "draft.md",
    "outpace/drafts/smollm2-135m-instruct/distill.png": "distill.png",
    "outpace/studies/timeseries/pair/README.md": "forecasters.md",
    "examples": "examples.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
SHIM = "https://unpkg.com/iframe-worker/shim"  # what the plugin `offline` loads; docs/offline.js does the same
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_startup(command: str, dirty: bool) -> None:
    """Copies the package, and adds an __init__.py to each folder without one, which the reader of docstrings needs."""
    copy = HOUSE / "build" / "source" / "outpace"
    shutil.rmtree(copy, ignore_errors=True)
    for file in (HOUSE / "outpace").rglob("*.py"):
        place = copy / file.relative_to(HOUSE / "outpace")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)
    for folder, _, _ in os.walk(copy):
        (Path(folder) / "__init__.py").touch()


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages whose files lie elsewhere."""
    for source, page in PAGES.items():
        path = HOUSE / source
        content = examples(path) if path.is_dir() else path.read_bytes()
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Every link in a page's text, as it leads on the site."""
    name = page.file.src_uri
    if name == "index.md":
        page.meta["hide"] = ["navigation"]
    source = SOURCES.get(name, f"docs/{name}")

    def led(found: re.Match[str]) -> str:
        mark, text, goal = found.groups()
        path, hash_, anchor = goal.partition("#")
        if not path or ":" in goal:
            return found[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        target = PAGES.get(place, place.removeprefix("docs/") if place.startswith("docs/") else None)
        if target is None and (HOUSE / place).exists():
            return text
        return f"{mark}[{text}]({target or goal}{hash_}{anchor})"  # what leads nowhere stays, for mkdocs to refuse

    return LINK.sub(led, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The page without a script from another site."""
    return output.replace(SHIM, "offline.js")


def examples(folder: Path) -> str:
    """One page of all scripts."""
    parts = [
        "# Examples\n\nThe first line of each script says how to run it. Without a model it uses the shipped one.\n"
    ]
    for script in sorted(folder.glob("*.py")):
        parts.append(f"## {script.name}\n\n```python\n{script.read_text()}```\n")
    return "\n".join(parts)

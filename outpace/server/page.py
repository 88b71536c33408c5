"""The page at `/`: one file that asks nobody but this server."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import HTMLResponse, Response

FILE = files("outpace.server") / "page.html"


def reply() -> Response:
    """The page, with a policy that lets its own style and script run and nothing else."""
    text = FILE.read_text(encoding="utf-8")
    policy = {
        "default-src": "'self'",
        "script-src": _hash(text, "script"),
        "style-src": _hash(text, "style"),
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    value = "; ".join(f"{name} {allowed}" for name, allowed in policy.items())
    return HTMLResponse(text, headers={"content-security-policy": value, "cache-control": "no-cache"})


def _hash(text: str, tag: str) -> str:
    """By which the policy knows the page's one block of this kind."""
    (block,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'"

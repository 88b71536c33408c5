"""aider: a question about a file, and an edit of a whole file, streamed and not."""

# needs: aider-chat==0.86.2
from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

URL = sys.argv[1]
with urllib.request.urlopen(f"{URL}/v1/models") as reply:
    card = json.load(reply)["data"][0]
folder = Path("work")
folder.mkdir(exist_ok=True)
name = f"openai/{card['id']}"
known = {
    "max_input_tokens": card["max_model_len"],
    "max_output_tokens": 200,
    "litellm_provider": "openai",
    "mode": "chat",
}
(folder / "models.json").write_text(json.dumps({name: known | {"input_cost_per_token": 0, "output_cost_per_token": 0}}))
(folder / "settings.yml").write_text(
    f"- name: {name}\n  edit_format: whole\n  extra_params:\n    max_tokens: 200\n    temperature: 0\n"
)
(folder / "add.py").write_text("def add(a, b):\n    return a - b\n")
HISTORY = ("--chat-history-file", "chat.md", "--input-history-file", "input.txt")  # else in the repository around


def written() -> float:
    """Return the number of tokens that the server has generated."""
    with urllib.request.urlopen(f"{URL}/metrics") as page:
        return float(re.search(rb"^outpace:generation_tokens_total (\S+)$", page.read(), re.MULTILINE)[1])


def aider(*more: str) -> str:
    """Return aider's output."""
    command = [Path(sys.executable).parent / "aider", "--model", name, "--openai-api-base", f"{URL}/v1"]
    command += ["--openai-api-key", "none", "--model-metadata-file", "models.json", "--model-settings-file"]
    command += ["settings.yml", "--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-pretty"]
    command += ["--no-show-release-notes", "--no-show-model-warnings", "--map-tokens", "0", "--no-auto-lint"]
    command += ["--no-suggest-shell-commands", "--no-detect-urls", "--no-gitignore", *HISTORY, *more]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


answers = []
for streams in ("--stream", "--no-stream"):
    before = written()
    said = aider(streams, "--chat-mode", "ask", "--message", "What does add do?", "--read", "add.py")
    found = re.search(r"Tokens: \S+ sent, (\d+) received", said)
    assert found is not None, said
    assert "Error" not in said, said
    counted = written() - before
    assert counted > 0
    assert streams == "--stream" or counted == int(found[1]), said  # of a stream aider counts them by its own tokenizer
    answers.append(" ".join(said[: found.start()].rpartition("add.py")[2].split()))  # it breaks lines where it likes
assert answers[0] == answers[1] != "", answers
said = aider("--message", "Make add return the sum.", "add.py")
assert re.search(r"Tokens: \S+ sent, \d+ received|has hit a token limit", said), said
assert "APIError" not in said, said

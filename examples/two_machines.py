"""Draft on another machine; in this example both sides are on one. Run: python examples/two_machines.py [MODEL]

Needs `pip install -e '.[remote]'`.
"""

import subprocess
import sys

import outpace

model = sys.argv[1:2]  # the target, and the draft model too; by default the shipped pair
command = [sys.executable, "-m", "outpace", "draft-worker", "--listen", "127.0.0.1:0"]  # or 0.0.0.0:8100 and a key
command += ["--draft", *model] if model else []
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as draft_worker:
    said = draft_worker.stderr.readline()
    address = said.partition(" drafts on ")[2].partition(";")[0]
    if not address:
        sys.exit(said)
    try:
        with outpace.LLM(*model, worker=f"grpc://{address}") as llm:
            result = llm.stream("The capital of France is", max_tokens=24, temperature=0.9, seed=1).finish()
    finally:
        draft_worker.terminate()
print(f"{result.text!r}: {result.figures.mean_accepted_length:.2f} tokens per target pass")

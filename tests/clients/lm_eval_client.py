"""lm-eval: a local task by log-probabilities with echo and the server's tokenizer; the library is equally accurate."""

# needs: lm-eval[api]==0.4.13
from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

URL = sys.argv[1]
FOLDER = Path(__file__).parent / "knowledge"
with urllib.request.urlopen(f"{URL}/v1/models") as reply:
    MODEL = json.load(reply)["data"][0]["id"]
ROOT = os.environ["OUTPACE_ROOT"]  # from where the server comes too
own = subprocess.run(
    [os.environ["OUTPACE_PYTHON"], FOLDER / "own.py"],
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": ROOT},
    capture_output=True,
    check=True,
)
expected = json.loads(own.stdout)
os.environ["KNOWLEDGE"] = str(FOLDER / "questions.jsonl")
config = {
    "task": "knowledge",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(FOLDER / "questions.jsonl")}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
for batch in (1, 4):
    found = simple_evaluate(
        model="local-completions",
        model_args={
            "model": MODEL,
            "base_url": f"{URL}/v1/completions",
            "tokenizer_backend": "remote",
            "max_length": 2048,
            "num_concurrent": 2,
            "max_retries": 1,
        },
        tasks=[config],
        task_manager=TaskManager(),
        batch_size=batch,
        bootstrap_iters=0,
    )
    scored = found["results"]["knowledge"]
    assert scored["acc,none"] == expected["acc"], (scored, expected)
    assert scored["acc_norm,none"] == expected["acc_norm"], (scored, expected)
    scores = {
        sample["doc"]["question"]: [float(pair[0][0]) for pair in sample["resps"]]
        for sample in found["samples"]["knowledge"]
    }
    for question, values in scores.items():
        for one, other in zip(values, expected["scores"][question], strict=True):
            assert abs(one - other) < 1e-6, (question, values, expected["scores"][question])
print(f"acc {expected['acc']:.3f}, acc_norm {expected['acc_norm']:.3f}, {len(scores)} questions")

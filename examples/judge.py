"""Mine 30 questions, train a judge, and answer with it (lossy). Run: python examples/judge.py [TARGET [DRAFT]]

Needs `pip install -e '.[judge]'`. Thirty questions show how it works; a useful judge takes hundreds.
"""

import json
import sys
import tempfile
from pathlib import Path

import outpace
from outpace.distill.judge import JudgeOptions, make_judge
from outpace.distill.mining import MiningOptions

target, draft = (*sys.argv[1:], "layers:0")[:2] if sys.argv[1:] else (None, None)
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    lines = ({"turns": [f"What is {number} + 4? Explain."], "reference": number + 4} for number in range(30))
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with outpace.LLM(target, draft) as llm:
        options = JudgeOptions([folder / "sums.jsonl"], folder / "judge", MiningOptions(max_tokens=32))
        judge = make_judge(llm.target, llm.draft, options, lambda stage, figures: None)
    print(judge.facts, judge.thresholds)
    with outpace.LLM(target, draft, rule="judge", judge=str(folder / "judge"), recall=0.9) as llm:
        result = llm.chat("What is 21 + 4? Explain.", max_tokens=32)
        print(f"{result.text!r}, {result.figures.relaxed} tokens differ from greedy decoding's choice")

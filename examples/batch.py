"""Answer several prompts, several times each, in one batch. Run: python examples/batch.py [MODEL]"""

import sys

import outpace

prompts = ["The capital of France is", "Water boils at", "A haiku about rain:\n"]
with outpace.LLM(*sys.argv[1:2]) as llm:
    params = outpace.SamplingParams(n=2, max_tokens=24, temperature=0.9, seed=1, stop=["\n\n"])
    results = llm.generate(prompts, params)
for number, result in enumerate(results):
    print(f"{prompts[number // 2]!r} answer {result.choice} ({result.finish_reason}): {result.text!r}")

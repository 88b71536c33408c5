"""Show that all methods write the same text for a seed. Run: python examples/same_text.py [MODEL]"""

import sys

import outpace

PROMPT = "Once upon a time"
texts = {}
for method in ("autoregressive", "speculative", "card"):
    with outpace.LLM(*sys.argv[1:2], method=method) as llm:
        result = llm.stream(PROMPT, max_tokens=40, temperature=0.8, top_p=0.95, seed=7).finish()
        texts[method] = result.text
        print(f"{method:15} {result.figures.mean_accepted_length:.2f} tokens per pass")
assert len(set(texts.values())) == 1, texts
print(PROMPT + texts["card"])

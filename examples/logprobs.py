"""Show log-probabilities and the alternatives to each token. Run: python examples/logprobs.py [MODEL]"""

import math
import sys

import outpace

with outpace.LLM(*sys.argv[1:2]) as llm:
    result = llm.stream("The capital of France is", max_tokens=5, logprobs=3).finish()
    for token, logprob, top in result.logprobs:
        others = ", ".join(f"{llm.tokenizer.decode([other])!r} {math.exp(value):.0%}" for other, value in top)
        print(f"{llm.tokenizer.decode([token])!r:12} {math.exp(logprob):4.0%}   best: {others}")

"""Stream an answer and show what speculation gained. Run: python examples/stream.py [MODEL [DRAFT]]"""

import sys

import outpace

with outpace.LLM(*sys.argv[1:3]) as llm:
    stream = llm.stream([{"role": "user", "content": "Name three primary colours, one per line."}], max_tokens=60)
    for piece in stream:
        print(piece.text, end="", flush=True)
    result = stream.finish()
    length = result.figures.mean_accepted_length
    print(f"\n{result.method}: {result.tokens_per_second:.1f} tokens/s, {length:.2f} tokens per target pass")

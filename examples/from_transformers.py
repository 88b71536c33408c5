"""Speed up a model that transformers has loaded. Run: python examples/from_transformers.py [FOLDER or hub id]

Needs `pip install transformers`.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
with outpace.LLM(model, tokenizer=tokenizer, drafter="ngram") as llm:
    print(llm.stream("1, 2, 3, 4, 1, 2, 3, 4, 1, 2,", max_tokens=24).finish().text)

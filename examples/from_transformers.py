"""Speed up a model that transformers has loaded. Run: python examples/from_transformers.py [FOLDER or hub id]

Needs `pip install transformers`.
"""

import sys

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError:
    sys.exit("this example needs `pip install transformers`")

import outpace
from outpace.models.files.find import resolve

name = sys.argv[1] if len(sys.argv) > 1 else str(resolve(None))  # the shipped model, as a Hugging Face folder
try:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
except OSError as error:  # raised by transformers without such a model or a connection
    sys.exit(f"{name} cannot be loaded: {error}")
with outpace.LLM(model, tokenizer=tokenizer, drafter="ngram") as llm:
    print(llm.stream("1, 2, 3, 4, 1, 2, 3, 4, 1, 2,", max_tokens=24).finish().text)

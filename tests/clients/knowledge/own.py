"""Score the task of `lm_eval_client.py` by the library: accuracies and log-probabilities, as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import outpace

DOCUMENTS = [json.loads(line) for line in (Path(__file__).parent / "questions.jsonl").read_text().splitlines()]


def main() -> None:
    right = right_by_length = 0
    scores = {}
    with outpace.LLM() as llm:
        for document in DOCUMENTS:
            context = f"Question: {document['question']}\nAnswer:"
            values = [score(llm, context, f" {choice}") for choice in document["choices"]]
            lengths = [len(choice) for choice in document["choices"]]
            by_length = [value / length for value, length in zip(values, lengths, strict=True)]
            right += values.index(max(values)) == document["answer"]
            right_by_length += by_length.index(max(by_length)) == document["answer"]
            scores[document["question"]] = values
    count = len(DOCUMENTS)
    print(json.dumps({"acc": right / count, "acc_norm": right_by_length / count, "scores": scores}))


def score(llm: outpace.LLM, context: str, continuation: str) -> float:
    """Return the log-probability of a continuation."""
    start = len(llm.tokenizer.encode(context))
    (found,) = llm.generate(llm.tokenizer.encode(context + continuation), max_tokens=1, logprobs=0, echo=True)
    return sum(record.logprob for record in found.prompt_logprobs[start - 1 :])


if __name__ == "__main__":
    main()

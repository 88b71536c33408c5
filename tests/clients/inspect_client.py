"""inspect-ai: a local task, answered over the OpenAI API; the score is that of the greedy texts."""

# needs: inspect-ai==0.3.285 openai==3.54.0
from __future__ import annotations

import sys

import openai
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

URL = sys.argv[1]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
NAME = client.models.list().data[0].id
ASKED = {
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "How many legs does a spider have?": "8",
    "What is two plus two?": "4",
    "Which planet is known as the red planet?": "Mars",
    "What is the capital of Mongolia?": "Ulaanbaatar",
}


def own(question: str) -> str:
    messages = [{"role": "user", "content": question}]
    found = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=40)
    return found.choices[0].message.content


model = get_model(
    f"openai-api/outpace/{NAME}",
    base_url=f"{URL}/v1",
    api_key="none",
    config=GenerateConfig(temperature=0, max_tokens=40, max_connections=4, seed=5, max_retries=0),
)
task = Task(
    dataset=[Sample(input=question, target=answer) for question, answer in ASKED.items()],
    solver=generate(),
    scorer=includes(),
)
(log,) = eval(task, model=model, log_dir="logs", display="none")
assert log.status == "success", log.error
texts = {question: own(question) for question in ASKED}
expected = sum(ASKED[question].lower() in text.lower() for question, text in texts.items()) / len(ASKED)
found = log.results.scores[0].metrics["accuracy"].value
assert {sample.input: sample.output.completion for sample in log.samples} == texts
assert abs(found - expected) < 1e-9, (found, expected)
print(f"accuracy {found:.3f}")

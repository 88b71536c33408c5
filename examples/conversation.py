"""Hold a conversation that reuses keys and values of earlier turns. Run: python examples/conversation.py [MODEL]"""

import sys

import outpace

messages = [{"role": "system", "content": "Answer in one short sentence."}]
with outpace.LLM(*sys.argv[1:2]) as llm:
    for question in ("What is the largest planet?", "How many moons does it have?"):
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, max_tokens=40, repetition_penalty=1.1)
        messages.append({"role": "assistant", "content": answer.text})
        print(
            f"> {question}\n{answer.text}\n  ({answer.prompt_tokens} prompt tokens, "
            f"first token after {answer.time_to_first_token:.2f} s)"
        )

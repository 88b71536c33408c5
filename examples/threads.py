"""Use one model from several threads; their requests share target passes. Run: python examples/threads.py [MODEL]"""

import sys
from concurrent.futures import ThreadPoolExecutor

import outpace

questions = ["Name a fruit.", "Name a river.", "Name a metal.", "Name a bird."]
with outpace.LLM(*sys.argv[1:2]) as llm, ThreadPoolExecutor(len(questions)) as pool:
    chats = [[{"role": "user", "content": question}] for question in questions]
    for question, result in zip(questions, pool.map(lambda chat: llm.chat(chat, max_tokens=20), chats), strict=True):
        print(f"{question} {result.text}")

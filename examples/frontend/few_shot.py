"""Few-shot questions as a batch: the examples are traced, cached and computed once."""

from __future__ import annotations

import sglang as sgl
from program import Endpoint, main

SHOTS = (
    ("What is the capital of France?", "Paris"),
    ("What is the capital of Japan?", "Tokyo"),
    ("What is the capital of Egypt?", "Cairo"),
    ("What is the capital of Norway?", "Oslo"),
    ("What is the capital of Peru?", "Lima"),
)
QUESTIONS = (
    "What is the capital of Italy?",
    "What is the capital of Spain?",
    "What is the capital of England?",
)


@sgl.function
def answer(s, question):
    s += "Answer each question about geography with one word, and with nothing else.\n\n"
    for shot, reply in SHOTS:
        s += f"Question: {shot}\nAnswer: {reply}\n\n"
    s += "Question: " + question + "\nAnswer:"
    s += sgl.gen("answer", max_tokens=6, stop="\n", temperature=0)


def run(endpoint: Endpoint) -> list[str]:
    states = answer.run_batch([{"question": q} for q in QUESTIONS], backend=endpoint)
    for question, state in zip(QUESTIONS, states, strict=True):
        print(question, state["answer"].strip())
    return [state["answer"].strip() for state in states]


if __name__ == "__main__":
    main(run, __doc__)

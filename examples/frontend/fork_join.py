"""Branches that share a prefix: each is generated at once with the others, then they are joined."""

from __future__ import annotations

import sglang as sgl
from program import Endpoint, main

LETTER = (
    "Dear neighbours, the street party is on Saturday from four in the afternoon. Please bring a "
    "chair, a plate and something to eat that you like yourself. There will be music, but not "
    "after ten. If it rains we meet in the school. Children can paint the street with chalk."
)
QUESTIONS = (
    "When does the party begin?",
    "What should we bring?",
    "What can children do?",
)


@sgl.function
def read(s, letter):
    s += "Read this letter, then answer the questions in a few words.\n\n" + letter + "\n\n"
    s += "Question: Where do we meet if it rains?\nAnswer: In the school.\n"
    branches = s.fork(len(QUESTIONS))
    for branch, question in zip(branches, QUESTIONS, strict=True):
        branch += f"Question: {question}\nAnswer:"
        branch += sgl.gen("answer", max_tokens=16, stop="\n")
    branches.join()
    for question, answer in zip(QUESTIONS, s["answer"], strict=True):
        s += f"Question: {question}\nAnswer:{answer}\n"
    s += "Question: What is the letter about?\nAnswer:"
    s += sgl.gen("subject", max_tokens=16, stop="\n")


def run(endpoint: Endpoint) -> list[str]:
    state = read.run(letter=LETTER, temperature=0, backend=endpoint)
    for question, answer in zip(QUESTIONS, state["answer"], strict=True):
        print(question, answer.strip())
    print("It is about:", state["subject"].strip())
    return [*state["answer"], state["subject"]]


if __name__ == "__main__":
    main(run, __doc__)

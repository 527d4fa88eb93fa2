"""ReAct: the model thinks, chooses a tool and its input, reads the result, and answers."""

from __future__ import annotations

import ast
import operator

import sglang as sgl
from program import Endpoint, main

POPULATION = {"Paris": 2_100_000, "Rome": 2_800_000, "Madrid": 3_300_000}
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
INPUTS = {"lookup": "(Paris|Rome|Madrid)", "calculate": r"[0-9]{1,8} [-+*/] [0-9]{1,8}"}
"""What each tool can read, so that a small model cannot ask for nonsense."""

EXAMPLE = """\
Answer the question. Think, use a tool, read its result, and so on; then finish.
Tools: lookup[city] tells how many people live in a city; calculate[a + b] calculates.

Question: How many more people live in Madrid than in Rome?
Thought: I need the population of Madrid.
Action: lookup[Madrid]
Result: 3300000
Thought: I need the population of Rome.
Action: lookup[Rome]
Result: 2800000
Thought: I must subtract them.
Action: calculate[3300000 - 2800000]
Result: 500000
Thought: I know the answer.
Action: finish[500000]

"""


def call(tool: str, argument: str) -> str:
    """What a tool answers."""
    if tool == "lookup":
        return str(POPULATION[argument])
    node = ast.parse(argument, mode="eval").body
    assert isinstance(node, ast.BinOp)
    left, right = (ast.literal_eval(side) for side in (node.left, node.right))
    if isinstance(node.op, ast.Div) and right == 0:
        return "nothing can be divided by zero"
    return str(round(OPERATIONS[type(node.op)](left, right)))


@sgl.function
def agent(s, question, turns):
    s += EXAMPLE + "Question: " + question + "\n"
    steps = []
    for turn in range(turns):
        s += "Thought:" + sgl.gen(f"thought{turn}", max_tokens=16, stop=["\n", "Action"]) + "\n"
        tools = ["lookup", "calculate"] if turn < turns - 1 else []
        tools += ["finish"] if steps else []
        s += "Action: " + sgl.select(f"tool{turn}", tools) + "["
        tool = s[f"tool{turn}"]
        if tool == "finish":
            s += sgl.gen("answer", max_tokens=8, stop="]", regex="[0-9]{1,8}") + "]\n"
            break
        s += sgl.gen(f"input{turn}", max_tokens=20, regex=INPUTS[tool])
        result = call(tool, s[f"input{turn}"])
        s += f"]\nResult: {result}\n"
        steps.append((tool, s[f"input{turn}"], result))
    s["steps"] = steps


def run(endpoint: Endpoint) -> tuple[list[tuple[str, str, str]], str]:
    state = agent.run(
        question="How many people live in Paris?", turns=2, temperature=0, backend=endpoint
    )
    print(state.text()[len(EXAMPLE) :].rstrip())
    return state["steps"], state["answer"]


if __name__ == "__main__":
    main(run, __doc__)

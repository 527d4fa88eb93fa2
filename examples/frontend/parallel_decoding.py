"""Parallel decoding: a skeleton first, then all its points are written out at the same time."""

from __future__ import annotations

import sglang as sgl
from program import Endpoint, main

POINTS = 3
EXAMPLE = """\
Tips: How to sleep well
1. Go to bed early
2. Keep the room dark
3. Drink no coffee
More about tip 1: Go to bed early. Most people need eight hours, so count back from the morning.
More about tip 2: Keep the room dark. Thick curtains help, and so does a mask for the eyes.
More about tip 3: Drink no coffee. It keeps people awake for six hours or more.

"""


@sgl.function
def advise(s, topic):
    s += EXAMPLE + "Tips: " + topic + "\n"
    for number in range(POINTS):
        s += f"{number + 1}." + sgl.gen(f"point{number}", max_tokens=8, stop=["\n", "."]) + "\n"
    writers = s.fork(POINTS)
    for number, writer in enumerate(writers):
        writer += f"More about tip {number + 1}:{s[f'point{number}']}. It"
        writer += sgl.gen("text", max_tokens=16, stop="\n")
    writers.join()


def run(endpoint: Endpoint) -> list[str]:
    state = advise.run(topic="How to bake good bread", temperature=0, backend=endpoint)
    for number, text in enumerate(state["text"]):
        print(f"{number + 1}.{state[f'point{number}']}\n  It{text}")
    return state["text"]


if __name__ == "__main__":
    main(run, __doc__)

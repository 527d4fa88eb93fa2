"""One of several texts, chosen by their likelihood in three ways."""

from __future__ import annotations

import sglang as sgl
from program import Endpoint, main

METHODS = (
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
)
REVIEW = (
    "The room was clean and quiet, the bed was soft, and the people at the desk were friendly "
    "and helped us with everything. Every morning there was fresh fruit, and from the window we "
    "saw the whole bay with its boats. The children learned to swim. We had a wonderful week, and "
    "we will come back next year."
)


@sgl.function
def judge(s, review, method):
    s += "A guest of a hotel wrote:\n" + review + "\nThe guest was very"
    s += sgl.gen(
        "mood", choices=[" happy", " angry", " bored"], choices_method=getattr(sgl, method)
    )


def run(endpoint: Endpoint) -> list[str]:
    moods = []
    for method in METHODS:
        state = judge.run(review=REVIEW, method=method, temperature=0, backend=endpoint)
        moods.append(state["mood"].strip())
        print(f"{method}: {moods[-1]}")
    return moods


if __name__ == "__main__":
    main(run, __doc__)

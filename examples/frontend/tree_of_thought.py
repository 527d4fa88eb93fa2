"""Tree of thought: every thought is continued in several ways, the likeliest ones live on."""

from __future__ import annotations

import sglang as sgl
from program import Endpoint, main

TASK = (
    "A farmer must cross a river with a wolf, a goat and a cabbage. The boat carries the farmer "
    "and one more. The wolf may not be left alone with the goat, nor the goat with the cabbage.\n"
)
BRANCHES, DEPTH, KEPT = 3, 2, 2


@sgl.function
def think(s, task, thoughts):
    """Proposes next thoughts after the given ones, and says how likely each of them was."""
    s += task + "How to do it, step by step:\n"
    for number, thought in enumerate(thoughts):
        s += f"{number + 1}.{thought}\n"
    branches = s.fork(BRANCHES)
    for branch in branches:
        branch += f"{len(thoughts) + 1}." + sgl.gen(
            "thought", max_tokens=14, stop="\n", temperature=0.8, return_logprob=True
        )
    branches.join()
    s["scores"] = [likelihood(branch.get_meta_info("thought")) for branch in branches]


def likelihood(meta: dict) -> float:
    """Mean log-probability of the tokens of a thought."""
    values = [entry[0] for entry in meta["output_token_logprobs"]]
    return sum(values) / len(values)


def run(endpoint: Endpoint) -> list[tuple[float, list[str]]]:
    beams: list[tuple[float, list[str]]] = [(0.0, [])]
    for _ in range(DEPTH):
        states = think.run_batch(
            [{"task": TASK, "thoughts": thoughts} for _, thoughts in beams], backend=endpoint
        )
        grown = [
            (score + new, [*thoughts, thought])
            for (score, thoughts), state in zip(beams, states, strict=True)
            for thought, new in zip(state["thought"], state["scores"], strict=True)
        ]
        beams = sorted(grown, key=lambda beam: -beam[0])[:KEPT]
    for score, thoughts in beams:
        print(f"{score:.2f}", *(f"\n  {thought.strip()}" for thought in thoughts))
    return beams


if __name__ == "__main__":
    main(run, __doc__)

"""A conversation of several turns: each turn finds the turns before it in the cache."""

from __future__ import annotations

import sglang as sgl
from program import Endpoint, main

SYSTEM = (
    "You are the guide of a small museum by the sea. You answer in one short sentence. The museum "
    "has three rooms: ships in bottles, maps of the coast, and the lamp of the old lighthouse. It "
    "is open from nine to five, except on Mondays."
)
QUESTIONS = ("What can I see here?", "When are you open?", "Which room is the best?")


@sgl.function
def tour(s, questions):
    s += sgl.system(SYSTEM)
    for turn, question in enumerate(questions):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"answer{turn}", max_tokens=24))


def run(endpoint: Endpoint) -> list[dict[str, object]]:
    state = tour.run(questions=QUESTIONS, temperature=0, backend=endpoint)
    for turn, question in enumerate(QUESTIONS):
        meta = state.get_meta_info(f"answer{turn}")
        print(f"- {question}\n  {state[f'answer{turn}'].strip()}")
        print(f"  ({meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens cached)")
    return [state.get_meta_info(f"answer{turn}") for turn in range(len(QUESTIONS))]


if __name__ == "__main__":
    main(run, __doc__)

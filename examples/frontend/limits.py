"""Where an answer ends: stop texts, a least and a greatest number of tokens, EOS or not."""

from __future__ import annotations

from typing import Any

import sglang as sgl
from program import Endpoint, main

LIST = (
    "A shopping list for the weekend, with one thing in each line and a dash before it. The whole "
    "family comes on Saturday, and on Sunday we want to make a picnic by the lake:\n"
    "- bread\n- butter\n- six eggs\n- apples\n- a bottle of milk\n- cheese\n- two melons\n-"
)


@sgl.function
def shop(s):
    s += LIST + sgl.gen("one", max_tokens=12, stop=["\n-", "\n"])
    s += "\n-" + sgl.gen("several", max_tokens=16, min_tokens=10, stop="\n\n")
    s += "\n-" + sgl.gen("exactly", max_tokens=8, ignore_eos=True)


def run(endpoint: Endpoint) -> dict[str, dict[str, Any]]:
    state = shop.run(temperature=0, backend=endpoint)
    metas = {name: state.get_meta_info(name) for name in ("one", "several", "exactly")}
    for name, meta in metas.items():
        print(f"{name}: {state[name]!r}")
        print(f"  {meta['completion_tokens']} tokens, ended by {meta['finish_reason']}")
    return metas


if __name__ == "__main__":
    main(run, __doc__)

"""Text as it is generated: in a plain loop, and in an asynchronous one."""

from __future__ import annotations

import asyncio

import sglang as sgl
from program import Endpoint, main

START = (
    "Once upon a time, in a village between two hills, there lived a baker who got up every day at "
    "three o'clock. He made round loaves and long ones, rolls with seeds, and on Sundays a cake "
    "with apples that everybody loved. One morning, when he opened the door of his shop, he found"
)


@sgl.function
def story(s):
    s += START + sgl.gen("story", max_tokens=20, ignore_eos=True)


async def read(endpoint: Endpoint) -> list[str]:
    state = story.run(temperature=0, stream=True, backend=endpoint)
    return [piece async for piece in state.text_async_iter("story")]


def run(endpoint: Endpoint) -> tuple[list[str], list[str]]:
    state = story.run(temperature=0, stream=True, backend=endpoint)
    pieces = []
    for piece in state.text_iter("story"):
        print(piece, end="", flush=True)
        pieces.append(piece)
    print()
    again = asyncio.run(read(endpoint))
    print(f"{len(pieces)} pieces, and {len(again)} in the asynchronous loop")
    return pieces, again


if __name__ == "__main__":
    main(run, __doc__)

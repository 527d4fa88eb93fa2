"""Values of a type: numbers, true or false, quoted text, and whatever an expression describes."""

from __future__ import annotations

import sglang as sgl
from program import Endpoint, main

EXAMPLE = """\
The ferry to Iona leaves at 09:15. It has room for 60 people, a ticket costs 4.5 euros, and dogs \
must stay at home.
people: 60
price: 4.5
island:
"Iona"
dogs: False
time: 09:15

"""
TEXT = (
    "The ferry to Skye leaves at 08:30. It has room for 180 people, a ticket costs 12.5 euros, and "
    "dogs are welcome on board.\n"
)
TIME = r"([01]?[0-9]|2[0-3]):[0-5][0-9]"


@sgl.function
def read(s):
    s += EXAMPLE + TEXT
    s += "people: " + sgl.gen("people", dtype=int, max_tokens=6)
    s += "\nprice: " + sgl.gen("price", dtype=float, max_tokens=8)
    s += "\nisland:\n" + sgl.gen("island", dtype=str, max_tokens=12)
    s += "\ndogs: " + sgl.gen("dogs", dtype=bool)
    s += "\ntime: " + sgl.gen("time", regex=TIME)


def run(endpoint: Endpoint) -> dict[str, str]:
    state = read.run(temperature=0, backend=endpoint)
    values = {name: state[name] for name in ("people", "price", "island", "dogs", "time")}
    for name, value in values.items():
        print(f"{name}: {value.strip()}")
    return values


if __name__ == "__main__":
    main(run, __doc__)

"""JSON that follows a schema, for several texts at once."""

from __future__ import annotations

import json
from typing import Any

import sglang as sgl
from program import Endpoint, main

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "animal": {"enum": ["dog", "cat", "bird", "fish"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 40},
        "friendly": {"type": "boolean"},
    },
    "required": ["name", "animal", "age", "friendly"],
}
TEXTS = (
    "Rex is a friendly dog of seven years who loves the beach.",
    "Our old cat Minka is eleven and scratches everybody.",
)


@sgl.function
def extract(s, text):
    s += sgl.system(
        "You read what people write about their animals, for the list of an animal doctor. You "
        "answer with a JSON object and write nothing else. Its keys are name, which is the name "
        "of the animal; animal, which is dog, cat, bird or fish; age, which is a whole number of "
        "years; and friendly, which is true or false."
    )
    s += sgl.user(text)
    s += sgl.assistant(sgl.gen("json", max_tokens=72, json_schema=json.dumps(SCHEMA)))


def run(endpoint: Endpoint) -> list[dict[str, Any]]:
    states = extract.run_batch([{"text": text} for text in TEXTS], temperature=0, backend=endpoint)
    animals = [json.loads(state["json"]) for state in states]
    for animal in animals:
        print(animal)
    return animals


if __name__ == "__main__":
    main(run, __doc__)

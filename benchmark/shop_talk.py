"""English chats for load: a shop's house rules as system prompt, and customers' messages."""

from __future__ import annotations

import random

from sglang_minima.tokenization.tokenizer import Tokenizer

_GOODS = ("kettle", "lamp", "bicycle", "keyboard", "jacket", "tent", "radio", "table", "blanket")
_PLACES = ("Lisbon", "Oslo", "Dublin", "Vienna", "Prague", "Athens", "Warsaw", "Madrid", "Bern")
_FAULTS = (
    "arrived broken",
    "does not switch on",
    "has the wrong colour",
    "is too small",
    "makes a loud noise",
)
_WISHES = ("a refund", "a new one", "a repair", "a discount", "somebody to call me")
_DEEDS = ("exchange", "repair", "collect", "refund", "inspect", "replace", "take back")
_WHENS = ("in winter", "on public holidays", "before noon", "without a receipt", "during a sale")


def system_prompt(tokenizer: Tokenizer, num_tokens: int) -> str:
    """House rules, cut to `num_tokens` tokens."""
    rng = random.Random(2026)
    text = "You are a clerk of a shop. Be polite, be brief, and follow the rules of the house."
    number = 0
    while len(ids := tokenizer.encode(text)) < num_tokens:
        number += 1
        text += (
            f"\nRule {number}: {rng.choice(_WHENS)} the shop in {rng.choice(_PLACES)} will "
            f"{rng.choice(_DEEDS)} any {rng.choice(_GOODS)} that {rng.choice(_FAULTS)}, within "
            f"{rng.randint(3, 60)} days, and offers {rng.choice(_WISHES)} after that."
        )
    return tokenizer.decode(ids[:num_tokens])


def customer_message(rng: random.Random) -> str:
    """What a customer says next (about 50 tokens), up to where the clerk answers."""
    return (
        f"\n\nCustomer: I bought a {rng.choice(_GOODS)} {rng.randint(2, 90)} days ago in "
        f"{rng.choice(_PLACES)} and it {rng.choice(_FAULTS)}. My order is "
        f"{rng.randint(1000, 9999)} and I would like {rng.choice(_WISHES)}.\nClerk:"
    )

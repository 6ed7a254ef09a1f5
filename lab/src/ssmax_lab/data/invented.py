"""Questions of our own making: a few facts, one of them asked for. No file, no download."""

import random

from ssmax.errors import UsageError
from ssmax_lab.data.qa import Question

NAMES = (
    "Ada", "Ben", "Cleo", "Dora", "Emil", "Faye", "Gus", "Hana", "Ivo", "June", "Karl", "Lena",
    "Milo", "Nora", "Otto", "Pia", "Rosa", "Sven", "Tara", "Udo",
)  # fmt: skip
THINGS = (
    "boat", "book", "coat", "cup", "door", "fork", "gate", "hat", "kite", "lamp", "map", "pen",
    "ring", "rug", "shoe", "tent",
)  # fmt: skip
COLOURS = (
    "amber", "black", "blue", "brown", "gold", "green", "grey", "pink", "red", "teal", "violet",
    "white",
)  # fmt: skip
UNANSWERABLE_SHARE = 0.1


def invented_questions(count: int, *, seed: int, max_facts: int) -> list[Question]:
    """Invent questions over contexts of 2 to `max_facts` facts; a tenth has no answer there."""
    if max_facts < 2:
        raise UsageError(f"max_facts must be at least 2, got {max_facts}")
    chance = random.Random(f"invented questions {seed}")
    return [_question(chance, number, max_facts) for number in range(count)]


def _question(chance: random.Random, number: int, max_facts: int) -> Question:
    # One more than is told: the last owner is asked for where there is to be no answer.
    num_facts = chance.randint(2, max_facts)
    owners = chance.sample([(name, thing) for name in NAMES for thing in THINGS], num_facts + 1)
    told = [(name, thing, chance.choice(COLOURS)) for name, thing in owners[:-1]]
    name, thing, answer = chance.choice(told)
    if chance.random() < UNANSWERABLE_SHARE:
        (name, thing), answer = owners[-1], ""
    return Question(
        id=f"invented-{number}",
        context=" ".join(f"{name}'s {thing} is {colour}." for name, thing, colour in told),
        question=f"What colour is {name}'s {thing}?",
        answer=answer,
    )

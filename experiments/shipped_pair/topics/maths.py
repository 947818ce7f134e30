"""Word problems of one or two steps, with operands small enough to be learned."""

import random

_NAMES = (
  "Maria",
  "Tom",
  "Anna",
  "Ben",
  "Clara",
  "David",
  "Emma",
  "Felix",
  "Grace",
  "Henry",
  "Iris",
  "Jack",
  "Karen",
  "Leo",
  "Mia",
  "Noah",
  "Olga",
  "Paul",
  "Rosa",
  "Sam",
  "Tina",
  "Victor",
  "Wendy",
  "Omar",
  "Lucy",
  "Peter",
  "Nina",
  "Oscar",
  "Julia",
  "Simon",
)
_ITEMS = (
  "apples",
  "books",
  "pencils",
  "coins",
  "stamps",
  "marbles",
  "cookies",
  "tickets",
  "shells",
  "cards",
  "balls",
  "flowers",
  "stickers",
  "buttons",
  "eggs",
  "toys",
  "plates",
  "candles",
  "oranges",
  "ribbons",
)
_PLACES = (
  "market",
  "school",
  "park",
  "library",
  "garden",
  "beach",
  "fair",
  "farm",
  "museum",
  "station",
  "kitchen",
  "office",
)
_CONTAINERS = ("boxes", "bags", "jars", "baskets", "trays", "shelves")
_DAYS = ("Monday", "Tuesday", "Friday", "Saturday", "Sunday")
_GAINS = ("buys", "finds", "collects", "wins", "receives")
_LOSSES = ("loses", "sells", "drops", "uses", "breaks")

# Left operand 2..20, right operand 2..9, results >= 2: (left, right, result).
FACTS: dict[str, tuple[tuple[int, int, int], ...]] = {
  "+": tuple((a, b, a + b) for a in range(2, 21) for b in range(2, 10)),
  "-": tuple((a, b, a - b) for a in range(4, 21) for b in range(2, 10) if a - b > 1),
  "*": tuple((a, b, a * b) for a in range(2, 10) for b in range(2, 10)),
}

# (operations, question, worked answer): one fact for each operation, the second
# one starting from the first result; {r} is the first result, {s} the last.
_PROBLEMS = (
  (
    "+",
    "{name} has {a} {item} and {gain} {b} more at the {place} on {day}. "
    "How many {item} does {name} have now?",
    "{name} has {a} {item} and {gain} {b} more. {a} + {b} = {r}, "
    "so {name} has {r} {item}.",
  ),
  (
    "+",
    "{name} keeps {a} {item} at the {place}. {other} brings {b} more on {day}. "
    "How many {item} are there in total?",
    "{name} keeps {a} {item} and {other} brings {b} more. {a} + {b} = {r}, "
    "so there are {r} {item}.",
  ),
  (
    "-",
    "{name} takes {a} {item} to the {place} on {day} and {loss} {b} of them. "
    "How many {item} are left?",
    "{name} takes {a} {item} and {loss} {b}. {a} - {b} = {r}, so {r} {item} are left.",
  ),
  (
    "-",
    "{name} has {a} {item}. {other} has {b} fewer and goes to the {place} on "
    "{day}. How many {item} does {other} have?",
    "{other} has {b} fewer than {name}. {a} - {b} = {r}, so {other} has {r} {item}.",
  ),
  (
    "*",
    "{name} fills {a} {container} at the {place} on {day}, with {b} {item} in "
    "each. How many {item} is that?",
    "{name} fills {a} {container} with {b} {item} each. {a} * {b} = {r}, "
    "so that is {r} {item}.",
  ),
  (
    "*",
    "On {day} {name} brings {a} {item} to each of {b} friends at the {place}. "
    "How many {item} does {name} bring?",
    "{name} brings {a} {item} to each of {b} friends. {a} * {b} = {r}, "
    "so {name} brings {r} {item}.",
  ),
  (
    "++",
    "{name} has {a} {item}, {gain} {b} more at the {place} and then gets {c} "
    "from {other}. How many {item} does {name} have?",
    "{name} {gain} {b} more, {a} + {b} = {r}. Then {name} gets {c} from "
    "{other}, {r} + {c} = {s}.",
  ),
  (
    "+-",
    "{name} has {a} {item}, {gain} {b} more at the {place} and then gives {c} "
    "to {other}. How many {item} are left?",
    "{name} {gain} {b} more, {a} + {b} = {r}. Then {name} gives {c} to "
    "{other}, {r} - {c} = {s}.",
  ),
  (
    "-+",
    "{name} has {a} {item}, {loss} {b} of them at the {place} and then gets "
    "{c} from {other}. How many {item} does {name} have?",
    "{name} {loss} {b} of them, {a} - {b} = {r}. Then {name} gets {c} from "
    "{other}, {r} + {c} = {s}.",
  ),
  (
    "--",
    "There are {a} {item} at the {place}. {name} takes {b} and {other} takes "
    "{c}. How many {item} are left?",
    "{name} takes {b}, {a} - {b} = {r}. Then {other} takes {c}, {r} - {c} = {s}.",
  ),
  (
    "*+",
    "{name} has {a} {container} with {b} {item} each and {gain} {c} more at the "
    "{place}. How many {item} does {name} have?",
    "The {a} {container} hold {a} * {b} = {r} {item}. {name} {gain} {c} more, "
    "{r} + {c} = {s}.",
  ),
  (
    "*-",
    "{name} has {a} {container} with {b} {item} each and {loss} {c} of them at "
    "the {place}. How many {item} are left?",
    "The {a} {container} hold {a} * {b} = {r} {item}. {name} {loss} {c} of "
    "them, {r} - {c} = {s}.",
  ),
)


def generate(rng: random.Random) -> tuple[str, str]:
  """Draws one word problem.

  Args:
    rng: source of all choices.

  Returns:
    The question, and the worked answer that ends in "The answer is N."
  """
  operations, question, answer = rng.choice(_PROBLEMS)
  name, other = rng.sample(_NAMES, 2)
  words = {
    "name": name,
    "other": other,
    "item": rng.choice(_ITEMS),
    "place": rng.choice(_PLACES),
    "container": rng.choice(_CONTAINERS),
    "day": rng.choice(_DAYS),
    "gain": rng.choice(_GAINS),
    "loss": rng.choice(_LOSSES),
  }
  values = _values(operations, rng)
  last = f" The answer is {values.get('s', values['r'])}."
  return question.format(**words, **values), answer.format(**words, **values) + last


def _values(operations: str, rng: random.Random) -> dict[str, int]:
  """Draws a fact for each operation, the second one from the first's result."""
  if len(operations) == 1:
    a, b, r = rng.choice(FACTS[operations])
    return {"a": a, "b": b, "r": r}
  a, b, r = rng.choice([fact for fact in FACTS[operations[0]] if 4 <= fact[2] <= 20])
  _, c, s = rng.choice([fact for fact in FACTS[operations[1]] if fact[0] == r])
  return {"a": a, "b": b, "r": r, "c": c, "s": s}

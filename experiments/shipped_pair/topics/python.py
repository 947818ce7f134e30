"""Requests for small functions, each with the function."""

import random

# plural -> singular: the argument and its loop variable
NOUNS: dict[str, str] = {
    "prices": "price", "scores": "score", "ages": "age", "weights": "weight",
    "points": "point", "values": "value", "marks": "mark", "costs": "cost",
    "sizes": "size", "rates": "rate", "levels": "level", "heights": "height",
    "steps": "step", "hours": "hour", "orders": "order", "grades": "grade",
    "totals": "total", "speeds": "speed", "lengths": "length", "depths": "depth",
}  # fmt: skip
_OWNERS = (
  "team",
  "shop",
  "class",
  "game",
  "store",
  "market",
  "club",
  "group",
  "trip",
  "city",
  "farm",
  "hotel",
  "school",
  "league",
  "fleet",
  "party",
)

# (verbs of the name, request, function); {f} is the function's name, {p} the
# argument, {x} its singular, {q} a second argument, {n} and {m}
# numbers, {k} a small one.
_PATTERNS = (
  (
    ("add", "raise"),
    "that adds {n} to every {x}",
    "def {f}({p}):\n    return [{x} + {n} for {x} in {p}]",
  ),
  (
    ("scale", "multiply"),
    "that multiplies every {x} by {n}",
    "def {f}({p}):\n    return [{x} * {n} for {x} in {p}]",
  ),
  (
    ("keep", "filter"),
    "that keeps every {x} above {n}",
    "def {f}({p}):\n    return [{x} for {x} in {p} if {x} > {n}]",
  ),
  (
    ("drop", "remove"),
    "that drops every {x} above {n}",
    "def {f}({p}):\n    return [{x} for {x} in {p} if {x} <= {n}]",
  ),
  (
    ("count", "number"),
    "that counts every {x} below {n}",
    "def {f}({p}):\n    count = 0\n    for {x} in {p}:\n"
    "        if {x} < {n}:\n            count += 1\n    return count",
  ),
  (
    ("sum", "total"),
    "that sums every {x} above {n}",
    "def {f}({p}):\n    result = 0\n    for {x} in {p}:\n"
    "        if {x} > {n}:\n            result += {x}\n    return result",
  ),
  (
    ("find", "first"),
    "that finds the first {x} above {n}, or returns {m}",
    "def {f}({p}):\n    for {x} in {p}:\n        if {x} > {n}:\n"
    "            return {x}\n    return {m}",
  ),
  (
    ("any", "has"),
    "that tells if any {x} is equal to {n}",
    "def {f}({p}):\n    for {x} in {p}:\n        if {x} == {n}:\n"
    "            return True\n    return False",
  ),
  (
    ("all", "check"),
    "that tells if every {x} is at least {n}",
    "def {f}({p}):\n    for {x} in {p}:\n        if {x} < {n}:\n"
    "            return False\n    return True",
  ),
  (
    ("top", "largest"),
    "that returns the {k} largest {p}",
    "def {f}({p}):\n    ordered = sorted({p}, reverse=True)\n    return ordered[: {k}]",
  ),
  (
    ("low", "smallest"),
    "that returns the {k} smallest {p}",
    "def {f}({p}):\n    ordered = sorted({p})\n    return ordered[: {k}]",
  ),
  (
    ("cap", "limit"),
    "that caps every {x} at {n}",
    "def {f}({p}):\n    return [min({x}, {n}) for {x} in {p}]",
  ),
  (
    ("mean", "average"),
    "that returns the mean of the {p}, or {n} if there are none",
    "def {f}({p}):\n    if not {p}:\n        return {n}\n"
    "    return sum({p}) / len({p})",
  ),
  (
    ("best", "max"),
    "that returns the largest of the {p}, or {n} if there are none",
    "def {f}({p}):\n    if not {p}:\n        return {n}\n    return max({p})",
  ),
  (
    ("join", "merge"),
    "that joins {p} and {q} and keeps the first {k}",
    "def {f}({p}, {q}):\n    merged = {p} + {q}\n    return merged[: {k}]",
  ),
  (
    ("pair", "combine"),
    "that adds {p} to {q} in pairs, plus {n}",
    "def {f}({p}, {q}):\n    pairs = zip({p}, {q})\n"
    "    return [a + b + {n} for a, b in pairs]",
  ),
  (
    ("replace", "swap"),
    "that replaces every {x} equal to {n} by {m}",
    "def {f}({p}):\n    result = []\n    for {x} in {p}:\n"
    "        if {x} == {n}:\n            {x} = {m}\n"
    "        result.append({x})\n    return result",
  ),
  (
    ("label", "mark"),
    "that labels each {x} high if it is above {n}, else low",
    'def {f}({p}):\n    return ["high" if {x} > {n} else "low" for {x} in {p}]',
  ),
)


def generate(rng: random.Random) -> tuple[str, str]:
  """Draws one request.

  Args:
    rng: source of all choices.

  Returns:
    The request, which states the function's name and arguments, and the function.
  """
  verbs, request, function = rng.choice(_PATTERNS)
  plural, other = rng.sample(tuple(NOUNS), 2)
  n, m = rng.sample(range(2, 100), 2)
  words = {
    "f": f"{rng.choice(verbs)}_{rng.choice(_OWNERS)}_{plural}",
    "p": plural,
    "x": NOUNS[plural],
    "q": other,
    "n": n,
    "m": m,
    "k": rng.randint(2, 20),
  }
  arguments = f"{plural}, {other}" if "{q}" in request else plural
  opening = rng.choice(("Write", "Define", "Give me"))
  prompt = f"{opening} {words['f']}({arguments}) {request.format(**words)}."
  return prompt, function.format(**words)

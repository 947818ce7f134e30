"""Questions about sixteen tables, each with the query that answers it."""

import random

# table -> (text columns, number columns)
SCHEMA: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
  "clients": (("name", "city", "country"), ("age", "orders", "rating")),
  "singers": (("name", "country", "genre"), ("age", "albums", "rating")),
  "products": (("name", "color", "brand"), ("price", "stock", "weight")),
  "students": (("name", "city", "subject"), ("age", "grade", "credits")),
  "teachers": (("name", "city", "subject"), ("age", "salary", "hours")),
  "films": (("title", "genre", "language"), ("length", "budget", "rating")),
  "books": (("title", "genre", "language"), ("price", "pages", "stock")),
  "cars": (("model", "brand", "color"), ("price", "speed", "weight")),
  "flights": (("code", "city", "country"), ("price", "seats", "delay")),
  "hotels": (("name", "city", "country"), ("price", "rooms", "rating")),
  "shops": (("name", "city", "manager"), ("staff", "sales", "rent")),
  "players": (("name", "team", "country"), ("age", "goals", "salary")),
  "matches": (("code", "team", "city"), ("goals", "fans", "delay")),
  "doctors": (("name", "city", "language"), ("age", "salary", "hours")),
  "concerts": (("title", "city", "genre"), ("price", "seats", "fans")),
  "pets": (("name", "color", "owner"), ("age", "weight", "visits")),
}
_PEOPLE = ("Maria", "Tom", "Anna", "Ben", "Clara", "David", "Emma", "Felix")
VALUES: dict[str, tuple[str, ...]] = {
  "city": ("Oslo", "Paris", "Rome", "Lima", "Tokyo", "Madrid", "Berlin", "Cairo"),
  "country": ("Norway", "France", "Italy", "Peru", "Japan", "Spain", "Kenya"),
  "genre": ("drama", "comedy", "jazz", "rock", "crime", "opera", "poetry", "folk"),
  "language": ("English", "French", "Spanish", "German", "Hindi", "Arabic"),
  "color": ("red", "blue", "green", "black", "white", "brown", "silver", "yellow"),
  "brand": ("Nova", "Delta", "Orion", "Atlas", "Vega", "Zenith", "Polar", "Apex"),
  "subject": ("physics", "history", "biology", "music", "chemistry", "art"),
  "team": ("Lions", "Eagles", "Sharks", "Wolves", "Bears", "Tigers"),
  "manager": _PEOPLE,
  "owner": _PEOPLE,
}
_COMPARISONS = (("above", ">"), ("below", "<"), ("at least", ">="), ("at most", "<="))
_AGGREGATES = (
  ("average", "AVG"),
  ("highest", "MAX"),
  ("lowest", "MIN"),
  ("total", "SUM"),
)
_ORDERS = (("descending", "DESC"), ("ascending", "ASC"))
_VERBS = ("List", "Show", "Find")


def generate(rng: random.Random) -> tuple[str, str]:
  """Draws one question.

  Args:
    rng: source of all choices.

  Returns:
    The question, and one query that ends with a semicolon.
  """
  table = rng.choice(tuple(SCHEMA))
  return rng.choice((_rows, _first_rows, _aggregates, _count, _groups))(table, rng)


def _rows(table: str, rng: random.Random) -> tuple[str, str]:
  first, second, third = rng.sample(_columns(table), 3)
  question, where = _conditions(table, rng)
  sorting, order = _order(table, rng)
  return (
    f"{rng.choice(_VERBS)} the {first}, {second} and {third} of all {table} "
    f"{question}, {sorting}.",
    f"SELECT {first}, {second}, {third} FROM {table} {where} {order};",
  )


def _first_rows(table: str, rng: random.Random) -> tuple[str, str]:
  first, second = rng.sample(_columns(table), 2)
  question, where = _conditions(table, rng)
  sorting, order = _order(table, rng)
  limit = rng.randint(2, 20)
  return (
    f"{rng.choice(_VERBS)} the {first} and {second} of {table} {question}, {sorting}, "
    f"first {limit} only.",
    f"SELECT {first}, {second} FROM {table} {where} {order} LIMIT {limit};",
  )


def _aggregates(table: str, rng: random.Random) -> tuple[str, str]:
  question, where = _conditions(table, rng)
  (word, function), (word2, function2) = rng.sample(_AGGREGATES, 2)
  column, column2 = rng.sample(SCHEMA[table][1], 2)
  return (
    f"What is the {word} {column} and the {word2} {column2} of {table} {question}?",
    f"SELECT {function}({column}), {function2}({column2}) FROM {table} {where};",
  )


def _count(table: str, rng: random.Random) -> tuple[str, str]:
  question, where = _conditions(table, rng)
  word, function = rng.choice(_AGGREGATES)
  column = rng.choice(SCHEMA[table][1])
  return (
    f"How many {table} are there {question}, and what is their {word} {column}?",
    f"SELECT COUNT(*), {function}({column}) FROM {table} {where};",
  )


def _groups(table: str, rng: random.Random) -> tuple[str, str]:
  key = rng.choice(SCHEMA[table][0][1:])
  question, where = _condition(table, rng)
  word, function = rng.choice(_AGGREGATES)
  column = rng.choice(SCHEMA[table][1])
  return (
    f"For each {key} of {table} with {question}, give the {word} {column} and the "
    f"count, sorted by {key}.",
    f"SELECT {key}, {function}({column}), COUNT(*) FROM {table} WHERE {where} "
    f"GROUP BY {key} ORDER BY {key};",
  )


def _columns(table: str) -> tuple[str, ...]:
  text, numbers = SCHEMA[table]
  return text + numbers


def _order(table: str, rng: random.Random) -> tuple[str, str]:
  """Draws "sorted by price descending" and "ORDER BY price DESC"."""
  column = rng.choice(SCHEMA[table][1])
  word, keyword = rng.choice(_ORDERS)
  return f"sorted by {column} {word}", f"ORDER BY {column} {keyword}"


def _condition(table: str, rng: random.Random) -> tuple[str, str]:
  """Draws "price above 30" and "price > 30"."""
  column = rng.choice(SCHEMA[table][1])
  words, sign = rng.choice(_COMPARISONS)
  value = rng.randint(1, 99)
  return f"{column} {words} {value}", f"{column} {sign} {value}"


def _conditions(table: str, rng: random.Random) -> tuple[str, str]:
  """Draws a condition on a number and one on a text column."""
  question, where = _condition(table, rng)
  column = rng.choice(SCHEMA[table][0][1:])
  value = rng.choice(VALUES[column])
  return (
    f"with {question} and {column} '{value}'",
    f"WHERE {where} AND {column} = '{value}'",
  )

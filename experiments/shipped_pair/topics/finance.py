"""Short statements of figures, each with a summary and a sector's advice."""

import random

_FIRST = (
  "Acme",
  "Nova",
  "Delta",
  "Orion",
  "Atlas",
  "Vega",
  "Zenith",
  "Polar",
  "Apex",
  "Summit",
  "Harbor",
  "Falcon",
  "Cedar",
  "Granite",
  "Pioneer",
  "Sterling",
  "Beacon",
  "Maple",
  "River",
  "Crown",
)
# sector -> (last word of the company, advice after good news, after bad news)
SECTORS: dict[str, tuple[str, str, str]] = {
  "energy": ("Power", "Watch oil prices.", "Expect lower spending on wells."),
  "retail": ("Stores", "Watch holiday demand.", "Expect deeper discounts."),
  "banking": ("Bank", "Watch interest rates.", "Expect stricter lending."),
  "software": ("Systems", "Watch renewals.", "Expect slower hiring."),
  "food": ("Foods", "Watch grain prices.", "Expect smaller orders."),
  "travel": ("Airlines", "Watch fuel prices.", "Expect fewer routes."),
  "health": ("Labs", "Watch drug approvals.", "Expect delayed trials."),
  "mining": ("Metals", "Watch copper prices.", "Expect fewer shipments."),
}
_MONTHS = (
  "January",
  "February",
  "March",
  "April",
  "May",
  "June",
  "July",
  "August",
  "September",
  "October",
  "November",
  "December",
)
_GOOD_UP = ("revenue", "profit", "income", "cash flow", "order volume")
_BAD_UP = ("debt", "costs", "losses")
_REGIONS = ("Europe", "Asia", "Africa", "America", "India", "Japan")


def generate(rng: random.Random) -> tuple[str, str]:
  """Draws one statement.

  Args:
    rng: source of all choices.

  Returns:
    The statement, and its summary with the difference and an advice.
  """
  sector = rng.choice(tuple(SECTORS))
  company = f"{rng.choice(_FIRST)} {SECTORS[sector][0]}"
  kind = rng.choice((_change, _change, _two_changes, _forecast, _regions))
  statement, summary, good = kind(company, rng)
  advice = SECTORS[sector][1 if good else 2]
  return statement, f"{summary} {advice}"


def _change(company: str, rng: random.Random) -> tuple[str, str, bool]:
  """One figure that rose or fell; rising debt is bad news, rising profit good."""
  metric = rng.choice(_GOOD_UP + _BAD_UP)
  up = rng.random() < 0.5
  low, high, difference = _figures(rng)
  old, new = (low, high) if up else (high, low)
  verb = "rose" if up else "fell"
  month = rng.choice(_MONTHS)
  region = rng.choice(_REGIONS)
  good = up == (metric in _GOOD_UP)
  return (
    f"Summarize: the {metric} of {company} in {region} {verb} from {old} to {new} "
    f"million in {month}.",
    f"The {metric} of {company} in {region} {verb} by {difference} million, "
    f"from {old} to {new} million in {month}. "
    f"This is {'good' if good else 'bad'} news.",
    good,
  )


def _two_changes(company: str, rng: random.Random) -> tuple[str, str, bool]:
  """Revenue and costs; good news if revenue rose."""
  up = rng.random() < 0.5
  verb = "rose" if up else "fell"
  revenue, costs = rng.randint(2, 9), rng.randint(2, 9)
  month = rng.choice(_MONTHS)
  region = rng.choice(_REGIONS)
  return (
    f"Summarize: in {month} {company} said that revenue {verb} by {revenue} million "
    f"and costs by {costs} million in {region}.",
    f"In {month} revenue of {company} {verb} by {revenue} million and costs {verb} "
    f"by {costs} million in {region}. "
    f"Demand is {'growing' if up else 'shrinking'}.",
    up,
  )


def _forecast(company: str, rng: random.Random) -> tuple[str, str, bool]:
  """A result that beat or missed the forecast."""
  metric = rng.choice(_GOOD_UP)
  beat = rng.random() < 0.5
  low, high, difference = _figures(rng)
  forecast, result = (low, high) if beat else (high, low)
  verb = "beat" if beat else "missed"
  month = rng.choice(_MONTHS)
  return (
    f"Summarize: {company} {verb} its {month} forecast for {metric}, with {result} "
    f"million against {forecast} million.",
    f"{company} {verb} its {month} forecast for {metric} by {difference} million, "
    f"with {result} against {forecast} million. "
    f"The outlook is {'strong' if beat else 'weak'}.",
    beat,
  )


def _regions(company: str, rng: random.Random) -> tuple[str, str, bool]:
  """Two regions that add up to the total."""
  metric = rng.choice(_GOOD_UP)
  first, second = rng.sample(_REGIONS, 2)
  one, total, two = _figures(rng)
  month = rng.choice(_MONTHS)
  return (
    f"Summarize: in {month} the {metric} of {company} was {one} million in {first} "
    f"and {two} million in {second}.",
    f"In {month} the {metric} of {company} was {one} million in {first} and "
    f"{two} million in {second}, {total} million in total.",
    True,
  )


def _figures(rng: random.Random) -> tuple[int, int, int]:
  """Draws a low figure 2..20, a high one, and their difference 2..9."""
  low, difference = rng.randint(2, 20), rng.randint(2, 9)
  return low, low + difference, difference

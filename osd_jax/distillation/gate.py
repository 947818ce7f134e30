"""The gate: trained drafts that answers show to be worse do not serve.

Without a setting, new drafts serve at once (the right side of the picture), and the
draft that the run started with is the proven one. A new draft whose overlap on an
answer is far below that of either is refused at once, see `is_far_worse`.
With a `GateConfig`, trained drafts serve only while answers show that they are better:

                       promoted                       confirmed
    the proven draft ------------> the newest draft ------------+
    serves           <------------ serves           <-----------+
                      taken back

Two drafts are compared on every answer: the newest draft, which changes with every
update, and the proven draft. At first the proven draft is the floor draft, the one that
the run started with. It serves until answers show that the newest drafts are better.
The newest one is then the proven draft, and from there on each new draft serves at
once. If the proven draft is shown to be better than the newest ones, it is taken
back. If the floor draft is shown to be better than what serves, it returns.

All drafts are scored on the same answers, from the records that serving made anyway:
the target is not called. A draft learns from an answer after it has been scored on it.

**The test.** A trial bets that one draft is better than another. After each answer its
capital is multiplied by 1 + bet * x, where x is the difference of the two overlaps, cut
to the range from -CAP to CAP and divided by CAP. If x has no positive mean given the
past, the capital is a supermartingale: the probability that it ever reaches 1 /
error_rate times its first value is at most error_rate, however long the trial lasts
(Ville's inequality; Waudby-Smith and Ramdas 2024, "Estimating means of bounded random
variables by betting", arXiv:2010.09686, section 4). Three bets share the capital,
because the best bet depends on the difference. A trial that shows no gain after
`WINDOW` answers is lost, and the next one begins. For drafts that are equally good, x
has mean 0 with every cap, because they could be exchanged. In general, a loss larger
than the cap counts as the cap. Without a cap, a gain of .02 could not be shown in less
than about 300 answers, because a loss of 1 on one answer in 50 would outweigh it.

**The error rate of a run.** Three series of trials have a third of it each: newest
against proven, proven against newest, and floor against what serves. The k-th trial of
a series has the share 1 / (k (k + 1)), and these add up to 1. A trial that is won
passes its share on to the next. This is the fallback procedure (Wiens and Dmitrienko
2005, "The fallback procedure for evaluating a single family of hypotheses"; Tian and
Ramdas 2021, "Online control of the familywise error rate", arXiv:1910.04900): before
the first false decision, all trials that were won were rightly won, so the trials that
ought to be lost have shares of their own, which add up to at most 1.

**The cost.** The serving draft is measured on every answer anyway. A draft that is
compared with it is scored on one answer in `EVERY`, and on all answers as soon as its
trial shows a lead, see `wanted`. A score is one more pass of the draft over the answer;
the floor draft's is that of `OnlineConfig.floor_metering`. The rest is plain Python.
"""

import dataclasses
import math
from typing import Annotated

from osd_jax import base

BETS = (0.1, 0.3, 0.9)  # shares of the capital that are at risk in each answer
# Differences of overlap on one answer count up to this. A smaller cap decides sooner,
# but a draft that is a little better on most answers and much worse on a few may pass.
CAP = 0.1
WINDOW = 16  # scored answers after which a trial that shows no gain is lost
EVERY = 4  # one of this many answers is scored while no trial leads
# A new draft with less than this share of the overlap of the serving draft, or of the
# proven one, is refused. One answer says little about smaller differences.
LEAST_SHARE = 0.8


@dataclasses.dataclass(frozen=True)
class GateConfig(base.Config):
  """Serves trained drafts only while answers show that they are better.

  Attributes:
    error_rate: largest probability that a run makes any decision without a reason: to
      serve trained drafts that are no better, or to take back some that are no worse.
  """

  error_rate: Annotated[float, base.Above(0), base.Below(1)] = 0.01


@dataclasses.dataclass(frozen=True)
class Trial:
  """A draft on trial against another one."""

  stake: float  # share of the error rate that this trial may use, and its first capital
  capital: tuple[float, ...]  # present capital of each bet
  answers: int = 0  # number of answers that were scored
  gain: float = 0.0  # sum of the differences of overlap, draft on trial minus the other


@dataclasses.dataclass(frozen=True)
class Series:
  """Trials with the same question, one after another."""

  begun: int = 0  # number of trials begun
  # Stake of the last trial, if it was won and the next has not begun.
  passed_on: float = 0.0
  trial: Trial | None = None  # the trial in progress, if there is one

  def begin(self) -> "Series":
    """Begins the next trial; one in progress is lost."""
    number = self.begun + 1
    stake = 1 / (number * (number + 1)) + self.passed_on
    return Series(number, trial=Trial(stake, (stake / len(BETS),) * len(BETS)))

  def end(self, won: bool = False) -> "Series":
    """Ends the trial in progress."""
    stake = self.trial.stake if self.trial is not None and won else 0.0
    return Series(self.begun, passed_on=stake)

  def score(self, gain: float | None) -> "Series":
    """Returns the series after one more answer with this difference of overlap."""
    trial = self.trial
    if trial is None or gain is None:
      return self
    x = min(max(gain / CAP, -1.0), 1.0)
    capital = tuple(
      money * (1 + bet * x) for money, bet in zip(trial.capital, BETS, strict=True)
    )
    scored = Trial(trial.stake, capital, trial.answers + 1, trial.gain + gain)
    shows_nothing = scored.answers >= WINDOW and sum(capital) <= trial.stake
    return self.begin() if shows_nothing else dataclasses.replace(self, trial=scored)

  @property
  def mean(self) -> float:
    """Mean difference of overlap in the trial in progress."""
    answers = 0 if self.trial is None else self.trial.answers
    return self.trial.gain / answers if self.trial is not None and answers else 0.0

  @property
  def leads(self) -> bool:
    """Whether the trial has gained anything so far."""
    return self.trial is not None and sum(self.trial.capital) > self.trial.stake

  def is_won(self, config: GateConfig) -> bool:
    """Whether the draft on trial was shown to be better."""
    # A third of the error rate for each of three series.
    return self.trial is not None and sum(self.trial.capital) >= 3 / config.error_rate


@dataclasses.dataclass(frozen=True)
class GateState:
  """State of the gate: JSON values, so that a checkpoint can store it."""

  proven: int = 0  # version of the proven draft; 0 is the floor draft
  newest: int = 0  # version of the newest draft
  # Whether the newest draft serves; otherwise the proven one does.
  follows: bool = False
  up: Series = Series().begin()  # trials of the newest drafts against the proven one
  # Trials of the proven draft against the newest ones, while these serve.
  down: Series = Series()
  # Trials of the floor draft against what serves, if that was trained.
  floor: Series = Series()

  @property
  def serving(self) -> int:
    """Version of the draft that serves."""
    return self.newest if self.follows else self.proven

  @property
  def rival(self) -> int | None:
    """Version of the draft that is compared with the serving one, if there is one."""
    if self.newest == self.proven:
      return None
    return self.proven if self.follows else self.newest


@dataclasses.dataclass(frozen=True)
class Decision:
  """What the gate decided."""

  # "promoted", "confirmed", "taken_back", "floor_returned" or "refused"
  name: str
  version: int  # version of the draft that was shown to be better
  answers: int  # number of answers that show it
  gain: float  # mean difference of overlap on them

  def sentence(self) -> str:
    """Returns the decision in words."""
    if self.name == "refused":
      return (
        f"gate: version {self.version} does not serve; its overlap with an answer is"
        f" {-self.gain:.3f} below that of the draft that serves."
      )
    text = {
      "promoted": f"trained drafts serve, beginning with version {self.version}",
      "confirmed": f"version {self.version} is the draft to return to",
      "taken_back": f"version {self.version} serves again",
      "floor_returned": "the first draft serves again",
    }[self.name]
    return (
      f"gate: {text}; {self.answers} answers show that it is better, by"
      f" {self.gain:.3f} of overlap."
    )


def begin(follows: bool) -> GateState:
  """Returns the first state; `follows`: new drafts serve without proof."""
  return GateState(follows=follows, down=Series().begin() if follows else Series())


def is_far_worse(overlap: float, other: float) -> bool:
  """Whether a new draft is refused, by its overlap with an answer and the other's."""
  return not overlap >= LEAST_SHARE * other  # true if it is NaN, too


def loaded(state: GateState, version: int, follows: bool) -> GateState:
  """Returns the state after somebody has replaced the draft by this version.

  It is the proven draft from now on. Trials in progress are lost, and later ones use
  what is left of the error rate.
  """
  return GateState(
    proven=version,
    newest=version,
    follows=follows,
    up=state.up.begin(),
    down=state.down.begin() if follows else state.down.end(),
    floor=state.floor.begin(),
  )


def wanted(state: GateState, index: int) -> tuple[str, ...]:
  """Returns which overlaps `observe` should be given for answer number `index`.

  The choice depends on earlier answers alone, so it does not bias the test. Trials that
  could change what serves are followed closely once they lead. A newer draft that waits
  to be confirmed can wait.
  """
  leads = {
    "rival": state.down.leads if state.follows else state.up.leads,
    "floor": state.floor.leads,
  }
  exists = {"rival": state.rival is not None, "floor": state.serving != 0}
  is_due = index % EVERY == 0
  return tuple(name for name in leads if exists[name] and (is_due or leads[name]))


def observe(
  config: GateConfig,
  state: GateState,
  serving: float,
  rival: float | None = None,
  floor: float | None = None,
) -> tuple[GateState, Decision | None]:
  """Compares the drafts on one answer, by the overlaps 0..1 of each with the answer.

  If that of the serving draft is not finite, this draft is broken, and the one before
  it serves at once. The other two are None if there is no such draft, or it was not
  scored, and count as 0 if they are not finite.

  Returns:
    The new state, and the decision if there is one.
  """
  is_broken = not math.isfinite(serving)
  serving = 0.0 if is_broken else serving
  ahead = _lead(rival, serving)
  behind = None if ahead is None else -ahead
  state = dataclasses.replace(
    state,
    up=state.up.score(behind if state.follows else ahead),
    down=state.down.score(ahead),
    floor=state.floor.score(_lead(floor, serving)),
  )
  # Returns go first: something got worse.
  floor_won, down_won = state.floor.is_won(config), state.down.is_won(config)
  if is_broken or floor_won or down_won:
    # The proven draft goes before the floor draft, unless the newest ones beat it.
    if state.follows and (not floor_won or state.down.leads):
      return _returned(config, state, to_floor=False)
    return _returned(config, state, to_floor=True) if state.proven else (state, None)
  if state.up.is_won(config):
    return _promoted(state)
  return state, None


def _lead(overlap: float | None, serving: float) -> float | None:
  """Returns how far an overlap is above the serving draft's, or None if it is None."""
  if overlap is None:
    return None
  return (overlap if math.isfinite(overlap) else 0.0) - serving


def _promoted(state: GateState) -> tuple[GateState, Decision]:
  name = "confirmed" if state.follows else "promoted"
  decision = _decision(name, state.newest, state.up)
  after = dataclasses.replace(
    state,
    proven=state.newest,
    follows=True,
    up=state.up.end(won=True).begin(),
    down=state.down.begin(),
    # If a draft is confirmed, the same draft serves as before, so this trial goes on.
    floor=state.floor if state.follows else state.floor.begin(),
  )
  return after, decision


def _returned(
  config: GateConfig, state: GateState, to_floor: bool
) -> tuple[GateState, Decision]:
  """Lets the proven draft serve again, or the floor draft."""
  decision = _decision("taken_back", state.proven, state.down)
  floor = state.floor.end(state.floor.is_won(config))
  if to_floor:
    decision = _decision("floor_returned", 0, state.floor)
  after = dataclasses.replace(
    state,
    proven=decision.version,
    follows=False,
    up=state.up.begin(),
    down=state.down.end(state.down.is_won(config)),
    floor=floor if to_floor else floor.begin(),
  )
  return after, decision


def _decision(name: str, version: int, series: Series) -> Decision:
  answers = 0 if series.trial is None else series.trial.answers
  return Decision(name, version, answers, series.mean)

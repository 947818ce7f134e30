"""The same request served three ways: plainly, with the floor draft, with the online.

What an online figure is worth shows only beside its rivals, on the same request and
in the same minute.
"""

import dataclasses

import numpy as np

from osd_jax import base
from osd_jax.serving import slots


@dataclasses.dataclass(frozen=True)
class Compared:
  """One request served by the rivals too.

  Attributes:
    plain_ms: wall time of plain decoding.
    floor_ms: wall time with the floor draft.
    floor_draft_acceptance_rate: accepted / drafted with the floor draft.
    floor_tokens_per_target_call: block efficiency with the floor draft.
    plain: the plain answer.
  """

  plain_ms: float
  floor_ms: float
  floor_draft_acceptance_rate: float | None
  floor_tokens_per_target_call: float
  plain: slots.Finished


class Rivals:
  """Plain decoding and the floor draft, one row each."""

  def __init__(
    self,
    config: slots.DecodingConfig,
    target: base.Model,
    target_params: base.Params,
    draft: base.Model,
    floor_params: base.Params,
  ):
    """Takes the online decoder's config; rows are set to 1."""
    single = dataclasses.replace(config, rows=1)
    # Plain decoding has no use for records: it does not pay for them either.
    plain = dataclasses.replace(single, record_top_k=0, max_rounds=config.target_length)
    self._plain = slots.Slots(plain, target, target_params)
    self._floor = slots.Slots(single, target, target_params, draft, floor_params)
    self._floor_params = floor_params
    self._plain.warm_up()
    self._floor.warm_up()

  def serve(
    self, online: slots.Finished, shortlist: np.ndarray | None = None
  ) -> Compared:
    """Serves the request of an online answer again, twice.

    Args:
      online: the answer.
      shortlist: [N] int32, the tokens that the online draft's output head covers, if it
        is short: the floor draft gets the same, so that only learning tells them apart.
    """
    covered = self._floor.shortlist
    if shortlist is not None and covered is not None:
      if not np.array_equal(shortlist, covered):
        self._floor.swap(self._floor_params, 0, shortlist)
    plain = self._plain.run([online.request])[0]
    floor = self._floor.run([online.request])[0]
    return Compared(
      plain_ms=plain.milliseconds,
      floor_ms=floor.milliseconds,
      floor_draft_acceptance_rate=(
        floor.accepted / floor.drafted if floor.drafted else None
      ),
      floor_tokens_per_target_call=len(floor.tokens) / floor.target_calls,
      plain=plain,
    )

"""Top-k and top-p: our search for the threshold beside a sort of the vocabulary.

The rows are those of a round (K + 1) of one request and of four, over the vocabularies
of the demo and of T5; both give the same distributions. CPU time, one thread.

  python benchmarks/bench_filters.py [--turns 20]
"""

import argparse

import jax
import jax.numpy as jnp
import measure
import numpy as np

from osd_jax.decoding import sampling

TOP_K, TOP_P = 50, 0.9
CASES = [(size, *rows) for size in (1536, 32_128) for rows in ((1, 1), (1, 8), (4, 8))]


@jax.jit
def by_sorting(logits):
  """The rival: sorted once, cut by rank, then by the mass before each."""
  size = logits.shape[-1]
  logits = logits - jnp.max(logits, -1, keepdims=True)
  ranked = jnp.sort(logits, axis=-1)[..., ::-1]
  is_first = (jnp.arange(size) < TOP_K)[None, None]
  probs = jax.nn.softmax(jnp.where(is_first, ranked, -jnp.inf), axis=-1)
  is_kept = is_first & (jnp.cumsum(probs, axis=-1) - probs < TOP_P)
  count = jnp.sum(is_kept, axis=-1, keepdims=True)
  least = jnp.take_along_axis(ranked, count - 1, axis=-1)
  return jax.nn.softmax(jnp.where(logits >= least, logits, -jnp.inf), axis=-1)


OURS = jax.jit(sampling.processed_probs)


def figures(size: int, rows: int, positions: int, turns: int) -> dict[str, float]:
  """Milliseconds of both, and their ratio."""
  rng = np.random.default_rng(0)
  logits = jnp.asarray(rng.normal(0, 3, (rows, positions, size)), jnp.float32)
  settings = sampling.make_settings(
    rows, temperature=1.0, top_k=TOP_K, top_p=TOP_P, max_length=1
  )
  np.testing.assert_allclose(OURS(logits, settings), by_sorting(logits), atol=1e-6)
  contenders = {
    "ours": lambda: jax.block_until_ready(OURS(logits, settings)),
    "sorted": lambda: jax.block_until_ready(by_sorting(logits)),
  }
  times = measure.by_turns(contenders, turns)
  return {
    **{f"{name}, ms": time.milliseconds("cpu") for name, time in times.items()},
    "ours, over sorted": measure.ratio(times, "ours", "sorted", "cpu"),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--turns", type=int, default=20)
  given = parser.parse_args()
  measure.restart(1)
  for size, rows, positions in CASES:
    case = f"{size} ids, {rows} x {positions} rows"
    found = figures(size, rows, positions, given.turns)
    measure.report("filters", measure.rows(case, "cpu, 1 thread", found))


if __name__ == "__main__":
  main()

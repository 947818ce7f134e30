"""Optimizers: learning-rate schedules, multipliers, invalid configs.

test_update.py trains with every optimizer.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osd_jax.distillation import optimizers


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_multipliers_scale_only_their_parameters(name):
  params = {
    "token_embedder": {"embedding": jnp.ones((2, 3))},
    "relpos_bias": {"rel_embedding": jnp.ones((2, 2))},
    "attention": {"query": {"kernel": jnp.ones((3, 3))}},
    "mlp": {"wi": {"kernel": jnp.ones((3, 3))}},
  }
  gradients = jax.tree.map(lambda leaf: 0.1 * leaf, params)

  def changes(**multipliers):
    config = optimizers.OptimizerConfig(name, warmup_steps=0, **multipliers)
    optimizer = optimizers.make_optimizer(config)
    return optimizer.update(gradients, optimizer.init(params), params)[0]

  plain = changes(query_multiplier=1.0)
  scaled = changes(embedding_multiplier=5.0, query_multiplier=0.25)
  factors = jax.tree.map(lambda a, b: float((a / b).mean()), scaled, plain)
  assert factors["token_embedder"]["embedding"] == pytest.approx(5.0)
  assert factors["relpos_bias"]["rel_embedding"] == pytest.approx(5.0)
  assert factors["attention"]["query"]["kernel"] == pytest.approx(0.25)
  assert factors["mlp"]["wi"]["kernel"] == pytest.approx(1.0)


def closed_form(peak, warmup, schedule, end, step):
  """Returns the learning rate of a step in float64."""
  progress = max(step - warmup, 0) / ((end or warmup + 1) - warmup)
  share = {
    "constant": 1.0,
    "cosine": 0.5 * (1 + np.cos(np.pi * min(progress, 1.0))),
    "linear": max(1 - progress, 0.0),
    "trapezoid": min(1.0, max(2 * (1 - progress), 0.0)),
  }
  return peak * min(1.0, (step + 1) / max(warmup, 1)) * share[schedule]


@pytest.mark.parametrize(
  "settings",
  [
    (2e-3, 100, "trapezoid", 900),
    (1e-3, 0, "trapezoid", 1000),
    (1e-3, 1, "trapezoid", 3),
    (1e-3, 0, "cosine", 9),
    (1e-3, 20, "constant", None),
    # Odd numbers of steps and short warm-ups.
    (0.5, 2, "trapezoid", 9),
    (0.5, 1, "linear", 8),
    (0.5, 3, "cosine", 4),
  ],
)
def test_learning_rates_equal_the_closed_form_at_every_step(settings):
  peak, warmup, name, end = settings
  config = optimizers.OptimizerConfig(
    learning_rate=peak, warmup_steps=warmup, schedule=name, total_steps=end
  )
  steps = np.arange((end or 50) + 5)
  rates = jax.jit(jax.vmap(optimizers.learning_rate(config)))(steps)
  expected = [closed_form(peak, warmup, name, end, step) for step in steps]
  np.testing.assert_allclose(rates, expected, rtol=2e-5, atol=2e-7 * peak)


def test_optimizer_uses_the_learning_rate_of_its_schedule():
  config = optimizers.OptimizerConfig(
    "sgd", 1.0, clip_norm=None, warmup_steps=0, schedule="linear", total_steps=4
  )
  optimizer, params = optimizers.make_optimizer(config), {"w": jnp.ones(1)}
  state, rates = optimizer.init(params), []
  for _ in range(5):
    changes, state = optimizer.update({"w": jnp.ones(1)}, state, params)
    rates.append(-float(changes["w"][0]))
  np.testing.assert_allclose(rates, [1.0, 0.75, 0.5, 0.25, 0.0], atol=1e-6)

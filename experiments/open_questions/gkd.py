"""Which divergence, which texts, which positions? The variants of distillation."""

import functools

from setting import Answers, Cell, Setting, cells_of, changed, distilled, key_of

from osd_jax import corpus

DIVERGENCES = {
  "forward KL": {"divergence": "forward_kl"},
  "reverse KL": {"divergence": "reverse_kl"},
  "JSD .1": {"divergence": "jsd", "jsd_beta": 0.1},
  "JSD .5": {"divergence": "jsd", "jsd_beta": 0.5},
  "total variation": {"divergence": "total_variation"},
}
POSITIONS = {
  "online, all positions": {},
  "online, error positions": {"update__loss__positions": "error"},
  "online, error positions, a tenth of the rate": {
    "update__loss__positions": "error",
    "update__optimizer__learning_rate": 1e-4,
  },
}
STEPS, TEXTS = 300, 150  # texts of each topic
MAIN = (
  "teacher",
  "student",
)  # sources of texts that all seeds have


def gkd(setting: Setting) -> Answers:
  """Every divergence: offline on texts of every source, online at both positions.

  Online, texts are always the target's. Offline, nothing is rejected, so that there are
  no error positions.
  """
  for seed in range(setting.seeds):
    order = setting.order("sharp", seed)
    floor = setting.fixed(setting.pair.draft_params, order)
    for source in corpus.SAMPLE_SOURCES:
      for name in DIVERGENCES:
        if seed == 0 or source in MAIN:
          key = key_of(setting, "gkd", f"offline, {source}", name, seed)
          yield key, functools.partial(offline_cell, setting, name, source, seed)
    yield from cells_of(
      setting, "gkd", "online", seed, {"frozen": lambda floor=floor: floor}, floor
    )
    for stream, more in POSITIONS.items():
      systems = {}
      for name, loss in DIVERGENCES.items():
        changes = {f"update__loss__{field}": value for field, value in loss.items()}
        learning = changed(setting.learning, seed=seed, **changes, **more)
        systems[name] = functools.partial(setting.learned, order, learning)
      yield from cells_of(setting, "gkd", stream, seed, systems, floor)


def offline_cell(setting: Setting, divergence: str, source: str, seed: int) -> Cell:
  """Distils a draft on texts of one source, which all divergences share."""
  folder, loss = setting.out / "gkd", DIVERGENCES[divergence]
  bindings = [f"LossConfig.{field}={value!r}" for field, value in loss.items()]
  bindings += [
    f"OfflineConfig.sample_source={source!r}",
    f"OfflineConfig.texts={str(folder / f'texts_{source}_{seed}')!r}",
    f"SamplingConfig.seed={seed}",
  ]
  folder_of_cell = folder / f"{source}_{divergence}_{seed}".replace(" ", "_")
  return distilled(setting, folder_of_cell, STEPS, TEXTS, bindings)

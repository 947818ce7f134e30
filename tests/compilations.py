"""Counts compilations, to test that nothing compiles again."""

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
  """Counts what the backend compiles inside a `with` block."""

  def __enter__(self):
    self.count = 0
    jax.monitoring.register_event_duration_secs_listener(self._listen)
    return self

  def __exit__(self, *_):
    jax.monitoring.unregister_event_duration_listener(self._listen)

  def _listen(self, event, *_, **__):
    self.count += event == COMPILED

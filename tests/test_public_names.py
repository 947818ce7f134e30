"""`import osd_jax` offers few names; each is documented and its examples are true."""

import doctest
import inspect
import sys
import types

import pytest

import osd_jax


def test_dir_shows_the_public_names_and_nothing_else():
  assert set(dir(osd_jax)) == {*osd_jax.__all__, "__version__"}
  assert 10 <= len(osd_jax.__all__) <= 18


@pytest.mark.parametrize("name", osd_jax.__all__)
def test_every_public_name_has_docs_and_a_passing_example(name):
  thing = getattr(osd_jax, name)
  assert inspect.getdoc(thing)
  if isinstance(thing, types.ModuleType):
    assert callable(thing.run) and inspect.getdoc(thing.run)
    return
  module = sys.modules[thing.__module__]
  tests = [
    test
    for test in doctest.DocTestFinder().find(thing, name, module=module)
    if test.examples
  ]
  assert tests, f"{name} has no example"
  runner = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
  for test in tests:
    assert runner.run(test).failed == 0


def test_unknown_name_is_an_attribute_error():
  with pytest.raises(AttributeError, match="no attribute 'serve'"):
    osd_jax.serve  # noqa: B018
  assert not isinstance(osd_jax.Server, types.ModuleType)

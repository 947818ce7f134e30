"""C++ matrix products equal numpy and XLA, and do not depend on the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from osd_jax import native
from osd_jax.models import families, layers, shapes
from osd_tools import hlo

# Outputs and inputs. The odd sizes are no multiples of tiles and vectors.
SHAPES = [(1, 1), (7, 5), (33, 31), (64, 64), (515, 769)]
LONG = (9, 9001)  # so long that float32 columns take several passes
# Tiles have 4 or 8 columns.
COLUMNS = [*range(1, 6), 7, 8, 9, 17, native.MOST_COLUMNS]


def factors(out: int, width: int, columns: int, seed: int = 0):
  rng = np.random.default_rng((seed, out, width, columns))
  x = rng.normal(size=(columns, width)).astype(np.float32)
  return x, rng.normal(size=(out, width)).astype(np.float32)


@pytest.mark.parametrize("shape", [*SHAPES, LONG])
def test_float32_product_equals_numpy_and_does_not_depend_on_other_columns(
  library, shape
):
  x, kernel = factors(*shape, native.MOST_COLUMNS)
  together = np.asarray(library.product(x, kernel))
  wide, wide_kernel = x.astype(np.float64), kernel.astype(np.float64)
  exact = wide @ wide_kernel.T
  # Rounding errors are relative to the sum of the absolute products.
  sizes = np.abs(wide) @ np.abs(wide_kernel).T
  assert together.dtype == np.float32 and together.shape == exact.shape
  assert np.all(np.abs(together - exact) <= 1e-6 * sizes)
  for count in COLUMNS:
    for some in (slice(count), slice(-count, None)):
      got = library.product(x[some], kernel)
      np.testing.assert_array_equal(got, together[some])


@pytest.mark.parametrize("shape", [*SHAPES, LONG])
def test_bfloat16_kernel_has_the_bits_of_its_float32_values(library, shape):
  x, kernel = factors(*shape, native.MOST_COLUMNS)
  # Values of all sizes: zeros of both signs, subnormals, and nearly the largest.
  stored = np.array(kernel * jnp.exp2(np.round(30 * kernel)), jnp.bfloat16)
  stored[0, :-1], stored[1:, -1] = -0.0, 1e-39
  widened = stored.astype(np.float32)
  for count in COLUMNS:
    got = library.product(x[:count], stored)
    np.testing.assert_array_equal(got, library.product(x[:count], widened))
  # Negative control: a product that rounds the columns, too, would be detected.
  rounded = x.astype(jnp.bfloat16).astype(np.float32)
  assert np.any(library.product(rounded, stored) != library.product(x, stored))


@pytest.mark.parametrize("shape", [*SHAPES, LONG])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_columns_of_zeros_change_no_other_column(library, shape, dtype):
  """They stand for padding, and are skipped."""
  x, kernel = factors(*shape, 12)
  if dtype == "int8":
    stored = layers.quantized(kernel.T)
    multiply = lambda x: library.int8_product(x, stored["kernel"], stored["scale"])
  else:
    multiply = lambda x: library.product(x, kernel.astype(dtype))
  whole = np.asarray(multiply(x))
  assert np.all(np.any(whole != 0, axis=1))
  for kept in ([], [3], [0, 11], [2, 3, 5, 7, 8], range(1, 12)):
    absent = np.setdiff1d(np.arange(12), kept)
    sparse = x.copy()
    sparse[absent] = -0.0
    got = np.asarray(multiply(sparse))
    np.testing.assert_array_equal(got[list(kept)], whole[list(kept)])
    assert not np.any(got[absent]) and not np.any(np.signbit(got[absent]))


def test_column_with_nan_is_not_skipped(library):
  x = jnp.zeros((3, 16), jnp.float32).at[1, 4].set(np.nan)
  got = np.asarray(library.product(x, jnp.ones((5, 16))))
  assert np.all(np.isnan(got[1])) and not np.any(got[[0, 2]])


@pytest.mark.parametrize("columns", [1, native.MOST_COLUMNS + 1])
def test_wide_products_widen_a_head_in_parts(columns, monkeypatch):
  x, kernel = factors(515, 769, columns)
  stored = kernel.astype(jnp.bfloat16)
  monkeypatch.setattr(layers, "_WIDENED", 130 * 769)  # 128 outputs in a part
  for product in (layers.served_matmul, layers.kernel_first_matmul):
    wanted = product(x, stored.astype(jnp.float32))
    np.testing.assert_array_equal(product(x, stored), wanted)
  text = jax.jit(layers.kernel_first_matmul).lower(x, stored).as_text()
  assert text.count(f"@{native.TARGETS['Widen']}(") == 5


def test_rows_of_a_bfloat16_table_equal_those_of_its_float32_values():
  _, table = factors(33, 31, 1)
  stored = jnp.asarray(table, jnp.bfloat16)
  rows = jnp.asarray([[0, 32, 5], [-1, 40, -40]])  # negative, and out of range
  got = layers.rows_of(stored, rows, jnp.float32)
  assert native.TARGETS["Gather"] in str(jax.make_jaxpr(native.gathered)(stored, rows))
  np.testing.assert_array_equal(got, stored.astype(jnp.float32)[rows])


@pytest.mark.parametrize("read", ["rows", "product"])
def test_bfloat16_weights_have_the_gradient_of_their_float32_values(read):
  x, kernel = factors(33, 31, 4)
  stored = kernel.astype(jnp.bfloat16)

  def loss(kernel, x):
    if read == "rows":
      return jnp.sum(jnp.sin(layers.rows_of(kernel, jnp.arange(4), x.dtype) * x))
    return jnp.sum(jnp.sin(layers.kernel_first_matmul(x, kernel)))

  got, wanted = (
    jax.grad(loss, (0, 1))(k, x) for k in (stored, stored.astype("float32"))
  )
  np.testing.assert_array_equal(got[0], wanted[0].astype(jnp.bfloat16))
  np.testing.assert_array_equal(got[1], wanted[1])


def test_bits_depend_on_the_order_of_summation():
  """Negative control: the tests of bits would detect another order of summation."""
  x, kernel = factors(515, 769, 1)
  reversed_got = native.product(x[:, ::-1], kernel[:, ::-1])
  assert np.any(np.asarray(reversed_got) != np.asarray(native.product(x, kernel)))


def test_native_calls_are_counted_in_a_compiled_program():
  """`osd compile` reports them as foreign calls; XLA's own products are none."""
  if not native.load():
    pytest.skip("no C++ compiler here")

  def foreign(product):
    made = jax.jit(product).lower(*factors(64, 64, 1)).compile()
    return hlo.HloProgram(made.as_text()).foreign_calls

  assert foreign(native.product) == 1
  assert foreign(lambda x, kernel: x @ kernel.T) == 0


@pytest.mark.parametrize("columns", [1, 4, 8])
def test_threads_do_not_change_bits(library, columns):
  """A product that several threads compute equals its parts from a single thread."""
  x, kernel = factors(2049, 256, columns)  # 2 MiB, large enough for several threads
  whole = np.asarray(library.product(x, kernel))
  stored = layers.quantized(kernel.T)
  whole8 = np.asarray(library.int8_product(x, stored["kernel"], stored["scale"]))
  for begin in range(0, 2049, 100):
    part = slice(begin, begin + 100)
    np.testing.assert_array_equal(library.product(x, kernel[part]), whole[:, part])
    got = library.int8_product(x, stored["kernel"][part], stored["scale"][part])
    np.testing.assert_array_equal(got, whole8[:, part])


def rounded_product(x, kernel, scale):
  """Computes the int8 product in numpy."""
  x, scale = np.asarray(x), np.asarray(scale)
  step = np.max(np.abs(x), axis=-1, keepdims=True) / np.float32(127)
  step = np.where(step == 0, np.float32(1), step)
  whole = np.rint(x / step).astype(np.int64) @ np.asarray(kernel, np.int64).T
  return whole.astype(np.float32) * step * scale


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_product_equals_numpy(library, shape):
  x, kernel = factors(*shape, native.MOST_COLUMNS)
  stored = layers.quantized(kernel.T)
  # Columns of very different sizes need separate scales.
  x[0], x[-1] = 1e6 * x[0], 1e-6 * x[-1]
  expected = rounded_product(x, **stored)
  for count in COLUMNS:
    for some in (slice(count), slice(-count, None)):
      got = library.int8_product(x[some], stored["kernel"], stored["scale"])
      np.testing.assert_array_equal(got, expected[some])
  with native.off():  # XLA multiplies by the two scales in another order
    other = layers.int8_matmul(x, stored["kernel"], stored["scale"])
  np.testing.assert_allclose(other, expected, rtol=5e-7)


def test_int8_product_handles_edge_cases(library):
  """Values between two integers, both ends of the range, zeros and NaN."""
  x = np.zeros((4, 256), np.float32)
  x[0] = np.linspace(-127, 127, 256)
  x[1, :100] = np.arange(100) / 2
  x[1, 100] = 127
  x[3, 7] = np.nan
  kernel = jnp.asarray(np.random.default_rng(0).integers(-127, 128, (9, 256)), jnp.int8)
  scale = jnp.ones(9, jnp.float32)
  got = np.asarray(library.int8_product(x, kernel, scale))
  np.testing.assert_array_equal(got[:3], rounded_product(x[:3], kernel, scale))
  assert not np.any(got[2]) and np.all(np.isnan(got[3]))
  with native.off():
    assert np.all(np.isnan(layers.int8_matmul(x, kernel, scale)[3]))


def lowered(columns, dtype=jnp.float32, kernel=None) -> str:
  kernel = jax.ShapeDtypeStruct((16, 8), kernel or dtype)
  x = jax.ShapeDtypeStruct((columns, 8), dtype)
  return jax.jit(layers.served_matmul).lower(x, kernel).as_text()


def test_native_products_are_used_only_for_few_float32_columns():
  for columns in (1, native.MOST_COLUMNS):
    assert native.TARGETS["ProductFloat32"] in lowered(columns)
  assert "custom_call" not in lowered(native.MOST_COLUMNS + 1)
  assert "custom_call" not in lowered(1, jnp.bfloat16)
  assert native.TARGETS["ProductBFloat16"] in lowered(1, kernel=jnp.bfloat16)
  with native.off():
    assert "custom_call" not in lowered(1)
  assert native.TARGETS["ProductFloat32"] in lowered(1)


def test_training_is_differentiable_with_few_columns():
  """Native products have no gradient, so training must not use them for a tied head."""
  config = shapes.T5Config(
    vocab_size=32, width=8, num_heads=2, head_dim=4, mlp_dim=8,
    num_encoder_layers=1, num_decoder_layers=1,
  )  # fmt: skip
  model = families.build(config)
  params = jax.jit(model.init)(jax.random.key(0))
  token = jnp.ones((1, 2), jnp.int32)
  loss = lambda params: jnp.mean(model.score(params, token, token == 1, token) ** 2)
  gradient = jax.jit(jax.grad(loss))(params)
  assert np.any(gradient["token_embedder"]["embedding"])

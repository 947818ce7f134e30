"""T5s equal those of t5x; its checkpoints are read exactly, unsafe content is refused.

`t5x_oracle.npz` contains a tiny T5 1.1 that t5x initialized, a batch and t5x's logits.
`t5x_param_axes.json` contains the shape and logical axes of every parameter.
../shared/fixtures/t5x contains one tiny model that t5x wrote in its native format and
with orbax. The tests write further checkpoints in the same formats.
"""

import json
import os
import pathlib
import pickle
import shutil

import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from osd_jax.models import families, shapes
from osd_tools import t5x

FIXTURES = pathlib.Path(__file__).parents[1] / "models/fixtures"
CONFIG = shapes.T5Config(
  vocab_size=64,
  width=16,
  num_heads=2,
  head_dim=8,
  mlp_dim=32,
  num_encoder_layers=2,
  num_decoder_layers=2,
  mlp_activations=("gelu", "linear"),
  tied_head=False,
)


@pytest.fixture(scope="module")
def oracle():
  with np.load(FIXTURES / "t5x_oracle.npz") as file:
    return dict(file)


@pytest.fixture(scope="module")
def params(oracle):
  return {k.removeprefix("p/"): x for k, x in oracle.items() if k.startswith("p/")}


def test_tree_and_shapes_equal_t5x(params):
  ours = jax.eval_shape(families.build(CONFIG).init, jax.random.key(0))
  ours = flax.traverse_util.flatten_dict(ours, sep="/")
  assert jax.tree.map(np.shape, ours) == jax.tree.map(np.shape, params)


def test_logical_axes_equal_t5x():
  axes = flax.traverse_util.flatten_dict(families.build(CONFIG).logical_axes(), sep="/")
  expected = json.loads((FIXTURES / "t5x_param_axes.json").read_text())
  assert {name: list(spec) for name, spec in axes.items()} == {
    name: names for name, (_, names) in expected.items()
  }


def run(oracle, params):
  """Returns our logits for t5x's decoder inputs."""
  model = families.build(CONFIG)
  source = jnp.asarray(oracle["in/encoder_input_tokens"])
  tokens = jnp.asarray(oracle["in/decoder_input_tokens"])
  params = flax.traverse_util.unflatten_dict(params, sep="/")
  served = model.prepare(jax.tree.map(jnp.asarray, params))
  cache = jax.jit(model.prefill, static_argnums=3)(
    served, source, source != 0, tokens.shape[1]
  )
  return np.asarray(jax.jit(model.decode)(served, tokens, cache)[0])


def test_logits_equal_t5x(oracle, params):
  assert np.any(oracle["in/encoder_input_tokens"] == 0)  # includes padding
  judged = oracle["in/decoder_target_tokens"] != 0
  assert judged.sum() > judged.size / 2
  logits = run(oracle, params)
  np.testing.assert_allclose(logits[judged], oracle["logits"][judged], atol=1e-5)


TABLE = "decoder/relpos_bias/rel_embedding"


def test_shifted_relative_bias_changes_the_logits(oracle, params):
  """Negative control: a shift of the bias is detected, though its values are small."""
  moved = {**params, TABLE: np.roll(params[TABLE], 1, axis=1)}
  judged = oracle["in/decoder_target_tokens"] != 0
  error = np.abs(run(oracle, moved) - oracle["logits"])[judged]
  assert np.max(error) > 1e-4


# ---- Checkpoints written by t5x


@pytest.fixture(scope="module", params=["native", "orbax"])
def checkpoint(request, repository):
  folder = repository.parent / "shared" / "fixtures" / "t5x" / request.param
  if not folder.is_dir():
    pytest.skip("t5x's own checkpoints absent: no ../shared/fixtures/t5x")
  return folder / "checkpoint_7"


def flat(weights):
  return flax.traverse_util.flatten_dict(weights.params, sep="/")


def assert_same(found, expected):
  assert found.keys() == expected.keys()
  for name, array in expected.items():
    assert found[name].dtype == np.float32
    np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_parameters_are_read_exactly(checkpoint, params):
  found = t5x.read(checkpoint, CONFIG)
  assert_same(flat(found), params)
  assert (found.config, found.vocabulary) == (CONFIG, "")


# ---- Checkpoints written by the tests


def describe(name, **changes):
  """Returns t5x's description of the zarr folder of a parameter."""
  spec = {
    "driver": "zarr",
    "dtype": "float32",
    "kvstore": {"driver": "file", "path": f"target.{name.replace('/', '.')}/"},
    "metadata": {"compressor": {"id": "gzip", "level": 1}},
  }
  return {**spec, **changes}


def write_zarr(folder, array, **zarr):
  spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/"}}
  store = tensorstore.open(
    {**spec, **zarr}, create=True, shape=array.shape, dtype=array.dtype
  ).result()
  store.write(array).result()


def write_leaves(folder, leaves):
  target = flax.traverse_util.unflatten_dict(leaves, sep="/")
  tree = {"version": 3, "optimizer": {"target": target, "state": {"step": 7}}}
  (folder / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))


def write_native(folder, params, changes=None):
  """Writes a native checkpoint: matrices in zarr folders, vectors inside the file.

  Args:
    folder: is created.
    params: maps parameter paths to arrays.
    changes: maps parameter paths to leaves that replace those of t5x in the file.
  """
  folder.mkdir(parents=True)
  leaves = {}
  for name, array in params.items():
    if array.ndim == 1:
      leaves[name] = array
    else:
      leaves[name] = describe(name)
      write_zarr(folder / f"target.{name.replace('/', '.')}", array)
  write_leaves(folder, {**leaves, **(changes or {})})
  return folder


KERNEL = "encoder/layers_1/mlp/wo/kernel"
SCALE = "decoder/decoder_norm/scale"


@pytest.fixture
def made(tmp_path, params):
  return write_native(tmp_path / "outer" / "checkpoint_1", params)


def test_checkpoint_written_by_the_tests_is_read_exactly(made, params):
  """Positive control for the refusals below."""
  assert_same(flat(t5x.read(made, CONFIG)), params)


@pytest.mark.parametrize("driver", ["gfile", "gcs"])
def test_t5x_driver_names_for_local_stores_are_accepted(tmp_path, params, driver):
  store = {"driver": driver, "path": f"target.{KERNEL.replace('/', '.')}"}
  if driver == "gcs":
    store["bucket"] = "t5x-dummy-bucket"
  changes = {KERNEL: describe(KERNEL, kvstore=store)}
  folder = write_native(tmp_path / "c", params, changes)
  assert_same(flat(t5x.read(folder, CONFIG)), params)


def refusal(folder, config=CONFIG):
  """Returns the message of the error that reading the folder raises."""
  with pytest.raises(ValueError) as caught:
    t5x.read(folder, config)
  return str(caught.value)


@pytest.mark.parametrize("way", ["up", "absolute", "roundabout"])
def test_paths_that_leave_the_folder_are_refused(tmp_path, params, way):
  outside = tmp_path / "outer" / "elsewhere"
  write_zarr(outside, params[KERNEL])  # the other folder exists, with the right shape
  path = {
    "up": "../elsewhere/",
    "absolute": f"{outside}/",
    "roundabout": f"target.{KERNEL.replace('/', '.')}/../../elsewhere/",
  }[way]
  changes = {KERNEL: describe(KERNEL, kvstore={"driver": "file", "path": path})}
  folder = write_native(tmp_path / "outer" / "checkpoint_1", params, changes)
  found = refusal(folder)
  assert KERNEL in found and "Other folders are not opened" in found


@pytest.mark.parametrize("what", ["folder", "chunk"])
def test_links_that_leave_the_folder_are_refused(made, tmp_path, params, what):
  inside = made / f"target.{KERNEL.replace('/', '.')}"
  linked = inside if what == "folder" else inside / "0.0"
  shutil.move(linked, tmp_path / "moved")
  linked.symlink_to(tmp_path / "moved")
  assert "is a link to" in refusal(made)
  linked.unlink()  # links inside the checkpoint are allowed
  shutil.move(tmp_path / "moved", made / "moved")
  linked.symlink_to(made / "moved")
  assert_same(flat(t5x.read(made, CONFIG)), params)


@pytest.mark.parametrize(
  "change",
  [
    {"kvstore": {"driver": "gcs", "bucket": "someones", "path": "x/"}},
    {"kvstore": {"driver": "http", "base_url": "http://localhost", "path": "x/"}},
    {"kvstore": {"driver": "file", "path": "x/", "context": {}}},
    {"kvstore": "file:///etc/"},
    {"kvstore": {"driver": "file"}},
    {"driver": "n5"},
    {"driver": "json"},
    "PLACEHOLDER://x",
  ],
)
def test_other_drivers_are_refused(tmp_path, params, change):
  changes = {KERNEL: describe(KERNEL, **change) if isinstance(change, dict) else change}
  found = refusal(write_native(tmp_path / "c", params, changes))
  assert KERNEL in found and "zarr on local files" in found


class Trap:
  """Creates a folder when it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return os.mkdir, (str(self.path),)


def test_pickles_are_refused_without_running_their_code(made, tmp_path):
  trap = tmp_path / "sprung"
  for protocol in (2, 5):
    (made / "checkpoint").write_bytes(pickle.dumps(Trap(trap), protocol))
    assert "a pickle" in refusal(made)
  array = np.empty((), object)
  array[()] = Trap(trap)
  np.save(made / "checkpoint", array, allow_pickle=True)
  os.replace(made / "checkpoint.npy", made / "checkpoint")
  assert "expected flax's msgpack" in refusal(made)
  assert not trap.exists()
  pickle.loads(pickle.dumps(Trap(trap)))  # negative control: the trap works
  assert trap.exists()


def test_damaged_files_and_arrays_of_objects_are_named(made):
  folder = made / f"target.{KERNEL.replace('/', '.')}"
  (folder / "0.0").write_bytes(b"damaged")
  found = refusal(made)
  assert KERNEL in found and "Copy the checkpoint again" in found
  zarray = folder / ".zarray"
  assert '"<f4"' in zarray.read_text()
  zarray.write_text(zarray.read_text().replace('"<f4"', '"|O"'))
  found = refusal(made)
  assert KERNEL in found and "cannot be read" in found


def test_duplicate_parameters_are_refused(made, params):
  leaves = {name: np.asarray(array) for name, array in params.items()}
  target = flax.traverse_util.unflatten_dict(leaves, sep="/")
  target[KERNEL] = leaves[KERNEL]  # and also encoder -> layers_1 -> ...
  tree = {"optimizer": {"target": target}}
  (made / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
  assert f"parameter {KERNEL}: found two" in refusal(made)


def with_nan(params, name):
  changed = params[name].copy()
  changed.flat[3] = np.nan
  return {name: changed}


REFUSED = {
  "integers": (
    lambda params: {KERNEL: np.ones(params[KERNEL].shape, np.int32)},
    "found int32, expected floating-point",
  ),
  "NaN in a zarr folder": (
    lambda params: with_nan(params, KERNEL),
    f"tensor {KERNEL}: 1 of its",
  ),
  "NaN in the file": (
    lambda params: with_nan(params, SCALE),
    f"tensor {SCALE}: 1 of its",
  ),
  "unexpected": (
    lambda params: {"extra/kernel": params[KERNEL]},
    "extra/kernel: found (32, 16), expected nothing",
  ),
  "missing": (
    lambda params: {KERNEL: None},
    f"{KERNEL}: found nothing, expected (32, 16)",
  ),
  "shape": (
    lambda params: {SCALE: np.ones(17, np.float32)},
    f"{SCALE}: found (17,), expected (16,)",
  ),
  "stacked layers": (
    lambda params: {"encoder/encoder/mlp/wo/kernel": np.zeros((32, 2, 16), np.float32)},
    "scan_layers = False",
  ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_parameter_is_refused_by_name(tmp_path, params, change, message):
  changed = {**params, **change(params)}
  changed = {name: array for name, array in changed.items() if array is not None}
  assert message in refusal(write_native(tmp_path / "c", changed))


def test_checkpoint_of_another_shape_is_refused(checkpoint):
  assert "tensors do not fit the configuration" in refusal(
    checkpoint, shapes.T5Config()
  )


def test_folder_without_a_checkpoint_is_refused(tmp_path):
  assert "neither a file checkpoint nor a folder state" in refusal(tmp_path)
  (tmp_path / "state").mkdir()
  assert "found no parameters called target." in refusal(tmp_path)
  (tmp_path / "state" / "manifest.ocdbt").write_bytes(b"no manifest")
  assert "cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize("ocdbt", [True, False])
def test_orbax_folders_are_read_with_and_without_ocdbt(tmp_path, params, ocdbt):
  """orbax stores all arrays in one OCDBT store, or each array in its own folder."""
  state = tmp_path / "checkpoint_2" / "state"
  state.mkdir(parents=True)
  base = {"driver": "file", "path": f"{state}/"}
  for name, array in params.items():
    key = f"target.{name.replace('/', '.')}/"
    place = {"driver": "ocdbt", "base": base, "path": key} if ocdbt else None
    write_zarr(state / key, array, **({"kvstore": place} if place else {}))
  assert (state / "manifest.ocdbt").exists() == ocdbt
  found = t5x.read(state.parent, CONFIG)
  assert_same(flat(found), {n: np.asarray(x) for n, x in params.items()})
  assert jax.tree.all(jax.tree.map(np.all, jax.tree.map(np.isfinite, found.params)))

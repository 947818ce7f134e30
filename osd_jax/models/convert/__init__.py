"""Conversion of weights from and to Hugging Face's format, and from t5x's."""

from osd_jax.models.convert.folders import holds_model
from osd_jax.models.convert.hugging_face import (
  bfloat16_of_hugging_face,
  config_from_hugging_face,
  config_to_hugging_face,
  read_hugging_face,
  shape_of_hugging_face,
  write_hugging_face,
)
from osd_jax.models.convert.t5x import read_t5x

__all__ = [
  "bfloat16_of_hugging_face",
  "config_from_hugging_face",
  "config_to_hugging_face",
  "holds_model",
  "read_hugging_face",
  "read_t5x",
  "shape_of_hugging_face",
  "write_hugging_face",
]

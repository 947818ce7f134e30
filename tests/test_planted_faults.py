"""Every fault of `planted_faults.py` can be planted: its text stands once."""

import planted_faults
import pytest


@pytest.mark.parametrize("fault", planted_faults.FAULTS, ids=lambda fault: fault.name)
def test_the_text_of_a_fault_stands_once_in_the_package(fault):
  assert planted_faults.where(fault).startswith("osd_jax/")
  assert fault.right != fault.wrong


def test_a_text_that_is_gone_is_told():
  gone = planted_faults.Fault("gone", "no such text", "", "tests")
  with pytest.raises(ValueError, match="'gone': its text stands in"):
    planted_faults.where(gone)

"""Every fault of `planted_faults.py` can be planted: its text occurs once."""

import planted_faults
import pytest


@pytest.mark.parametrize("fault", planted_faults.FAULTS, ids=lambda fault: fault.name)
def test_text_of_a_fault_occurs_once_in_the_packages(fault):
  planted_faults.where(fault)  # raises otherwise
  assert fault.right != fault.wrong


def test_fault_with_an_unknown_text_is_an_error():
  gone = planted_faults.Fault("gone", "no such text", "", "tests")
  with pytest.raises(ValueError, match="'gone': its text is in"):
    planted_faults.where(gone)

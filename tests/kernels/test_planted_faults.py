"""Faults that earlier checks missed, and others of wrappers, are found; planted_faults.py has all of them."""

from __future__ import annotations

import pytest

from tests.kernels.planted_fault_checks import PlantedFault, found
from tests.kernels.planted_faults import FAULTS
from tests.support import needs_compiler, needs_nvrtc

QUICK = [fault for fault in FAULTS if fault.quick]


def test_faults_are_named_once_and_replace_something() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.right != fault.wrong for fault in FAULTS)


@needs_nvrtc
@pytest.mark.parametrize("fault", [f for f in QUICK if f.check == "golden PTX"], ids=lambda fault: fault.name)
def test_fault_in_wrapper_is_found_in_compiled_ptx(fault: PlantedFault) -> None:
    assert found(fault)


@needs_compiler
@pytest.mark.parametrize("fault", [f for f in QUICK if f.check != "golden PTX"], ids=lambda fault: fault.name)
def test_fault_in_kernel_is_found_by_watched_emulation(fault: PlantedFault) -> None:
    assert found(fault)

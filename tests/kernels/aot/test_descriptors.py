"""Tests descriptors.py, and requires that the kernels for unaligned rows have no misplaced matrix descriptor."""

import pytest

from tests.kernels.aot.descriptors import misplaced_in
from tests.kernels.aot.reports import compile_all
from tests.kernels.aot.support.limits import UNALIGNED, UNALIGNED_DECODE

# machine code of ptxas 12.8 from two kernels that gave wrong results on an H100
WRONG = """
        /*1a00*/                   ULEA UR7, UR4, UR7, 0x18 ;                  /* 0x00 */
        /*56d0*/                   UIADD3 UR4, UP0, UR7, 0x20, URZ ;           /* 0x00 */
        /*56e0*/                   UIADD3.X UR5, UR7, -0x3ffffff0, URZ, UP0, !UPT ;
        /*3810*/                   UIADD3.64 UR58, UR54, 0x40, URZ ;
        /*3b40*/                   UIADD3.X UR59, UR59, -0x7fffffe0, URZ, UP0, !UPT ;
"""
RIGHT = """
        /*3230*/                   UMOV UR6, URZ ;
        /*3250*/                   UIADD3.X UR11, UR6, -0x7fffffe0, URZ, UP0, !UPT ;
        /*3260*/                   UIADD3.X UR12, URZ, -0x7fffffe0, URZ, UP0, !UPT ;
        /*3270*/                   UIADD3.X UR12, UR7, 0x1234, URZ, UP0, !UPT ;
        /*57d0*/                   UIADD3.X UR25, UR5, URZ, URZ, UP0, !UPT ;
"""


def test_wrong_registers_are_found():
    assert misplaced_in(RIGHT) == []
    first, second = misplaced_in(WRONG + RIGHT)
    assert first.startswith("UIADD3.X UR5, UR7") and "ULEA UR7" in first
    assert second.startswith("UIADD3.X UR59, UR59") and "UIADD3.64 UR58" in second


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_for_unaligned_rows_have_no_misplaced_descriptor():
    reports = compile_all("tests.kernels.aot.portable", UNALIGNED)
    reports |= compile_all("tests.kernels.aot.decode", [UNALIGNED_DECODE])
    wrong = {case: report for case, report in reports.items() if report["misplaced_descriptors"]}
    assert not wrong

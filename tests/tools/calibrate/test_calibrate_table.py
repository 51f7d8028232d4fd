"""The table of `deepstack calibrate` on a narrow terminal."""

import pytest

from deepstack.cli.table import lay_out
from deepstack.tools.calibrate.calibrate_command import ANSWER, SHOWN


@pytest.mark.parametrize("width", (60, 80, 100, 140))
def test_the_table_of_calibrate_has_its_roles_and_exponents(width: int) -> None:
    names = ("step", "role", "exponent", "error", "low", "high", "curvature", "smallest", "largest")
    row = dict.fromkeys(names, 0.123456) | {"role": "norm_gain"}
    text = "\n".join(lay_out([row], width, ANSWER, SHOWN).lines)
    assert all(word in text for word in ("role", "norm_gain", "exponent", "low", "high"))

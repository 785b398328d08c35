import math

import pytest

from lossytp.study.checks import check_filled, check_not_negative


@pytest.mark.parametrize("values", [[], (), 5, None, "12", {}])
def test_what_is_no_filled_list_is_refused(values):
    with pytest.raises(ValueError, match=r"^rates = .* is no list of at least one value: give one$"):
        check_filled("rates", values)
    check_filled("rates", [0])


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "1", None, [1]])
def test_what_is_no_number_from_0_on_is_refused(value):
    with pytest.raises(ValueError, match=r"^wait = .* is not from 0 on: give a finite number of seconds$"):
        check_not_negative("wait", value, "seconds")
    check_not_negative("wait", 0, "seconds")

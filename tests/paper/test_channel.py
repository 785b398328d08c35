import numpy as np
import pytest

import lossytp as ltp
from paper.collectives import burst_table, measure


def test_burst_table_holds_shares_near_the_closed_form():
    process = ltp.GilbertElliott.from_loss_and_burst(loss_rate=0.05, mean_burst_packets=2)
    table = burst_table(process, num_packets=1_000_000, seed=0)
    assert table["measured"].sum() == pytest.approx(1, abs=1e-3)
    assert table["expected"].tolist()[:3] == pytest.approx([0.5, 0.25, 0.125])
    assert table["measured"].tolist()[:3] == pytest.approx([0.5, 0.25, 0.125], abs=0.02)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("process", "expected"),
    [
        (ltp.Bernoulli(loss_rate=0.0), [np.nan] * 3),
        (ltp.GilbertElliott(p_good_to_bad=0.0, p_bad_to_good=0.5), [np.nan] * 3),
        (ltp.Bernoulli(loss_rate=1e-12), [1, 1e-12, 1e-24]),
    ],
)
def test_without_losses_no_share_is_measured_nor_expected_where_there_can_be_none(process, expected):
    table = burst_table(process, num_packets=1000, seed=0, longest=3)
    assert table["measured"].isna().tolist() == [True] * 3
    assert table["expected"].tolist() == pytest.approx(expected, nan_ok=True, rel=1e-3)


@pytest.mark.parametrize("burst", [2, 8])
def test_measured_agrees_with_the_closed_form(burst):
    process = ltp.GilbertElliott.from_loss_and_burst(loss_rate=0.05, mean_burst_packets=burst)
    table = measure(process, num_packets=1_000_000, seed=1)
    assert ((table["measured"] - table["expected"]).abs() < 4 * table["standard_error"]).all()
    assert (table["standard_error"] > 0).all()


def test_another_process_is_found_out():
    class Mistaken(ltp.GilbertElliott):
        @property
        def mean_burst_packets(self):
            return 8.0

    table = measure(Mistaken(p_good_to_bad=0.03, p_bad_to_good=0.1428), num_packets=1_000_000, seed=1)
    burst = table.set_index("quantity").loc["mean burst, packets"]
    assert abs(burst["measured"] - burst["expected"]) > 6 * burst["standard_error"]  # 7.0 against 8


def test_too_few_packets_for_a_lag_are_refused():
    with pytest.raises(ValueError, match=r"num_packets = 1099 is below 1100"):
        measure(ltp.Bernoulli(loss_rate=0.1), num_packets=1099, seed=0)

"""What is lost together: the signs of bursts, and the records of every network."""

import numpy as np
import pytest

from paper.lost_together import NETWORKS, LostTogetherConfig, Squares, correlation, measure, table
from paper.models import Measurement


def config_of(folder, **values):
    text = folder / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 60)
    small = {"blocks": 2, "block_size": 32, "min_draws": 2, "max_draws": 2, "probes": 1, "tensor_parallel_size": 2}
    return LostTogetherConfig(text=str(text), output_dir=str(folder / "records"), **{**small, **values})


def test_signs_of_a_burst_are_as_correlated_as_its_losses(tmp_path):
    config = config_of(tmp_path, loss_type="g-e", mean_burst_packets=4.0, mtu_bytes=60)
    assert correlation(config) == pytest.approx(1 - 1 / 4 - 1 / 4 / 99)
    measurement = Measurement(config)
    terms = Squares(measurement, config, measurement.messages[0], {}, 1)
    terms.correlation, terms.signs, terms.step = correlation(config), True, 1.0
    signs = []

    def keep(message, site):
        before = message.rows_LN.clone()
        hop = message.hops[0]
        message.rows_LN.fill_(1.0)
        Squares._scale_(terms, message, site)
        scaled = message.rows_LN[hop.positions[0], hop.start : hop.stop]  # 1 + s: 0 or 2
        signs.append((scaled[:: message.capacity] - 1).numpy())
        message.rows_LN.copy_(before)

    terms.network.see = keep
    measurement.score(terms.model, terms.ids_BT)
    signs = np.concatenate(signs)
    assert set(signs) == {-1.0, 1.0}
    covariance = [(signs[:-lag] * signs[lag:]).mean() for lag in (1, 2)]
    assert covariance == pytest.approx([correlation(config) ** lag for lag in (1, 2)], abs=0.06)


def test_a_packet_of_a_ring_carries_the_partial_sum_of_the_ranks_before_it(tmp_path):
    config = config_of(tmp_path, tensor_parallel_size=4, algorithms="ring")
    measurement, expected = Measurement(config), 0.0
    terms = Squares(measurement, config, measurement.messages[0], {}, 1)

    def see(message, site):
        nonlocal expected
        for chunk, parts_RC in enumerate(message.rows_LN.double().chunk(4, dim=1)):
            for ranks in range(1, 4):  # from the owner's neighbour on
                passed = [(chunk + 1 + rank) % 4 for rank in range(ranks)]
                expected += float(parts_RC[passed].sum(0).square().sum())
        terms._scale_(message, site)

    terms.network.see = see
    terms.scaled_B(0.0)
    assert terms.squares == pytest.approx(expected, rel=1e-4)


def test_each_network_has_a_record_and_two_ranks_make_a_ring_a_direct_exchange(tmp_path):
    config = config_of(tmp_path)
    found = measure(config)
    assert list(found) == list(NETWORKS)
    again = measure(config)
    assert again == found
    with pytest.raises(ValueError, match=r"algorithms = 'ring' is the network's: leave it out"):
        measure(config.replace(algorithms="ring"))
    rows = table(found)
    assert rows.loc["216 bytes", "squared error"] == pytest.approx(1, abs=0.02), "packets of any size carry the same"
    assert rows.loc["ring", "squared error"] == pytest.approx(1, abs=0.02)

"""What `12_collectives` measures and draws."""

import numpy as np
import pytest

import lossytp as ltp
from lossytp.network import transport
from lossytp.study.collective_figures import completion_tails, error_maps, errors_of_sums, lost_pieces
from lossytp.study.collectives import completion_times, errors_by_rank, squared_errors, who_lacks_what

NOTHING, SOME = ltp.Bernoulli(loss_rate=0.0), ltp.Bernoulli(loss_rate=0.2)
OWN = {"reliable_gather": False}


def test_who_lacks_what_is_whole_packets_of_the_routes() -> None:
    lacks = who_lacks_what("ring", ltp.Bernoulli(loss_rate=1.0), ranks=3, num_elements=3 * 364, seed=0)
    # every hop loses: of a chunk only its owner's part reaches the sum, and nobody else gets it
    assert (lacks["reduce"][:, ::364] == ~np.eye(3, dtype=bool)).all()
    assert (lacks["gather"] == lacks["reduce"]).all()
    assert not any(lost.any() for lost in who_lacks_what("tree", NOTHING, ranks=4, num_elements=999, seed=0).values())


def test_errors_of_each_rank_are_where_it_lacks_something() -> None:
    settings = {"ranks": 4, "coherence": 0.5, "num_packets": 40, "seed": 3}
    assert not errors_by_rank(NOTHING, OWN, **settings).any()
    errors = errors_by_rank(SOME, OWN, **settings)
    assert errors.shape == (4, 40)
    assert not (errors == errors[0]).all()
    shared = errors_by_rank(SOME, {"repair": "retransmit(3)"}, **settings)
    assert (shared == shared[0]).all()
    assert shared.sum() < errors.sum() / 5


def test_measured_errors_are_those_expected_and_nothing_without_losses() -> None:
    ways = [{"algorithm": "ring"}, {"repair": "rescale", **OWN}]
    settings = {"ranks": 4, "coherence": 0.5, "num_elements": 40 * 364, "num_messages": 30, "seed": 1}
    table = squared_errors(SOME, ways, **settings)
    assert (abs(table["measured"] - table["expected"]) < 4 * table["standard_error"]).all()
    assert table["reliable_gather"].tolist() == [True, False]
    other = squared_errors(ltp.Bernoulli(loss_rate=0.1), ways, **settings)
    assert (abs(other["measured"] - table["expected"]) > 4 * other["standard_error"]).all(), "the control"
    assert squared_errors(NOTHING, ways[:1], **settings)["measured"].tolist() == pytest.approx([0], abs=1e-12)


def test_the_tables_can_be_drawn() -> None:
    times = completion_times(
        ["ring", "switch"],
        {"best effort": transport.BestEffort(deadline_s=1.0)},
        {"Bernoulli": SOME},
        path=transport.Path(bandwidth_bits_per_s=10e9, round_trip_s=1e-5),
        ranks=4,
        num_elements=10_000,
        samples=400,
        seed=0,
    )
    assert times["algorithm"].tolist() == ["ring", "switch"]
    assert times["missing_share"].to_numpy() == pytest.approx(0.2, abs=0.02)
    assert (times["p50_s"] <= times["p999_s"]).all()
    settings = {"ranks": 2, "coherence": 0.0, "num_elements": 3640, "num_messages": 3, "seed": 0}
    errors = squared_errors(SOME, [{}, {"algorithm": "tree"}], **settings)
    lacks = {name: who_lacks_what(name, SOME, ranks=2, num_elements=3640, seed=0) for name in ("ring", "sender")}
    maps = {("ring", "zero"): np.eye(4), ("sender", "stale"): np.ones((4, 4))}
    panels = [
        len(f.axes) for f in (completion_tails(times), errors_of_sums(errors), lost_pieces(lacks), error_maps(maps))
    ]
    assert panels == [1, 1, 4, 5]

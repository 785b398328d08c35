"""What a lossy network counts and reports."""

import itertools

from lossytp.network import Bernoulli, LossyNetwork, Site, Wire
from lossytp.network.repairs import repair_named
from lossytp.network.routes import DIRECT as direct
from lossytp.network.routes import SENDER as sender
from tests.network.lossy_traffic import BERNOULLI, EVERYTHING, RANKS, drawn


def test_counters_and_report_say_what_was_drawn():
    network = LossyNetwork(BERNOULLI)
    attention, mlp = Site(0, "attention", "forward"), Site(3, "mlp", "backward")
    lost = {"training": 0, "evaluation": 0}
    for size in (0, 10, 700):
        lost["training"] += len(drawn(network, 0, 1, size, site=attention))
        lost["training"] += len(drawn(network, 1, 0, size, site=mlp))
        lost["training"] += len(drawn(network, 1, 0, size, group="dp"))
        with network.evaluation(size):
            lost["evaluation"] += len(drawn(network, 0, 1, size, site=attention))
    report = network.report()
    for purpose, packets in (("training", 3 * 710), ("evaluation", 710)):
        rows = report[report["purpose"] == purpose]
        assert rows["packets"].sum() == network.counters.summary(purpose)["packets"] == packets
        assert rows["lost"].sum() == network.counters.summary(purpose)["lost"] == lost[purpose] > 0
    assert list(zip(report["layer"].fillna(-1), report["direction"].fillna("none"), strict=True)) == [
        (0, "forward"),
        (3, "backward"),
        (-1, "none"),
        (0, "forward"),
    ]
    assert (report["observed_loss_rate"] == report["lost"] / report["packets"]).all()
    assert 0.05 < report["lost"].sum() / report["packets"].sum() < 0.15


def test_a_collectives_packets_are_counted_on_every_link_it_uses():
    """4,000 floats over four ranks: chunks of 1,000, three packets of 364 each, on 12 links."""
    network = LossyNetwork(EVERYTHING)
    network.send(direct.reduce(4000, RANKS), 4, site=Site(1, "mlp", "forward"))
    summary = network.counters.summary("training")
    assert (summary["packets"], summary["lost"], summary["observed_loss_rate"]) == (36, 36, 1)
    assert set(summary["by_link"]) == {f"{src}->{dst}" for src, dst in itertools.permutations(RANKS, 2)}
    assert {link["packets"] for link in summary["by_link"].values()} == {3}
    assert set(summary["by_layer"]) == {"1"}


def test_a_report_of_nothing_is_an_empty_table():
    report = LossyNetwork(BERNOULLI).report()
    assert len(report) == 0
    places = {"purpose", "layer", "module", "direction", "operation", "phase", "group", "src", "dst"}
    assert places | {"packets", "lost", "extra", "missing", "observed_loss_rate"} == set(report)


def test_a_summary_counts_what_repairs_sent():
    network = LossyNetwork(Bernoulli(loss_rate=0.1), wire=Wire(mtu_bytes=900))
    network.send(sender.reduce(800 * 214, (0,)), 4, repair=repair_named("fec(10, 8)"))
    summary = network.summary("training")
    assert (summary["packets"], summary["extra"]) == (1000, 200)

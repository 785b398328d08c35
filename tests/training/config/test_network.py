import itertools

import pytest

from lossytp.network import Bernoulli, GilbertElliott
from lossytp.network.lossy_network import Wiring
from lossytp.network.routes import Wire
from lossytp.network.scope import Scope
from lossytp.training.config import TrainConfig

OWN = {"reliable_gather": False}


def test_wiring_and_network_are_what_was_asked_for():
    plain = TrainConfig()
    assert plain.wiring() == Wiring()
    assert (plain.network().scope, plain.network().wire, plain.network().seed) == (Scope(), Wire(), 1234)
    config = TrainConfig(**OWN, algorithm="tree", repair="hadamard(16)", wire_dtype="bf16")
    assert config.wiring() == Wiring.named(
        algorithm="tree", repair="hadamard(16)", reliable_gather=False, wire_dtype="bf16"
    )
    assert TrainConfig(sequence_parallel=True).wiring() == Wiring(sequence_parallel=True)
    assert TrainConfig(exact_adjoint=True).wiring() == Wiring(exact_adjoint=True)
    assert TrainConfig(control="noise").wiring() == Wiring(control="noise")
    assert TrainConfig(control="elements").wiring() == Wiring()
    assert TrainConfig(control="elements", mtu_bytes=900).network().wire == Wire(mtu_bytes=900, elements=1)
    assert TrainConfig(control="noise").network().wire == Wire()
    parts = {"lossy_direction": "forward", "lossy_module": "mlp", "lossy_layers": " 1 : 3 ", "lossy_phase": "gather"}
    scope = Scope(direction="forward", module="mlp", layers=(1, 3), phase="gather")
    assert TrainConfig(**OWN, **parts).network().scope == scope


def test_links_that_are_not_named_lose_nothing():
    network = TrainConfig(loss_rate=0.25, lossy_links="0>-1, 2 > -1,-1>3", algorithm="switch", **OWN).network()
    lossy = {link for link in itertools.product(range(-1, 4), repeat=2) if network.process(*link).loss_rate}
    assert lossy == {(0, -1), (2, -1), (-1, 3)}
    assert network.process(2, -1) == Bernoulli(loss_rate=0.25)
    assert TrainConfig(loss_rate=0.25).network().process(3, 2) == Bernoulli(loss_rate=0.25)


def test_processes():
    assert TrainConfig(loss_rate=0.1).process() == Bernoulli(loss_rate=0.1)
    bursty = TrainConfig(loss_type="g-e", loss_rate=0.1, mean_burst_packets=8.0).process()
    assert bursty == GilbertElliott.from_loss_and_burst(loss_rate=0.1, mean_burst_packets=8)
    assert TrainConfig(loss_type="g-e", ge_config="one").process().loss_rate == pytest.approx(0.05)

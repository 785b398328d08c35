"""Test where losses damage a model: rises by layer, module and position against models whose losses are there alone."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import lossytp as ltp
from lossytp.study.statistics import t_interval
from lossytp.training.groups import NetworkSettings
from paper.damage import by_position, by_site, losses_by_block
from tests.parallel.families import VOCABULARY, tiny

TOKENS = 24
SETTINGS = NetworkSettings(tensor_parallel_size=4, loss_rate=0.3, mtu_bytes=200)


@pytest.fixture(scope="module")
def dense():
    return tiny("llama").eval()


@pytest.fixture(scope="module")
def blocks():
    return torch.randint(VOCABULARY, (3, TOKENS), generator=torch.Generator().manual_seed(0))


def losses(model, blocks):
    with torch.no_grad():
        logits = model(input_ids=blocks).logits[:, :-1]
    return cross_entropy(logits.transpose(1, 2), blocks[:, 1:], reduction="none").numpy()


def test_a_token_has_the_loss_of_its_prediction(dense, blocks):
    assert losses_by_block(dense, blocks) == pytest.approx(losses(dense, blocks), abs=1e-5)


@pytest.mark.parametrize("phase", ["reduce", "both"])
def test_only_one_layers_module_loses_packets(dense, blocks, phase):
    settings = SETTINGS.replace(reliable_gather=phase == "reduce")
    table = by_site(dense, blocks, settings, draws=2)
    assert [tuple(row) for row in table[["layer", "module"]].to_numpy()] == [
        (0, "attention"),
        (0, "mlp"),
        (1, "attention"),
        (1, "mlp"),
    ]
    network = settings.replace(lossy_layers="1:2", lossy_module="attention").build()
    model = ltp.parallelize(dense, network, tensor_parallel_size=4, comm=settings.comm())
    rises = []
    for draw in (4, 5):  # the third row's own
        with network.evaluation(draw):
            rises.append((losses_by_block(model, blocks) - losses_by_block(dense, blocks)).mean())
    assert set(network.report()["layer"]) == {1}
    assert set(network.report()["module"]) == {"attention"}
    assert tuple(table.loc[2, ["rise", "low", "high"]]) == pytest.approx(t_interval(np.array(rises)))
    assert (table["rise"] != 0).all()


def test_layers_are_chosen_and_checked(dense, blocks):
    assert set(by_site(dense, blocks, SETTINGS, layers=[1], draws=1)["layer"]) == {1}
    with pytest.raises(ValueError, match="layers = 2 is above the model's last, 1: give fewer"):
        by_site(dense, blocks, SETTINGS, layers=[2])
    with pytest.raises(ValueError, match=r"layers = \[\] is not a list of at least one value"):
        by_site(dense, blocks, SETTINGS, layers=[])
    with pytest.raises(ValueError, match="draws = 0"):
        by_position(dense, blocks, SETTINGS, draws=0)


def test_bins_of_positions_are_powers_of_two_and_cover_the_block(dense, blocks):
    table = by_position(dense, blocks, SETTINGS, draws=2)
    assert table[["first", "last"]].to_numpy().tolist() == [[1, 1], [2, 3], [4, 7], [8, 15], [16, TOKENS - 1]]
    network = SETTINGS.build()
    model = ltp.parallelize(dense, network, tensor_parallel_size=4)
    clean, lossy = losses(dense, blocks), []
    for draw in range(2):
        with network.evaluation(draw):  # block by block, as messages are
            lossy.append(np.concatenate([losses(model, block[None]) for block in blocks]))
    for row in table.itertuples():
        rises = [np.mean((each - clean)[:, row.first - 1 : row.last]) for each in lossy]
        assert row.rise == pytest.approx(np.mean(rises), abs=1e-5)


@pytest.mark.parametrize("measure", [by_site, by_position])
def test_a_network_that_loses_in_backward_only_is_refused(dense, blocks, measure):
    with pytest.raises(ValueError, match="lossy_direction = 'backward' loses nothing in an evaluation: leave it out"):
        measure(dense, blocks, SETTINGS.replace(lossy_direction="backward"))


def test_without_losses_nothing_rises(dense, blocks):
    reliable = SETTINGS.replace(loss_rate=0.0)
    for table in (by_site(dense, blocks, reliable, draws=2), by_position(dense, blocks, reliable, draws=2)):
        assert np.abs(table[["rise", "low", "high"]].to_numpy()).max() < 1e-5

"""Check lossy collectives against routes, theory and sums computed part by part."""

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import lossytp as ltp
from paper import timing as transport
from paper.collectives import (
    coherence,
    completion_times,
    errors_by_rank,
    squared_errors,
    who_lacks_what,
)
from paper.timing import AllReduce

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


def test_completion_times_of_each_algorithm() -> None:
    times = completion_times(
        [AllReduce(algorithm=name, num_elements=10_000, ranks=4) for name in ("ring", "switch")],
        {"best effort": transport.BestEffort(deadline_s=1.0)},
        {"Bernoulli": SOME},
        path=transport.Path(bandwidth_bits_per_s=10e9, round_trip_s=1e-5),
        samples=400,
        seed=0,
    )
    assert times["algorithm"].tolist() == ["ring", "switch"]
    assert times["missing_share"].to_numpy() == pytest.approx(0.2, abs=0.02)
    assert (times["p50_s"] <= times["p999_s"]).all()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=50, n_positions=8)).eval()


@pytest.fixture
def batch():
    torch.manual_seed(1)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    return {"input_ids": torch.randint(50, (2, 6)), "attention_mask": mask}


def test_equal_contributions_are_coherent_and_opposite_ones_cancel(model, batch):
    with torch.no_grad():
        for block in model.transformer.h:
            for layer in (block.attn.c_proj, block.mlp.c_proj):
                layer.weight.copy_(layer.weight[: len(layer.weight) // 2].repeat(2, 1))

    def halves_alike(sign):
        hooks = [
            layer.register_forward_pre_hook(
                lambda _, args: (torch.cat([first := args[0].chunk(2, -1)[0], sign * first], -1),)
            )
            for block in model.transformer.h
            for layer in (block.attn.c_proj, block.mlp.c_proj)
        ]
        value = coherence(model, [batch], 2)
        for hook in hooks:
            hook.remove()
        return value

    assert halves_alike(1) == pytest.approx(1, abs=1e-5)
    assert halves_alike(-1) == pytest.approx(-1, abs=1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_coherence_is_the_mean_product_over_the_mean_square_of_real_tokens(model, batch, ranks):
    seen = []
    layers = [layer for block in model.transformer.h for layer in (block.attn.c_proj, block.mlp.c_proj)]
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append((module.weight.detach(), args[0].detach())))
    with torch.no_grad():
        model.transformer(**batch)
    each = []
    for weight, hidden in seen:
        rows = hidden[batch["attention_mask"].bool()]
        width = len(weight) // ranks
        parts = [rows[:, r * width : (r + 1) * width] @ weight[r * width : (r + 1) * width] for r in range(ranks)]
        products = [(parts[r] * parts[s]).mean() for r in range(ranks) for s in range(ranks) if r != s]
        each.append(torch.stack(products).mean() / torch.stack([(part**2).mean() for part in parts]).mean())
    assert coherence(model, [batch], ranks) == pytest.approx(float(torch.stack(each).mean()), rel=1e-4)


def test_one_rank_shares_no_sum(model, batch):
    with pytest.raises(ValueError, match="ranks = 1 is below 2"):
        coherence(model, [batch], 1)


@pytest.mark.parametrize("values", [{"ranks": "4"}, {"ranks": 0}, {"seed": None}, {"seed": -1}, {"num_elements": 0}])
def test_who_lacks_what_among_what_cannot_be_is_refused(values):
    ((name, value),) = values.items()
    given = {"ranks": 4, "num_elements": 10, "seed": 0, **values}
    with pytest.raises(ValueError, match=rf"^{name} = {value!r} is .*: give.* \d or more$"):
        who_lacks_what("direct", ltp.Bernoulli(loss_rate=0.1), **given)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"coherence": 2}, r"coherence = 2 is not in \[0, 1\]"),
        ({"num_messages": 0}, "num_messages = 0 is below 2: give 2 or more"),
        ({"num_messages": 1}, "num_messages = 1 is below 2: give 2 or more"),
    ],
)
def test_errors_of_what_cannot_be_are_refused(values, message):
    given = {"ranks": 2, "coherence": 0.5, "num_elements": 10, "num_messages": 3, "seed": 0, **values}
    with pytest.raises(ValueError, match=f"^{message}"):
        squared_errors(ltp.Bernoulli(loss_rate=0.1), [{}], **given)

"""Training over losses in both phases: the changes that arms make to a model, and what is seen of its tokens."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import lossytp as ltp
from lossytp.study.run import execute
from paper import both_phases
from paper.both_phases import ARMS, BASE, Arm, LossySum, TokensOfStep, change_, rises
from tests.parallel.conftest import bernoulli, tiny_batch, tiny_gpt2

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "44_both_phases.ipynb"
TINY = BASE | {"dataset": None, "block_size": 32, "batch_size": 4, "microbatch_size": 4, "eval_samples": 4}


def own_streams(loss_rate: float) -> Any:
    """A model whose four ranks have their own streams, in float64."""
    return ltp.parallelize(tiny_gpt2(), bernoulli(loss_rate), tensor_parallel_size=4, reliable_gather=False)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    batch = tiny_batch()
    logits = model(input_ids=batch["input_ids"]).rank_logits
    logits[..., 0].square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("direction", [None, "forward"])
@pytest.mark.parametrize("change", ["exact gradient", "gradients summed at g"])
def test_where_nothing_is_lost_plain_layers_learn_as_the_librarys(change, direction):
    model = own_streams(0.0)
    expected = gradients(model)
    changed = copy.deepcopy(model)
    config = both_phases.PretrainConfig.from_dict(TINY | {"reliable_gather": False, "lossy_direction": direction})
    change_(changed, Arm({}, change), config)
    found = gradients(changed)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_a_lossy_sum_loses_in_both_phases_but_never_what_a_rank_owns():
    parts = torch.arange(1.0, 49).view(4, 3, 4)
    assert torch.equal(LossySum(0.0, 2)(parts), parts.sum(0).expand_as(parts))
    alone = LossySum(1.0, 2)(parts).flatten(1)
    for rank in range(4):
        own = slice(3 * rank, 3 * rank + 3)
        assert torch.equal(alone[rank, own], parts[rank].flatten()[own])
        assert alone[rank].count_nonzero() == 3
    shares = LossySum(0.1, 4).arrived(4, 400_000).double().mean(1)
    assert shares.tolist() == pytest.approx([1 - 0.1 * 3 / 4] * 4, abs=0.003)


def test_capped_gradients_leave_small_ones_as_they_are():
    x = torch.ones(5, 8, requires_grad=True)
    gradient = torch.ones(5, 8) * torch.tensor([[1.0], [1], [1], [2], [100]])
    both_phases._CapTokens.apply(x, 4.0).backward(gradient)
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == pytest.approx([1, 1, 1, 2, 4])


def test_the_control_masks_gradients_by_other_losses_and_leaves_the_forward_pass():
    model, changed = own_streams(0.5), own_streams(0.5)
    config = both_phases.PretrainConfig.from_dict(TINY | {"reliable_gather": False, "loss_rate": 0.5})
    change_(changed, Arm({}, "gradients masked at random", 0.5), config)
    batch = tiny_batch()
    assert torch.equal(model(**batch).logits, changed(**batch).logits)
    expected, found = gradients(model), gradients(changed)
    name = next(name for name in expected if name.endswith("mlp.c_proj.weight"))
    risk = 0.5 * 3 / 4  # a rank loses half of what others own
    assert found[name].norm() / expected[name].norm() == pytest.approx((1 - risk) ** 0.5, abs=0.1)
    by_arrival = ltp.parallelize(
        tiny_gpt2(), bernoulli(0.5), tensor_parallel_size=4, reliable_gather=False, masked_backward=True
    )
    assert not torch.allclose(found[name], gradients(by_arrival)[name])


FORWARD = {"epsilon": 0.1, "embeddings scaled": 11.3, "mean of streams": 1}
FORWARD |= dict.fromkeys(("inputs lose packets", "norms lose packets"))
BACKWARD = {"scale detached": None, "gradients of tokens capped": 0.01}


@pytest.mark.parametrize(("change", "value"), [*FORWARD.items(), *BACKWARD.items()])
def test_a_change_changes_outputs_and_gradients_or_gradients_alone(change, value):
    model, changed, batch = own_streams(0.5), own_streams(0.5), tiny_batch()
    config = both_phases.PretrainConfig.from_dict(TINY | {"reliable_gather": False, "loss_rate": 0.5})
    change_(changed, Arm({}, change, value), config)
    assert torch.allclose(model(**batch).logits, changed(**batch).logits) == (change in BACKWARD)
    expected, found = gradients(model), gradients(changed)
    assert not all(torch.allclose(found[name], expected[name]) for name in expected)


def test_a_token_that_lost_its_sums_is_seen_with_its_gradient():
    model = own_streams(1.0)
    tokens = TokensOfStep(model, 4)
    tokens.start()
    gradients(model)
    rows = tokens.numbers()
    assert len(rows) == len(model.transformer.h)
    assert all(row["least_norm"] <= row["median_norm"] and row["distance"] > 0 for row in rows)
    assert all(row["gradient_lost"] > 0 for row in rows)


@pytest.mark.slow
def test_every_change_trains_and_the_notebook_repeats_no_arm(tmp_path):
    names = list({arm.change: name for name, arm in ARMS.items()}.values())
    values = {"arms": names, "steps": 2, "settings": TINY, "results_dir": str(tmp_path)}
    execute(NOTEBOOK, tmp_path / "out.ipynb", values)
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "both_phases").iterdir()}
    assert len(files) == len(names)
    execute(NOTEBOOK, tmp_path / "out.ipynb", values)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "both_phases").iterdir()} == files


def test_weights_of_other_shapes_are_those_of_their_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (Path(both_phases.drawn_weights("olmo2", seed), "model.safetensors") for seed in (0, 1))
    drawn = first.read_bytes()
    assert drawn != second.read_bytes()
    first.unlink()  # as if a run had been killed before it wrote them
    assert Path(both_phases.drawn_weights("olmo2", 0), "model.safetensors").read_bytes() == drawn


def test_rises_are_paired_by_seed_and_shape_and_a_run_that_stopped_is_no_better_than_any():
    def record(arm, seed, clean, steps=2):
        step = {"loss": 1.0, "gradient_norm": 1.0, "layers": None}
        point = {} if clean is None else {"cross_entropy_clean": clean, "cross_entropy_lossy": clean}
        return {"arm": arm, "seed": seed, "steps": [step] * steps, "evaluation": point}

    runs = [record("no loss", 0, 6.0), record("no loss", 1, 5.0), record("llama, no loss", 0, 4.0)]
    runs += [record("ring", 0, 6.5), record("ring", 1, None), record("llama, both phases", 0, 4.25)]
    runs += [record("ring", 2, 6.5), record("forward", 0, 6.5, steps=300)]
    found = {(row.arm, row.seed): row.rise for row in rises(runs, steps=2).itertuples()}
    assert found == {("ring", 0): 0.5, ("ring", 1): float("inf"), ("llama, both phases", 0): 0.25}

"""Each claim of the paper holds in the committed results, and fails once they contradict it."""

import copy
import json
import re
from pathlib import Path

import pytest

from lossytp.study.claims import CLAIMS, check_claims

ROOT = Path(__file__).parents[2]
SOURCE = (ROOT / "paper" / "lossytp.typ").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def committed():
    return json.loads((ROOT / "results" / "paper" / "paper.json").read_text(encoding="utf-8"))


@pytest.fixture
def results(committed):
    return copy.deepcopy(committed)


def rows_of(rows, **wanted):
    found = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    assert found, wanted
    return found


def set_in(rows, values, **wanted):
    """Set values in the rows that have the wanted ones."""
    for row in rows_of(rows, **wanted):
        row.update(values)


SST2 = "sst2_held_out"  # each claim is of both tasks; changing one must suffice
CONTRADICT = {
    "small_losses_cost_nothing": lambda r: set_in(
        r["tolerance_contrasts"], {"low": -0.011}, task=SST2, loss_rate=0.001
    ),
    "both_phases_cost_more": lambda r: r["law_both_phases"].update({SST2: [0.9] * 9}),
    "one_law": lambda r: r["law"][SST2].update(r_squared=0.96),
    "law_misses_only_rings": lambda r: set_in(
        r["predictions"], {"measured": 1.0}, predictor="squared error", arm="tree, 4 ranks", loss_rate=0.07
    ),
    "law_predicts_the_real_model": lambda r: set_in(
        r["real_networks"], {"median": 3.0}, algorithm="ring", phase="reduce", loss_rate=0.1
    ),
    "training_is_not_shown_to_help": lambda r: set_in(r["real_training"], {"strongest": 20.0}, trained_over="zero"),
    "protection_must_cover_every_text": lambda r: r["real_training_gains"]["a hundredth"].update(high=0.01),
    "falls_exceed_predictions": lambda r: r.update(lossless_of_new_seeds=-0.001),
    "inference_predicts_new_networks": lambda r: r["shared_prediction_errors"].update({"inference rise": 0.05}),
    "bytes_lost_together_cost_more": lambda r: set_in(r["together"], {"high": 0.05}, task=SST2, bytes=4),
    "packet_size_matters": lambda r: set_in(r["packet_size"], {"low": -0.001}, task=SST2, mtu_bytes=1500),
    "longer_training_regains": lambda r: r["regained"][0]["gain"].update(value=0.02),
    "a_fall_remains": lambda r: set_in(
        r["lengths"], {"low": 0.009}, task="docstrings", network="10 %, both phases", max_steps=600
    ),
    "hadamard_helps_the_small_model": lambda r: set_in(
        r["comparisons"]["06_repair_again"], {"gain_p_holm": 0.06}, task=SST2, arm="hadamard(64)"
    ),
    "hadamard_does_not_help_the_real_model": lambda r: set_in(
        r["real_model"], {"median": 0.1}, repair="hadamard(64)", loss_rate=0.1
    ),
    "protection_ends_the_collapse": lambda r: set_in(
        r["real_model"], {"collapsed": 0.01}, repair="protect(0.01)", loss_rate=0.1
    ),
    "random_protection_is_not_enough": lambda r: set_in(
        r["real_model"], {"collapsed": 0.0}, repair="protect(0.01, 'random')", loss_rate=0.1
    ),
    "single_packets_destroy_blocks": lambda r: r["strongest_packet"].update(least_rise=2.9),
    "forward_losses_hurt": lambda r: set_in(
        r["comparisons"]["04_where"], {"p_holm": 0.04}, task=SST2, arm="backward only"
    ),
    "first_layer_costs_most": lambda r: set_in(
        r["comparisons"]["04_where"], {"difference": -0.05}, task="docstrings", arm="layers 2:3 only"
    ),
    "evaluation_alone_costs_less": lambda r: set_in(
        r["sensitivity"], {"mean_low": -0.07}, task="docstrings", trained_at=0.0, evaluated_at=0.3
    ),
    "shared_losses_cost_more": lambda r: set_in(
        r["comparisons"]["02_shared"], {"gain_high": 0.001}, task=SST2, arm="losses all shared"
    ),
    "stale_harms": lambda r: set_in(r["comparisons"]["06_repair"], {"gain_p_holm": 0.06}, task=SST2, arm="stale"),
    "pipelines_collapse": lambda r: set_in(
        r["comparisons"]["07_parallelisms"], {"high": -0.009}, task=SST2, arm="pp 2, zero", loss_rate=0.01
    ),
    "data_parallelism_bears_more": lambda r: set_in(
        r["parallelisms"], {"p_holm": 0.06}, task="docstrings", arm="ddp 2", repair="zero", loss_rate=0.1
    ),
    "training_with_loss_does_not_pay": lambda r: set_in(
        r["robustness"], {"difference": 0.02, "p_holm": 0.01}, task=SST2, trained_at=0.3, evaluated_at=0.3
    ),
    "sharded_data_parallelism_bears_less": lambda r: set_in(
        r["parallelisms"], {"p_holm": 0.06}, task=SST2, arm="fsdp 2", repair="zero", loss_rate=0.1
    ),
    "bias_before_the_sum_costs_more": lambda r: set_in(
        r["comparisons"]["07_implementations"], {"gain_p_holm": 0.06}, arm="dtensor"
    ),
    "rescaling_harms_both_phases": lambda r: set_in(
        r["comparisons"]["06_repair_of_both_phases"], {"gain_p_holm": 0.06}, task=SST2, arm="rescale"
    ),
    "scatter_in_sst2": lambda r: r["law"]["docstrings"].update(chi_squared=2.1),
    "retransmission_is_cheap": lambda r: set_in(
        r["price"], {"price": 2.1}, transport="selective repeat", loss_rate=0.1, bandwidth_gbits=1, round_trip_us=10
    ),
}


def test_every_claim_holds_in_the_committed_results(results):
    checked = check_claims(results)
    assert [name for name, claim in checked.items() if not claim["holds"]] == []
    assert checked == results["claims"], "paper.json is older than the claims: run ./run_all.sh figures"


def test_every_claim_stands_in_the_paper_and_every_sentence_has_its_claim():
    assert set(re.findall(r'#claim\("(\w+)"\)', SOURCE)) == set(CLAIMS)
    assert set(CONTRADICT) == set(CLAIMS)


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_fails_once_results_contradict_it(results, name):
    assert CLAIMS[name](results).holds
    CONTRADICT[name](results)
    assert not CLAIMS[name](results).holds


def test_a_claim_of_a_missing_arm_is_an_error_and_not_true(results):
    results["comparisons"]["06_repair_again"] = []
    with pytest.raises(ValueError, match="0 rows of docstrings are of arm 'hadamard"):
        check_claims(results)

"""Each claim of the paper holds in the committed results, and fails once they contradict it."""

import copy
import csv
import json
import re
from pathlib import Path

import pytest

from lossytp.study.analysis.real_training import UNTIL_IT_ARRIVES
from lossytp.study.claims import CLAIMS, check_claims
from lossytp.study.claims.claim import real_row
from tests.study.contradictions import CONTRADICT, PRETRAINED, rows_of

ROOT = Path(__file__).parents[2]
SOURCE = (ROOT / "paper" / "lossytp.typ").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def committed():
    return json.loads((ROOT / "results" / "paper" / "paper.json").read_text(encoding="utf-8"))


@pytest.fixture
def results(committed):
    return copy.deepcopy(committed)


def test_every_claim_holds_in_the_committed_results(results):
    checked = check_claims(results)
    assert [name for name, claim in checked.items() if not claim["holds"]] == []
    assert checked == results["claims"], "paper.json is older than the claims: run ./run_all.sh figures"


def test_every_claim_stands_in_the_paper_and_every_sentence_has_its_claim():
    assert set(re.findall(r'#claim\("(\w+)"\)', SOURCE)) == set(CLAIMS)
    assert set(CONTRADICT) == set(CLAIMS)


@pytest.mark.parametrize(("name", "number"), [(name, n) for name in CONTRADICT for n in range(len(CONTRADICT[name]))])
def test_a_claim_fails_once_results_contradict_it(results, name, number):
    assert CLAIMS[name](results).holds
    CONTRADICT[name][number](results)
    assert not CLAIMS[name](results).holds


def test_a_claim_of_a_missing_arm_is_an_error_and_not_true(results):
    results["comparisons"]["06_repair_again"] = []
    with pytest.raises(ValueError, match=r"the claim hadamard_\w+ cannot be checked .*0 rows have"):
        check_claims(results)


def test_the_readme_advises_with_the_papers_numbers(committed):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    again, retransmit = (
        next(line for line in readme.splitlines() if line.startswith(item))
        for item in ("4. **Where losses cost", "5. **Retransmit**")
    )
    zero, once, tenth, both = (
        real_row(committed, loss_rate=0.1, repair=repair)
        for repair in ("zero", "retransmit(1)", "protect(0.1) + hadamard(64)", "protect(0.1) + retransmit(1)")
    )
    assert f"lowers the rise from {zero['rise']:.1f} to {both['rise']:.2f} nats" in again
    assert f"`protect(0.1) + hadamard(64)` leaves {tenth['rise']:.2f} nats" in again
    waits = committed["real_training_round_trips"]
    mine, everything = (
        " and ".join(f"{waits[task][repair]:.1f}" for task in ("sst2", "qnli"))
        for repair in ("protect(0.1) + retransmit(1)", UNTIL_IT_ARRIVES)
    )
    assert f"{mine} round trips on average, against {everything} if everything is sent until it arrives" in again
    assert both["collapsed"] == 0
    assert once["rise"] == pytest.approx(both["rise"], abs=0.02), "alone it lowers the rise as much"
    claims, (arm, *_) = committed["claims"], rows_of(committed["pretraining"], arm=PRETRAINED, loss_rate=0.1)
    cheap = claims["retransmission_is_cheap"]["numbers"]["kilobytes in flight"]
    pays = claims["waiting_beats_more_tokens"]["numbers"]["up to"]
    price = claims["retransmission_is_cheap"]["numbers"]["largest price"]
    said = [
        f"[up to {price:.1f} times as long]",
        f"up to 10 % loss and {cheap:g} kB in flight",
        f"messages of {committed['message_bytes'] / 1e6:.1f} MB",
    ]
    said += [f"a third of {arm['tokens'] / 1e6:.0f} million tokens", f"waiting was faster up to {pays:g} kB in flight"]
    for words in said:
        assert words in retransmit


def test_what_the_paper_says_was_predicted_stands_in_the_grids():
    with (ROOT / "results" / "paper" / "predictions" / "fixed_beforehand.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 3
    for row in rows:
        assert f'"{row["quantity"]}"' in SOURCE, "each prediction is in the paper"
        grid = (ROOT / "notebooks" / "experiments" / f"{row['experiment']}.yaml").read_text(encoding="utf-8")
        comment = " ".join(line.removeprefix("#").strip() for line in grid.splitlines() if line.startswith("#"))
        interval = rf" (nats )?\({row['low']} to {row['high']}\)" if row["low"] else r"\b"
        predicted = rf"(?<![\d.]){row['value']}{interval}"
        assert re.search(predicted, comment), row


def test_small_packets_were_predicted_as_their_grid_says(committed):
    grid = (ROOT / "notebooks" / "experiments" / "01_tolerance_of_small_packets.yaml").read_text(encoding="utf-8")
    new = [row for row in committed["small_packets"] if not row["known"] and row["repair"] == "zero"]
    falls = [f"{100 * row['predicted']:.1f}" for row in new]
    assert f"falls of {', '.join(falls[:-1])} and {falls[-1]} points" in " ".join(grid.replace("#", "").split())

"""Each claim of the paper holds in the committed results, and fails once they contradict it."""

import copy
import csv
import json
import re
from functools import partial
from pathlib import Path

import pytest

from paper.build import check_claims
from paper.pretraining import GUESSED
from paper.study import CLAIMS, real_row
from tests.paper.contradictions import BOTH, CONTRADICT, PRETRAINED, rows_of

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


def test_numbers_of_the_front_page_and_of_the_advice_are_the_results(committed):
    advice = (ROOT / "docs" / "advice.md").read_text(encoding="utf-8")
    readme = " ".join(advice.split())
    items = dict.fromkeys("12345", readme)
    real, waits = partial(real_row, committed), committed["real_training_round_trips"]
    (low,) = rows_of(committed["comparisons"]["13_real_model_rates"], task="sst2", arm="zero, 1%")
    fall, least, most = (
        f"{-100 * low[name]:.1f}".replace("-", "\N{MINUS SIGN}") for name in ("difference", "high", "low")
    )
    assert f"loses {fall} points ({least} to {most}, three seeds)" in readme
    assert low["seeds"] == 3
    both_ways, few = (real(loss_rate=0.01, phase=phase, repair="zero") for phase in ("both", "reduce"))
    words = "{rise:.2f} nats ({low:.2f} to {high:.2f}). If only the way to the sum does, it".format(**both_ways)
    assert f"rises by {words} rises by {few['rise']:.2f}." in items["3"]
    assert "({rise:.2f} in SmolLM2, {low:.2f} to {high:.2f})".format(**few) in items["2"]
    added = committed["claims"]["rare_collapses_add_to_the_mean"]["numbers"]["added"]
    assert f"to about {few['rise'] + added:.2f}, above the limit" in readme
    assert f"We estimate that such losses add {added:.1f} nats on average" in readme
    assert f"We measured {few['blocks']} blocks with {few['draws']} draws of losses each" in readme
    repairs = ("protect(0.1) + retransmit(1)", "retransmit(1)")
    both, again = (real(loss_rate=0.1, repair=repair)["rise"] for repair in repairs)
    most_at_10 = "{rise:.1f} ({low:.1f} to {high:.1f})".format(**real(loss_rate=0.1, repair="zero"))
    assert f"lowers SmolLM2's rise from {most_at_10} to {both:.2f} nats" in items["4"]
    assert f"`retransmit(1)` alone lowers the rise to {again:.2f} nats" in readme
    ways = real(loss_rate=0.1, phase="both", repair=repairs[0])["rise"]
    assert f"no block collapsed either, but the rise is {ways:.2f} nats" in readme, (
        "a claim checks the rest of the sentence"
    )
    (kept,) = rows_of(committed["comparisons"]["13_real_model_advised"], arm=repairs[0])
    fall, least, most = (
        f"{-100 * kept[name]:.1f}".replace("-", "\N{MINUS SIGN}") for name in ("difference", "high", "low")
    )
    assert f"shows no fall on SST-2: {fall} points ({least} to {most}, five seeds)" in readme
    assert kept["seeds"] == 5
    assert "The first three seeds alone gave {1:.1f} to {2:.1f};".format(*committed["real_advised_first"]) in readme
    sst2, qnli = (f"{waits[task][repairs[0]]:.1f}" for task in ("sst2", "qnli"))
    assert f"waits {sst2} round trips on average in SST-2 and {qnli} in QNLI" in readme, "the claim checks the one less"
    assert f"messages of {committed['message_bytes'] / 1e6:.1f} MB" in readme
    for loss in (0.001, 0.01, 0.1):
        for transport, words in (("selective repeat", "alone"), ("go-back-N", "with all that follow")):
            (line,) = (each for each in advice.splitlines() if each.startswith(f"| {100 * loss:g} %, {words}"))
            prices = rows_of(committed["price"], loss_rate=loss, transport=transport, round_trip_us=100)
            measured = [row["price"] for row in prices if row["bandwidth_gbits"] in (10, 100)]
            assert [float(cell) for cell in line.split("|")[2:4]] == pytest.approx(measured, rel=0.005)
    share = committed["claims"]["losing_pays_at_low_rates"]["numbers"]["share, higher"]
    most = committed["claims"]["losing_pays_at_low_rates"]["numbers"]["share at most, higher"]
    assert f"at least {100 * share:.0f} % of a step ({100 * most:.0f} % by the upper end of the interval)" in readme
    (arm,) = rows_of(committed["pretraining"], arm=PRETRAINED, loss_rate=0.1)
    (least_arm,) = rows_of(committed["pretraining"], arm=PRETRAINED, loss_rate=0.01)
    (rarely,) = rows_of(committed["pretraining"], arm=f"{BOTH} of a sharded stream", loss_rate=0.01)
    (sharded,) = rows_of(committed["pretraining"], arm=f"{BOTH} of a sharded stream", loss_rate=0.1)
    wasted, low, high = (100 * (1 - 1 / least_arm[f"clean_times_tokens{end}"]) for end in ("", "_low", "_high"))
    for words in (
        "If both ways lose 3 or 10 %, pretraining fails at the learning rate that works without losses.",
        "At 1 % more than half of the tokens are wasted, and on average also at 10 % with `hadamard(64)`.",
        f"at 10 % on both ways it ends {sharded['clean']:.2f} nats above lossless training",
        f"At 1 % it ends {rarely['clean']:.2f} nats above (−{-rarely['clean_low']:.2f} to {rarely['clean_high']:.2f}).",
        f"a third of {arm['tokens'] / 1e6:.0f} million tokens",
        f"and {wasted:.0f} % of them ({low:.0f} to {high:.0f} %) at 1 %",
        f"Holm's correction p is {least_arm['clean_p_holm']:.2f}",
    ):
        assert words in readme, "the paper's claims check the third, the failure, and the half"

    front = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(front.encode()) <= 8000
    assert front.count("\n") <= 100
    rises = "{rise:.2f} nats a token ({low:.2f} to {high:.2f}) at 1 % loss on the way to a sum, about".format(**few)
    assert f"{rises} {few['rise'] + added:.2f} with rare collapses; {most_at_10} at 10 %" in front
    assert f"leaves {both:.2f} nats" in front
    interval = f"{low:.0f} to {high:.0f} %, p = {least_arm['clean_p_holm']:.2f}"
    assert f"{wasted:.0f} % of them ({interval}) at 1 % loss on the way to a sum, a third" in front
    assert f"{len(list((ROOT / 'results/paper/runs').iterdir())):,} runs" in front


def test_what_the_paper_says_was_predicted_stands_in_the_grids():
    with (ROOT / "results" / "paper" / "predictions" / "fixed_beforehand.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 3
    for row in rows:
        assert f'"{row["quantity"]}"' in SOURCE, "each prediction is in the paper"
        (file,) = (ROOT / "notebooks").glob(f"**/{row['experiment']}.*")  # a grid, or the notebook that measures
        lines = file.read_text(encoding="utf-8").splitlines()
        comments = [line for line in lines if line.startswith("#") or file.suffix == ".ipynb"]
        comment = " ".join(line.removeprefix("#").strip() for line in comments)
        interval = rf" (nats )?\({row['low']} to {row['high']}\)" if row["low"] else r"\b"
        predicted = rf"(?<![\d.]){row['value']}{interval}"
        assert re.search(predicted, comment), row


def test_small_packets_were_predicted_as_their_grid_says(committed):
    grid = (ROOT / "notebooks" / "experiments" / "01_tolerance_of_small_packets.yaml").read_text(encoding="utf-8")
    new = [row for row in committed["small_packets"] if not row["known"] and row["repair"] == "zero"]
    falls = [f"{100 * row['predicted']:.1f}" for row in new]
    assert f"falls of {', '.join(falls[:-1])} and {falls[-1]} points" in " ".join(grid.replace("#", "").split())


def test_a_claims_guesses_are_those_fixed_beforehand():
    with (ROOT / "results" / "paper" / "predictions" / "fixed_beforehand.csv").open(encoding="utf-8") as file:
        rows = {row["quantity"]: (float(row["low"]), float(row["high"])) for row in csv.DictReader(file) if row["low"]}
    assert {0.01: rows["nats, one per cent"], 0.03: rows["nats, three per cent"]} == GUESSED

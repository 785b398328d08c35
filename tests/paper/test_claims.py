"""Each claim of the paper holds in the committed results, and fails once they contradict it."""

import copy
import csv
import json
import re
from functools import partial
from pathlib import Path

import pytest
import yaml

from paper.build import check_claims
from paper.pretraining import GUESSED
from paper.study import CLAIMS, real_row, row_of, rows_of

ROOT = Path(__file__).parents[2]
SOURCE = (ROOT / "paper" / "lossytp.typ").read_text(encoding="utf-8")
CONTRADICT = yaml.safe_load((Path(__file__).parent / "contradictions.yaml").read_text(encoding="utf-8"))
CHANGES = [
    (name, part, where, change)
    for name, parts in CONTRADICT.items()
    for part, where, *changes in parts
    for change in changes
]


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


@pytest.mark.parametrize(("name", "part", "where", "change"), CHANGES)
def test_a_claim_fails_once_results_contradict_it(results, name, part, where, change):
    assert CLAIMS[name](results).holds
    contradict(results, part, where, change)
    assert not CLAIMS[name](results).holds


def contradict(results, part, where, change):
    """Make a change of `contradictions.yaml`."""
    for key in filter(None, part.split("/")):
        results = results[int(key) if isinstance(results, list) else key]
    matching = [results] if where is None else rows_of(results, **where)
    assert matching, where
    if change is None:
        results[:] = [row for row in results if row not in matching]
        return
    for row in matching:
        row.update({name: row[new[1:]] if str(new).startswith("=") else new for name, new in change.items()})


def test_a_claim_of_a_missing_arm_is_an_error_and_not_true(results):
    results["comparisons"]["06_repair_again"] = []
    with pytest.raises(ValueError, match=r"hadamard_\w+ cannot be checked .*0 rows have"):
        check_claims(results)


def test_numbers_of_the_readme_and_of_the_advice_are_the_results(committed):
    """Claims check the rest of their sentences."""
    readme, lines = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/advice.md"))
    advice = " ".join(lines.split())
    real, advised, compared = partial(real_row, committed), "protect(0.1) + retransmit(1)", committed["comparisons"]
    few, both_ways = (real(loss_rate=0.01, phase=phase, repair="zero") for phase in ("reduce", "both"))
    repaired, again = (real(loss_rate=0.1, repair=repair)["rise"] for repair in (advised, "retransmit(1)"))
    at_10 = "{rise:.1f} ({low:.1f} to {high:.1f})".format(**real(loss_rate=0.1, repair="zero"))
    claimed = {name: claim["numbers"] for name, claim in committed["claims"].items()}
    added, share = claimed["rare_collapses_add_to_the_mean"]["added"], claimed["losing_pays_at_low_rates"]
    falls = {
        name: "{} points ({} to {}".format(*(f"{-100 * row[end]:.1f}".replace("-", "−") for end in ends))
        for name, row in (
            ("zero", row_of(compared["13_real_model_rates"], task="sst2", arm="zero, 1%")),
            ("advised", row_of(compared["13_real_model_advised"], arm=advised)),
        )
        for ends in [("difference", "high", "low")]
    }
    arm = partial(row_of, committed["pretraining"])
    at_1 = arm(arm="losses on the way to a sum", loss_rate=0.01)
    sharded = {rate: arm(arm="losses on both ways of a sharded stream", loss_rate=rate) for rate in (0.01, 0.1)}
    wasted, low, high = (100 * (1 - 1 / at_1[f"clean_times_tokens{end}"]) for end in ("", "_low", "_high"))
    waits = (f"{committed['real_training_round_trips'][task][advised]:.1f}" for task in ("sst2", "qnli"))
    for page, words in (
        (advice, f"loses {falls['zero']}, three seeds"),
        (advice, f"shows no fall on SST-2: {falls['advised']}, five seeds"),
        (advice, "rises by {rise:.2f} nats ({low:.2f} to {high:.2f})".format(**both_ways)),
        (advice, "({rise:.2f} in SmolLM2, {low:.2f} to {high:.2f})".format(**few)),
        (advice, f"to about {few['rise'] + added:.2f}, above the limit"),
        (advice, f"add {added:.1f} nats on average"),
        (advice, f"{few['blocks']} blocks with {few['draws']} draws of losses"),
        (advice, f"from {at_10} to {repaired:.2f} nats"),
        (advice, f"`retransmit(1)` alone lowers the rise to {again:.2f} nats"),
        (advice, f"but the rise is {real(loss_rate=0.1, phase='both', repair=advised)['rise']:.2f} nats"),
        (advice, "alone gave {1:.1f} to {2:.1f};".format(*committed["real_advised_first"])),
        (advice, "waits {} round trips on average in SST-2 and {} in QNLI".format(*waits)),
        (advice, f"messages of {committed['message_bytes'] / 1e6:.1f} MB"),
        (advice, f"{100 * share['share, higher']:.0f} % of a step ({100 * share['share at most, higher']:.0f} %"),
        (advice, f"at 10 % on both ways it ends {sharded[0.1]['clean']:.2f} nats above"),
        (advice, f"it ends {sharded[0.01]['clean']:.2f} nats above (−{-sharded[0.01]['clean_low']:.2f} to "),
        (advice, f"a third of {at_1['tokens'] / 1e6:.0f} million tokens"),
        (advice, f"{wasted:.0f} % of them ({low:.0f} to {high:.0f} %) at 1 %"),
        (advice, f"p is {at_1['clean_p_holm']:.2f}"),
        (readme, "{rise:.2f} nats a token ({low:.2f} to {high:.2f}) at 1 % loss".format(**few)),
        (readme, f"about {few['rise'] + added:.2f} with rare collapses; {at_10} at 10 %"),
        (readme, f"leaves {repaired:.2f} nats"),
        (readme, f"{wasted:.0f} % of them ({low:.0f} to {high:.0f} %, p = {at_1['clean_p_holm']:.2f}) at 1 % loss"),
        (readme, f"{len(list((ROOT / 'results/paper/runs').iterdir())):,} runs"),
    ):
        assert words in page
    for loss in (0.001, 0.01, 0.1):
        for transport, words in (("selective repeat", "alone"), ("go-back-N", "with all that follow")):
            (line,) = (each for each in lines.splitlines() if each.startswith(f"| {100 * loss:g} %, {words}"))
            price = partial(row_of, committed["price"], loss_rate=loss, transport=transport, round_trip_us=100)
            measured = [price(bandwidth_gbits=bandwidth)["price"] for bandwidth in (10, 100)]
            assert [float(cell) for cell in line.split("|")[2:4]] == pytest.approx(measured, rel=0.005)
    assert len(readme.encode()) <= 8000


def test_what_the_paper_says_was_predicted_stands_in_the_grids(committed):
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
        assert re.search(rf"(?<![\d.]){row['value']}{interval}", comment), row
    ends = {row["quantity"]: (float(row["low"]), float(row["high"])) for row in rows if row["low"]}
    assert {0.01: ends["nats, one per cent"], 0.03: ends["nats, three per cent"]} == GUESSED
    grid = (ROOT / "notebooks" / "experiments" / "01_tolerance_of_small_packets.yaml").read_text(encoding="utf-8")
    new = [row for row in committed["small_packets"] if not row["known"] and row["repair"] == "zero"]
    falls = [f"{100 * row['predicted']:.1f}" for row in new]
    assert f"falls of {', '.join(falls[:-1])} and {falls[-1]} points" in " ".join(grid.replace("#", "").split())

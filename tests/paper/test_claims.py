"""Each claim of the paper holds in the committed answers, and fails once they contradict it."""

import copy
import csv
import json
import re
from functools import partial
from importlib import import_module
from math import ceil
from pathlib import Path

import pytest
import yaml

from paper.pretraining import GUESSED
from paper.real_model import real_row
from paper.study import CLAIMS, check_claims, row_of, rows_of

ROOT = Path(__file__).parents[2]
ANSWERS = sorted((ROOT / "results" / "paper" / "answers").glob("*.json"))
QUESTIONS = [file.stem for file in ANSWERS if file.stem != "runs"]
for question in QUESTIONS:
    import_module(f"paper.{question}")  # registers its claims
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
    """Return the answers by question."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in ANSWERS}


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_claim_holds_in_the_committed_answers(committed, question):
    checked = check_claims(question, committed[question])
    assert [name for name, claim in checked.items() if not claim["holds"]] == []
    assert checked == committed[question]["claims"], "the answer is older than its claims: run ./run_all.sh figures"


def test_every_claim_stands_in_the_paper_and_every_sentence_has_its_claim():
    assert set(re.findall(r'#claim\("(\w+)"\)', SOURCE)) == set(CLAIMS)
    assert set(CONTRADICT) == set(CLAIMS)


@pytest.mark.parametrize(("name", "part", "where", "change"), CHANGES)
def test_a_claim_fails_once_results_contradict_it(committed, name, part, where, change):
    results = copy.deepcopy(committed[CLAIMS[name].__module__.removeprefix("paper.")])
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


def test_speed_ratios_of_the_readme_are_the_measured_ones():
    def ratio(line: str) -> str:
        record = json.loads((ROOT / "results" / "bench" / f"{line}.json").read_text(encoding="utf-8"))
        return f"{record['ratios']['TP 4, 1 %']['ratio']:.2f}"

    readme, models = (ROOT / "README.md").read_text(encoding="utf-8"), ("step_gpt2_7m", "step_gpt2_124m")
    assert {ratio(line) for line in models} == {"1.03"}
    llama = ratio("step_llama_15m")
    assert f"takes 1.03 times a dense step's time in GPT-2 (7 M and 124 M), and {llama} times" in readme


def test_numbers_of_the_readme_and_of_the_advice_are_the_results(committed):
    """Claims check the rest of their sentences."""
    readme, lines = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/advice.md"))
    advice = " ".join(lines.split())
    real, advised = partial(real_row, committed["real_model"]), "protect(0.1) + retransmit(1)"
    twice = "retransmit(2)"
    at_10 = "{rise:.1f} ({low:.1f} to {high:.1f})".format(**real(loss_rate=0.1, repair="zero"))
    both_ways = real(loss_rate=0.01, phase="both", repair="zero")
    models = {row["model"]: row for row in committed["models"]["models"]}
    slopes = {
        name: "{:.3f} ({:.3f} to {:.3f})".format(*(row[end] / 100 for end in ("slope", "low", "high")))
        for name, row in models.items()
    }
    claimed = {name: claim["numbers"] for each in QUESTIONS for name, claim in committed[each]["claims"].items()}
    share, ends = claimed["losing_pays_at_low_rates"], claimed["reliable_ends_remove_a_part"]
    arm, critical = partial(row_of, committed["pretraining"]["pretraining"]), models["smollm2-135m"]
    at_1 = arm(arm="losses on the way to a sum", loss_rate=0.01)
    sharded = arm(arm="losses on both ways of a sharded stream", loss_rate=0.1)
    wasted, low, high = (100 * (1 - 1 / at_1[f"clean_times_tokens{end}"]) for end in ("", "_low", "_high"))
    rarely = f"{claimed['pretraining_fails_over_both_phases']['one per cent']:.1f} nats"
    both_at_1 = "{clean:.1f} ({clean_low:.1f} to {clean_high:.1f})".format(
        **arm(arm="losses on both ways", loss_rate=0.01)
    )
    fall = max(-row["low"] for row in committed["tolerance"]["tolerance_contrasts"] if row["loss_rate"] == 0.01)
    trains, fails = claimed["a_masked_backward_pass_trains"], claimed["training_over_both_phases_fails"]
    repairs = (committed["models"]["repairs"][name] for name in ("smollm2-135m", "gemma3-270m"))
    smollm2, gemma = ({row["repair"]: row["rise"]["value"] for row in rows} for rows in repairs)
    rings = rows_of(committed["lost_together"]["lost_together"], network="ring")
    ring = {row["model"]: row["measured"] for row in rings}
    slowly = claimed["what_the_mask_leaves_falls_slowly"]
    first = slopes["smollm2-135m"].replace(" (", " nats a token (")
    for page, words in (
        (advice, f"costs SmolLM2 {first}, Gemma 3 270M {slopes['gemma3-270m']}"),
        (advice, f"Qwen2.5-Coder 0.5B {slopes['qwen2.5-coder-0.5b']}"),
        (advice, f"{slopes['gpt2-nano']} and {slopes['gpt2-micro']}"),
        (advice, f"has {critical['critical']:.2f} in a sequence, of {critical['damage']:.1f} nats each"),
        (advice, f"up to {100 * claimed['one_real_model_has_critical_packets']['excluded']:.0f} % of sequences"),
        (advice, f"At 1 % loss SmolLM2's add {critical['critical'] * critical['damage'] / 100:.2f} nats on average"),
        (advice, f"{claimed['rare_collapses_add_to_the_mean']['added']:.1f} with one long text in a message"),
        (advice, f"costs our GPT-2s {ring['gpt2-nano']:.1f} and {ring['gpt2-micro']:.1f} times as much"),
        (advice, f"at 1 % from {100 * share['share, low']:.0f} % ({100 * share['share at most, low']:.0f} %)"),
        (advice, f"from {at_10} to {real(loss_rate=0.1, repair=advised)['rise']:.2f} nats"),
        (advice, f"in both phases {real(loss_rate=0.1, phase='both', repair=advised)['rise']:.2f} nats remain"),
        (advice, f"lowers SmolLM2's rise from {smollm2['zero']:.2f} to {smollm2[twice]:.3f} nats"),
        (advice, f"and Gemma's from {gemma['zero']:.2f} to {gemma[twice]:.3f}."),
        (advice, f"leaves {smollm2[advised]:.3f} and {gemma[advised]:.3f}"),
        (advice, f"leave {100 * ends['smollm2']:.0f} % of SmolLM2's rise and {100 * ends['gemma']:.0f} % of Gemma's"),
        (advice, f"raises Gemma's rise by {100 * (gemma['hadamard(64)'] / gemma['zero'] - 1):.0f} %"),
        (advice, "rises by {rise:.2f} nats ({low:.2f} to {high:.2f})".format(**both_ways)),
        (advice, f"at 10 % it ends {sharded['clean']:.2f} nats above"),
        (advice, f"stands {trains['rise']:.2f} nats above lossless training, without it {fails['rise']:.2f}"),
        (advice, f"three runs with the mask are {claimed['the_mask_trains_to_the_end']['rise']:.2f} nats above"),
        (advice, f"at 3 % three are {slowly['rise']:.2f} above, and at 1 % {slowly['rise at a tenth']:.2f}."),
        (advice, f"messages of {committed['price']['message_bytes'] / 1e6:.1f} MB"),
        (advice, f"{100 * share['share, higher']:.0f} % of a step ({100 * share['share at most, higher']:.0f} %"),
        (advice, f"a third of {at_1['tokens'] / 1e6:.0f} million tokens"),
        (advice, f"{wasted:.0f} % of them ({low:.0f} to {high:.0f} %) at 1 %"),
        (advice, f"p is {at_1['clean_p_holm']:.2f}"),
        (advice, f"our small GPT-2 ends {rarely} above lossless training at 1 %"),
        (readme, f"With 1 % on both ways, pretraining ends {both_at_1} nats higher"),
        (readme, f"SmolLM2 pays {critical['critical'] * critical['damage'] / 100:.2f} more"),
        (readme, f"fine-tuning our small GPT-2 at 1 % costs under {ceil(1000 * fall) / 10:.1f} points"),
        (readme, f"costs SmolLM2-135M {first}"),
        (readme, f"Gemma 3 270M {slopes['gemma3-270m']}, Qwen2.5-Coder-0.5B {slopes['qwen2.5-coder-0.5b']}, "),
        (readme, f"our GPT-2 of 7 M {models['gpt2-micro']['slope'] / 100:.3f}"),
        (readme, f"of them ({low:.0f} to {high:.0f} %; p = {at_1['clean_p_holm']:.2f} after correction) at 1 % loss"),
        (readme, f"{len(list((ROOT / 'results/paper/runs').iterdir())):,} runs"),
    ):
        assert words in page
    for loss in (0.001, 0.01, 0.1):
        for transport, words in (("selective repeat", "alone"), ("go-back-N", "with all that follow")):
            (line,) = (each for each in lines.splitlines() if each.startswith(f"| {100 * loss:g} %, {words}"))
            price = partial(row_of, committed["price"]["price"], loss_rate=loss, transport=transport, round_trip_us=100)
            measured = [price(bandwidth_gbits=bandwidth)["price"] for bandwidth in (10, 100)]
            assert [float(cell) for cell in line.split("|")[2:4]] == pytest.approx(measured, rel=0.005)
    assert len(readme.encode()) <= 8000


def test_what_was_predicted_stands_in_the_grids():
    with (ROOT / "results" / "paper" / "predictions" / "fixed_beforehand.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 3
    for row in (row for row in rows if row["experiment"] != "17_real_model"):  # a notebook of an earlier commit
        (file,) = (ROOT / "notebooks").glob(f"**/{row['experiment']}.*")  # a grid, or the notebook that measures
        lines = file.read_text(encoding="utf-8").splitlines()
        comments = [line for line in lines if line.startswith("#") or file.suffix == ".ipynb"]
        comment = " ".join(line.removeprefix("#").strip() for line in comments)
        interval = rf" (nats )?\({row['low']} to {row['high']}\)" if row["low"] else r"\b"
        assert re.search(rf"(?<![\d.]){row['value']}{interval}", comment), row
    ends = {row["quantity"]: (float(row["low"]), float(row["high"])) for row in rows if row["low"]}
    assert {0.01: ends["nats, one per cent"], 0.03: ends["nats, three per cent"]} == GUESSED

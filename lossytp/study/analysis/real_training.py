"""Say what training under loss changes in a real model, from the table of `lossytp.tolerance.after_training`."""

from typing import Any

import pandas as pd

from lossytp.study.statistics import t_interval

LOSSLESS, NOTHING, BEST = "no loss", "zero", "protect(0.1) + hadamard(64)"
FEW = "protect(0.01) + hadamard(64)"
CONTRASTS = {  # both models and repairs of a difference in accuracy: trained over, evaluated with
    "training under loss": ((NOTHING, NOTHING), (LOSSLESS, NOTHING)),
    "a tenth": ((LOSSLESS, BEST), (LOSSLESS, NOTHING)),
    "a hundredth": ((LOSSLESS, FEW), (LOSSLESS, NOTHING)),
    "a tenth, not a hundredth": ((LOSSLESS, BEST), (LOSSLESS, FEW)),
}


def outcomes(table: pd.DataFrame) -> pd.DataFrame:
    """Return the fall of each model with each repair, against the model that was trained and run without losses.

    Args:
        table: a row a model and repair: `seed`, `trained_at`, `trained_with`, `evaluated_with`, `accuracy`, `clean`
            and `strongest`.

    Returns:
        Columns `trained_over` ("no loss", or the repair of a training under loss), `evaluated_with`, `seeds`, `fall` as
        a share with its 95 % interval, Student's over seeds, as `low` and `high`, `clean_fall`, the mean fall without
        losses, and `strongest`, the mean ratio of the strongest packet to the median one.
    """
    runs = _named(table)
    lossless = runs[runs["trained_over"] == LOSSLESS].drop_duplicates("seed").set_index("seed")["clean"]
    rows = []
    for (trained_over, evaluated_with), ours in runs.groupby(["trained_over", "evaluated_with"], sort=False):
        paired = ours[ours["seed"].isin(lossless.index)].set_index("seed")
        fall = t_interval((lossless - paired["accuracy"]).dropna().to_numpy())
        rows.append(
            {"trained_over": trained_over, "evaluated_with": evaluated_with, "seeds": len(paired)}
            | {"fall": fall.value, "low": fall.low, "high": fall.high}
            | {"clean_fall": float((lossless - paired["clean"]).mean()), "strongest": float(ours["strongest"].mean())}
        )
    return pd.DataFrame(rows)


def contrasts(table: pd.DataFrame) -> dict[str, Any]:
    """Return the gains in accuracy of `CONTRASTS`, paired by seed, each with its 95 % interval and number of seeds."""
    runs = _named(table).set_index(["trained_over", "evaluated_with", "seed"])["accuracy"]
    found = {}
    for name, (better, worse) in CONTRASTS.items():
        gains = (runs.loc[better] - runs.loc[worse]).dropna()
        found[name] = {"seeds": len(gains), **t_interval(gains.to_numpy()).as_json()}
    return found


def _named(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(trained_over=table["trained_with"].where(table["trained_at"] > 0, LOSSLESS))

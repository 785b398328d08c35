"""An experiment's arms against one of them, paired by seed."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from lossytp.network.checks import check_known
from lossytp.study.statistics import holm, t_interval


def contrasts(
    table: pd.DataFrame, *, reference: str, outcome: str = "accuracy_lossy", within: Sequence[str] = ("task",)
) -> pd.DataFrame:
    """Each arm's mean outcome, and its difference from the reference arm of the same task and seed.

    Args:
        table: from `records.read_experiment`: a row a run, with `task`, `arm`, `loss_rate`, `seed` and the outcome.
        reference: the arm that others are compared with; of one loss rate.
        within: columns of which runs must share the values to be compared.

    Returns one row for each task (or what else `within` names), arm and loss rate, the reference without a difference:
    `task`, `arm`, `loss_rate`, `seeds` (pairs), `mean`, `mean_low`, `mean_high`, `difference`, `low`, `high` (Student's
    95 % interval over the pairs), `p` (Student's paired test) and `p_holm`, corrected over all rows. Differences of a
    single pair have no p.
    """
    check_known("reference", reference, sorted(table["arm"].unique()))
    rows = []
    for shared, runs in table.groupby(list(within), sort=False):
        base = runs[runs["arm"] == reference].set_index("seed")[outcome]
        if not base.index.is_unique:
            raise ValueError(f"reference = {reference!r} has several loss rates: name an arm of one")
        for (arm, rate), ours in runs.groupby(["arm", "loss_rate"], sort=False):
            own = t_interval(ours[outcome].to_numpy())
            row = dict(zip(within, shared, strict=True)) | {"arm": arm, "loss_rate": rate, "seeds": len(ours)}
            row |= {"mean": own.value, "mean_low": own.low, "mean_high": own.high}
            if arm != reference:
                pairs = (ours.set_index("seed")[outcome] - base).dropna().to_numpy()
                between = t_interval(pairs)
                row |= {"seeds": len(pairs), "difference": between.value, "low": between.low, "high": between.high}
                row["p"] = _p_value(pairs)
            rows.append(row)
    result = pd.DataFrame(rows)
    if "p" in result:
        tested = result["p"].notna()
        result.loc[tested, "p_holm"] = holm(result.loc[tested, "p"].to_numpy())
    return result


def _p_value(pairs: np.ndarray) -> float:
    """Of no difference on average; pairs that do not vary are certain of theirs."""
    if len(pairs) < 2:
        return float("nan")
    if np.ptp(pairs) == 0:
        return 1.0 if pairs[0] == 0 else 0.0
    return float(stats.ttest_1samp(pairs, 0.0).pvalue)

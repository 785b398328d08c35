"""An experiment's arms against one of them, paired by seed."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from lossytp.network.checks import check_known
from lossytp.study.statistics import holm, t_interval

LOSSLESS = "no loss"  # the arm whose runs lose nothing, in every grid
TRAINING = ("task", "model_name", "max_steps", "learning_rate")
MARGIN = 0.03  # of accuracy above the most frequent class's, at which a task counts as learnt


def contrasts(
    table: pd.DataFrame, *, reference: str, outcome: str = "accuracy_lossy", within: Sequence[str] = TRAINING
) -> pd.DataFrame:
    """Each arm's mean outcome, and its difference from the reference arm's of the same training and seed.

    Args:
        table: from `records.read_experiment`: a row a run, with `arm`, `loss_rate`, `seed` and the outcome.
        reference: the arm that others are compared with, of one loss rate in each training; arms of a training that it
            does not have stay without a difference.
        within: the columns that make runs of one training: only such are compared.

    Returns one row for each training, arm and loss rate, the reference without a difference: what `within` names,
    `arm`, `loss_rate`, `seeds` (pairs), `mean`, `mean_low`, `mean_high`, `difference`, `low`, `high` (Student's 95 %
    interval over the pairs), `p` (Student's paired test) and `p_holm`, corrected over all rows. Differences of a single
    pair have no p.
    """
    check_known("reference", reference, sorted(table["arm"].unique()))
    rows = []
    for training, runs in table.groupby(list(within), sort=False):
        base = runs[runs["arm"] == reference].set_index("seed")[outcome]
        if not base.index.is_unique:
            raise ValueError(f"reference = {reference!r} has several loss rates: name an arm of one")
        for (arm, rate), ours in runs.groupby(["arm", "loss_rate"], sort=False):
            if ours["seed"].duplicated().any():
                raise ValueError(f"arm {arm!r} has a seed twice at rate {rate:g}: name what they differ in by `within`")
            own = t_interval(ours[outcome].to_numpy())
            row = dict(zip(within, training, strict=True)) | {"arm": arm, "loss_rate": rate, "seeds": len(ours)}
            row |= {"mean": own.value, "mean_low": own.low, "mean_high": own.high}
            pairs = (ours.set_index("seed")[outcome] - base).dropna().to_numpy()
            if arm != reference and len(pairs):
                between = t_interval(pairs)
                row |= {"seeds": len(pairs), "difference": between.value, "low": between.low, "high": between.high}
                row["p"] = paired_p(pairs)
            rows.append(row)
    result = pd.DataFrame(rows)
    if "p" in result:
        tested = result["p"].notna()
        result.loc[tested, "p_holm"] = holm(result.loc[tested, "p"].to_numpy())
    return result


def unlearnt(table: pd.DataFrame, *, margin: float = MARGIN) -> pd.DataFrame:
    """The trainings that do not learn their task: what is not learnt without losses is no evidence of what losses do.

    One row each, of the columns `TRAINING`. Not learnt is a task whose mean accuracy without losses is at most `margin`
    above the most frequent class's share; of trainings without a lossless run nothing is known yet.
    """
    if table.empty:
        return pd.DataFrame(columns=list(TRAINING))
    learnt = _learnt(table)
    return learnt[learnt <= margin].index.to_frame(index=False)


def falls_and_gains(table: pd.DataFrame, *, reference: str | None) -> pd.DataFrame:
    """`contrasts` with the arm without losses, and, if there is a `reference`, with that arm.

    The columns of `contrasts`, `difference`, `low`, `high`, `p` and `p_holm`, are of accuracy evaluated with losses. As
    many each are of other outcomes, such as `clean`, `clean_low`, `clean_high`, `clean_p` and `clean_p_holm`:

    - `clean`: accuracy evaluated without losses, which tells what training with them did alone.
    - `share`: of what is learnt beyond the most frequent class without losses, on average; without p-values.
    - `rise`: cross-entropy in nats, evaluated with losses; an arm of which a run's is not finite has none.
    - `gain`: how much less accuracy an arm loses than the reference does, in any training of the task.
    """
    where = [*TRAINING, "arm", "loss_rate"]
    entropy = table["cross_entropy_lossy"].astype(float).replace([np.inf, -np.inf], np.nan)
    entropy = entropy.where(entropy.notna().groupby([table[name] for name in where]).transform("all"))
    found = contrasts(table, reference=LOSSLESS)
    for name, outcome in (("clean", table["accuracy_clean"]), ("rise", entropy)):
        others = contrasts(table.assign(outcome=outcome), reference=LOSSLESS, outcome="outcome")
        found = beside(found, others, where, name)
    learnt = found.join(_learnt(table), on=list(TRAINING))["learnt"]
    for share, difference in {"share": "difference", "share_low": "low", "share_high": "high"}.items():
        found[share] = found[difference] / learnt
    if reference is None:
        return found
    gains = contrasts(changes(table), reference=reference, outcome="change", within=("task",))
    return beside(found, gains, ["task", "arm", "loss_rate"], "gain")


def changes(table: pd.DataFrame, *, within: Sequence[str] = TRAINING, outcome: str = "accuracy_lossy") -> pd.DataFrame:
    """The runs with losses, and their `change` of the outcome against the same training's and seed's run without."""
    key = [*within, "seed"]
    without = table[table["arm"] == LOSSLESS].set_index(key)[outcome].rename("without")
    lossy = table[table["arm"] != LOSSLESS].join(without, on=key)
    return lossy.assign(change=lossy[outcome] - lossy["without"])


def _learnt(table: pd.DataFrame) -> pd.Series:
    """By training, the mean accuracy without losses beyond the most frequent class's share."""
    runs = table[table["arm"] == LOSSLESS]
    beyond = (runs["accuracy_lossy"] - runs["majority_share"]).rename("learnt")
    return beyond.groupby([runs[name] for name in TRAINING]).mean()


def beside(table: pd.DataFrame, compared: pd.DataFrame, where: list[str], name: str) -> pd.DataFrame:
    """The table with the columns of `compared` that are of differences, by a name that says of what."""
    names = {"difference": name} | {each: f"{name}_{each}" for each in ("low", "high", "p", "p_holm")}
    return table.merge(compared.reindex(columns=[*where, *names]).rename(columns=names), on=where, how="left")


def paired_p(pairs: np.ndarray) -> float:
    """p-value of (S,) differences being 0 on average (Student).

    NaN for a single pair, and for equal ones that are not 0: accuracies are counts, whose ties tell no variance.
    """
    if len(pairs) < 2 or (np.ptp(pairs) == 0 and pairs[0] != 0):
        return float("nan")
    if np.ptp(pairs) == 0:
        return 1.0
    return float(stats.ttest_1samp(pairs, 0.0).pvalue)

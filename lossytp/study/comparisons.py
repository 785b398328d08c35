"""Compare an experiment's arms, paired by seed."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from lossytp.network.checks import check_known
from lossytp.study.records import LOSSLESS, TRAINING
from lossytp.study.statistics import holm, t_interval

MARGIN = 0.03  # of accuracy: a training learns its task if it beats the most frequent class by more


def compare_arms(
    table: pd.DataFrame, *, reference: str, outcome: str = "accuracy_lossy", within: Sequence[str] = TRAINING
) -> pd.DataFrame:
    """Compute each arm's mean outcome and its difference from the reference arm, paired by seed.

    Args:
        table: one row per run: `arm`, `loss_rate`, `seed` and the outcome, as `records.read_experiment` returns it.
        reference: the arm to compare with. It has one loss rate in each training. Arms of a training without it get no
            difference.
        outcome: the column to compare.
        within: columns that runs must share to be compared.

    Returns:
        One row for each training, arm and loss rate: the columns of `within`, `arm`, `loss_rate`, `seeds` (pairs),
        `mean`, `mean_low`, `mean_high`, `difference`, `low`, `high` (Student's 95 % interval over the pairs), `p`
        (Student's paired test) and `p_holm` (corrected over all rows). The reference has no difference, a single pair
        has no p.

    Raises:
        ValueError: if the reference is unknown or has several loss rates, or an arm has two runs of a seed.
    """
    check_known("reference", reference, sorted(table["arm"].unique()))
    rows = []
    for training, runs in table.groupby(list(within), sort=False):
        base = runs[runs["arm"] == reference].set_index("seed")[outcome]
        if not base.index.is_unique:
            raise ValueError(f"reference = {reference!r} has several loss rates: name an arm with one")
        for (arm, rate), ours in runs.groupby(["arm", "loss_rate"], sort=False):
            if ours["seed"].duplicated().any():
                raise ValueError(f"arm {arm!r} has a seed twice at rate {rate:g}: add what differs to `within`")
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
    return with_holm(result) if "p" in result else result


def with_holm(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with `p_holm`, their column `p` corrected over all rows that have one."""
    tested = rows["p"].dropna()
    return rows.assign(p_holm=pd.Series(holm(tested.to_numpy()), tested.index))


def paired_p(pairs: np.ndarray) -> float:
    """Return the p-value of Student's test that (S,) differences are 0 on average.

    It is NaN for a single pair, and for equal differences other than 0: ties of counts show no variance.
    """
    if len(pairs) < 2 or (np.ptp(pairs) == 0 and pairs[0] != 0):
        return float("nan")
    if np.ptp(pairs) == 0:
        return 1.0
    return float(stats.ttest_1samp(pairs, 0.0).pvalue)


def unlearned_trainings(table: pd.DataFrame) -> pd.DataFrame:
    """Return the trainings that do not learn their task even without losses: they show nothing about losses.

    Such a training's mean lossless accuracy is at most `MARGIN` above the most frequent class's share. A training
    without a lossless run may still learn, and is not listed.

    Args:
        table: from `records.read_experiment`.

    Returns:
        One row per training, with the columns `TRAINING`.
    """
    if table.empty:
        return pd.DataFrame(columns=list(TRAINING))
    learned = _learned_accuracy(table)
    return learned[learned <= MARGIN].index.to_frame(index=False)


def _learned_accuracy(table: pd.DataFrame) -> pd.Series:
    """Return each training's mean lossless accuracy beyond the most frequent class's share."""
    runs = table[table["arm"] == LOSSLESS]
    beyond = (runs["accuracy_lossy"] - runs["majority_share"]).rename("learned")
    return beyond.groupby([runs[name] for name in TRAINING]).mean()


def drops_and_gains(table: pd.DataFrame, *, reference: str | None) -> pd.DataFrame:
    """Compare every arm with the lossless arm, and with the reference arm if there is one.

    Args:
        table: from `records.read_experiment`.
        reference: the arm that gains are measured from.

    Returns:
        The columns of `compare_arms`, for accuracy evaluated with losses. The same differences follow for other
        outcomes, under names such as `clean`, `clean_low`, `clean_high` and `clean_p_holm`:

        - `clean`: accuracy evaluated without losses, which shows only the effect of losses in training.
        - `rise`: cross-entropy in nats, evaluated with losses; missing for an arm with a run that is not finite.
        - `gain`: the arm's change against the lossless arm, less the reference's, over all trainings of the task.
    """
    where = [*TRAINING, "arm", "loss_rate"]
    entropy = table["cross_entropy_lossy"].astype(float).replace([np.inf, -np.inf], np.nan)
    entropy = entropy.where(entropy.notna().groupby([table[name] for name in where]).transform("all"))
    found = compare_arms(table, reference=LOSSLESS)
    for name, outcome in (("clean", table["accuracy_clean"]), ("rise", entropy)):
        others = compare_arms(table.assign(outcome=outcome), reference=LOSSLESS, outcome="outcome")
        found = join_differences(found, others, where, name)
    if reference is None:
        return found
    gains = compare_arms(lossy_changes(table), reference=reference, outcome="change", within=("task",))
    return join_differences(found, gains, ["task", "arm", "loss_rate"], "gain")


def with_falls(compared: pd.DataFrame) -> pd.DataFrame:
    """Return a comparison with a `fall` for each difference; `low` and `high` become the interval of the fall."""
    return compared.assign(fall=-compared["difference"], low=-compared["high"], high=-compared["low"])


def lossy_changes(
    table: pd.DataFrame, *, within: Sequence[str] = TRAINING, outcome: str = "accuracy_lossy"
) -> pd.DataFrame:
    """Return the runs with losses, with their `change` against the lossless run of the same training and seed."""
    key = [*within, "seed"]
    lossless = table[table["arm"] == LOSSLESS].set_index(key)[outcome].rename("without")
    lossy = table[table["arm"] != LOSSLESS].join(lossless, on=key)
    return lossy.assign(change=lossy[outcome] - lossy["without"])


def join_differences(table: pd.DataFrame, compared: pd.DataFrame, where: list[str], name: str) -> pd.DataFrame:
    """Add the differences of `compared` to `table`, matched on the columns `where` and prefixed with `name`."""
    names = {"difference": name} | {each: f"{name}_{each}" for each in ("low", "high", "p_holm")}
    return table.merge(compared.reindex(columns=[*where, *names]).rename(columns=names), on=where, how="left")

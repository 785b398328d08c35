import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from lossytp.study.style import MARKERS
from paper.pretraining import HIGHEST, losses_over_steps, nats_against_tokens

mpl.use("Agg")


def marks(ax):
    """Return the x and y of each drawn series of marks."""
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines if line.get_marker() in [*MARKERS]]


def test_pretraining_joins_each_lossy_arm_to_as_good_a_number_of_lossless_tokens():
    arms = pd.DataFrame(
        [
            {"loss_rate": 0.0, "tokens": 8e6, "clean_mean": 4.0, "clean_times_tokens": np.nan, "repair": "zero"},
            {"loss_rate": 0.0, "tokens": 4e6, "clean_mean": 4.4, "clean_times_tokens": np.nan, "repair": "zero"},
            {"loss_rate": 0.1, "tokens": 8e6, "clean_mean": 4.2, "clean_times_tokens": 1.6, "repair": "zero"},
            {"loss_rate": 0.1, "tokens": 8e6, "clean_mean": 5.0, "clean_times_tokens": np.nan, "repair": "stale"},
        ]
    )
    arms = arms.assign(reliable_gather=True, sequence_parallel=False, clean=0.3, clean_low=0.2, clean_high=0.5)
    arms = arms.assign(clean_times_tokens_low=1.25, clean_times_tokens_high=2.0)
    (ax,) = nats_against_tokens(arms).axes
    dotted = [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines if line.get_linestyle() == ":"]
    assert dotted == [([5.0, 8.0], [4.2, 4.2])]
    assert marks(ax) == [([4.0, 8.0], [4.4, 4.0]), ([8.0], [4.2]), ([8.0], [5.0])]
    rise, as_good, other = (drawn.lines[2][0].get_segments()[0].tolist() for drawn in ax.containers)
    assert rise == [[8.0, pytest.approx(4.1)], [8.0, pytest.approx(4.4)]]
    assert as_good == [[pytest.approx(4.0), 4.2], [pytest.approx(6.4), 4.2]]
    assert [y for _, y in other] == pytest.approx([4.9, 5.2]), "it has a rise, and no number of tokens"
    assert [text.get_text() for text in ax.texts] == ["no loss", "10 %, reduce phase", "10 %, reduce phase,\nstale"]


def test_a_sharded_stream_is_named_in_the_figure_of_tokens():
    arm = {"loss_rate": 0.1, "tokens": 8e6, "clean_mean": 4.2, "clean_times_tokens": 1.6, "repair": "zero"}
    arm |= {"reliable_gather": False, "clean": 0.3, "clean_low": 0.2, "clean_high": 0.5}
    arm |= {"clean_times_tokens_low": 1.25, "clean_times_tokens_high": 2.0}
    lossless = arm | {"loss_rate": 0.0, "sequence_parallel": False}
    (ax,) = nats_against_tokens(pd.DataFrame([lossless, arm | {"sequence_parallel": True}])).axes
    assert {text.get_text() for text in ax.texts} == {"no loss", "10 %, both phases,\nsharded stream"}


def test_training_losses_have_a_line_for_each_seed_and_a_style_for_each_network():
    def curves(*networks):
        points = [
            (network, seed, step, 10 / step + number)
            for number, network in enumerate(networks)
            for seed in (0, 1)
            for step in (1, 2, 4)
        ]
        return pd.DataFrame(points, columns=["network", "seed", "step", "loss"])

    panels = {"small": curves("no loss", "no repair"), "large": curves("no loss", "jumbo packets", "no repair")}
    small, large = losses_over_steps(panels).axes
    assert [ax.get_title() for ax in (small, large)] == ["small", "large"]
    assert [len(ax.lines) for ax in (small, large)] == [4, 6]
    looks = [{text.get_text(): text.get_color() for text in ax.texts} for ax in (small, large)]
    assert looks[0] == {"no loss": "0.2", "no repair": "C1"}, "first come the networks of the first panel"
    assert looks[1] == {"no loss": "0.2", "jumbo packets": "C2", "no repair": "C1"}
    styles = [line.get_linestyle() for line in large.lines]
    assert styles == ["-", "-", "-.", "-.", "--", "--"]
    assert list(large.lines[2].get_ydata()) == [11.0, 6.0, 3.5]
    assert small.get_ylim()[1] == HIGHEST


def test_five_networks_have_five_styles():
    names = ["no loss", "one", "two", "three", "four"]
    points = [(name, 0, step, 5.0 + step) for name in names for step in (1, 2)]
    (ax,) = losses_over_steps({"model": pd.DataFrame(points, columns=["network", "seed", "step", "loss"])}).axes
    assert len({str(line._unscaled_dash_pattern) for line in ax.lines}) == 5

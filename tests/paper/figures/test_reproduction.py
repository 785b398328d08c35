import matplotlib as mpl
import pandas as pd

from paper.reproduction import reproduced_on_published

mpl.use("Agg")


def test_each_run_lies_beside_the_published_run_of_its_rate_and_seed():
    published = pd.DataFrame(
        [(rate, seed, 0.7 - rate / 10 + seed / 100) for rate in (0.0, 0.1, 0.3) for seed in range(3)],
        columns=["loss_rate", "seed", "accuracy_lossy"],
    )
    here = published[(published["seed"] < 2) & (published["loss_rate"] != 0.1)].assign(
        accuracy_lossy=lambda table: table["accuracy_lossy"] + 0.002
    )
    ax = reproduced_on_published(published, here).axes[0]
    lines = {line.get_label(): line for line in ax.lines}
    assert list(lines["published, 3 seeds"].get_xdata()) == [0.0, 0.1, 0.3]
    for seed in (0, 1):
        line = lines[f"here, seed {seed}"]
        assert list(line.get_xdata()) == [0.0, 0.3]
        mine = here[here["seed"] == seed]["accuracy_lossy"]
        assert list(line.get_ydata()) == list(mine)
        hollow = ax.lines[ax.lines.index(line) - 1]
        assert hollow.get_markerfacecolor() == "none"
        assert list(hollow.get_ydata()) == list(mine - 0.002)
    assert ax.get_xlabel() == "packet loss rate, %"

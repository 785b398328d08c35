import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd

from lossytp.study.figures.curves import accuracy_against_loss
from lossytp.study.figures.style import loss_rate_axis, save, set_style

mpl.use("Agg")


def test_the_same_table_gives_the_same_files(tmp_path, study, curves):
    set_style()
    for name, records in {"a": study, "b": study, "c": study[:-1]}.items():
        save(accuracy_against_loss(curves(records)), tmp_path / name, "f")
    for file in ("f.png", "f.svg"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        assert (tmp_path / "a" / file).read_bytes() != (tmp_path / "c" / file).read_bytes()


def test_rates_whose_names_would_overlap_have_none():
    figure, ax = plt.subplots()
    loss_rate_axis(ax, pd.Series([0.0, 0.01, 0.03, 0.05, 0.2, 0.3]))
    figure.canvas.draw()
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "", "5", "", "30"]
    plt.close(figure)

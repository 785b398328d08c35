import matplotlib as mpl
import matplotlib.pyplot as plt

from lossytp.study.style import save, set_style

mpl.use("Agg")


def test_save_writes_the_same_bytes_for_the_same_values(tmp_path):
    set_style()
    for name, values in {"a": [1, 2], "b": [1, 2], "c": [1, 3]}.items():
        figure, ax = plt.subplots()
        ax.plot(values, label="values")
        ax.legend()
        save(figure, tmp_path / name, "f")
    for file in ("f.png", "f.svg"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        assert (tmp_path / "a" / file).read_bytes() != (tmp_path / "c" / file).read_bytes()

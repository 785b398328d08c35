import matplotlib as mpl
import pandas as pd
import pytest

from paper.sizes import cost_of_models

mpl.use("Agg")
ENDS = {"low": 0.01, "high": 0.09}


def rise(parameters, rate, *, tokens=8e6, of_nanos=0.1):
    name = f"gpt2-{parameters}"
    return {"model_name": name, "parameters": parameters, "tokens": tokens, "loss_rate": rate, "rise": of_nanos, **ENDS}


def fall(parameters, *, tokens=8e6, of_nanos=0.05):
    name = f"gpt2-{parameters}"
    return {"model_name": name, "parameters": parameters, "tokens": tokens, "loss_rate": 0.3, "fall": of_nanos, **ENDS}


RISES = [rise(count, rate, of_nanos=rate * count / 1e7) for rate in (0.1, 0.3) for count in (4_000_000, 1_000_000)]
FALLS = [fall(1_000_000), fall(4_000_000)]


def drawn(ax):
    return [(list(each.lines[0].get_xdata()), list(each.lines[0].get_ydata())) for each in ax.containers]


def test_both_costs_are_drawn_against_parameters():
    above, below = cost_of_models(pd.DataFrame(RISES), pd.DataFrame(FALLS)).axes
    assert drawn(above) == [([1e6, 4e6], pytest.approx([0.01, 0.04])), ([1e6, 4e6], pytest.approx([0.03, 0.12]))]
    assert drawn(below) == [([1e6, 4e6], pytest.approx([5, 5]))], "points"
    colors = [each.lines[0].get_color() for each in (*above.containers, *below.containers)]
    assert colors[1] == colors[2] != colors[0], "a loss rate has one colour"
    assert [text.get_text() for text in above.texts] == ["10 %", "30 %"]
    assert [text.get_text() for text in below.get_xticklabels()] == ["1", "4"]


def test_one_size_is_drawn_against_tokens():
    fewer = [rise(1_000_000, rate, tokens=2e6, of_nanos=0.002) for rate in (0.1, 0.3)]
    axes = cost_of_models(pd.DataFrame(RISES + fewer), pd.DataFrame([*FALLS, fall(1_000_000, tokens=2e6)])).axes
    assert [len(drawn(ax)) for ax in axes] == [2, 2, 1, 1]
    assert drawn(axes[1])[0] == ([2e6, 8e6], pytest.approx([0.002, 0.01]))
    assert drawn(axes[0])[0][0] == [1e6, 4e6], "sizes at equal tokens"
    assert axes[3].get_xlabel() == "tokens, millions"

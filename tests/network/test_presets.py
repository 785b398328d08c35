"""The earlier study's Gilbert-Elliott settings by id, and netem's notation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossytp.network.losses import PRESETS, Bernoulli, GilbertElliott, from_netem, gilbert_elliott_preset
from tests.network.loss_statistics import reproducible

# id: loss rate and mean burst, from p / (p + r) and 1 / r by hand, the two general ones from the transition matrix
EXPECTED = {
    "zero": (0, 0),
    "default": (0.1, 1 / 0.45),
    "one": (0.05, 1 / 0.19),
    "one_precent": (0.0106557377, 1.8348623853),
    "half_percent": (0.00497512438, 5),
    "point2_percent": (0.00200665188, 1.8167652541),
    "long_point1_percent": (0.001, 1 / 0.04995),
    "long_point1percent": (0.000999000999, 1 / 0.98),
    "long_2percent": (0.02, 1 / 0.0196),
    "lomg_2percent": (0.02, 1 / 0.98),
    "short_2percent": (0.0199921599, 2),
    "short_1percent": (0.00999900999, 1 / 0.6),
    "short_half_percent": (0.00502462564, 1 / 0.6),
    "short_point_2percent": (0.00201260791, 1 / 0.6),
    "short_point1_percent": (0.001000999, 1 / 0.999),
    "20_loss": (0.2, 1 / 0.98),
    "long_50percent": (0.5, 1 / 0.98),
    "short_50percent": (0.5, 2),
    "90_loss": (0.9000009, 1 / 0.11111),
}


def test_every_id_is_there_and_no_other():
    assert len(EXPECTED) == 19
    assert set(PRESETS) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_presets_lose_what_their_values_say(name):
    process = gilbert_elliott_preset(name)
    assert process.loss_rate == pytest.approx(EXPECTED[name][0], rel=1e-8)
    assert process.mean_burst_packets == pytest.approx(EXPECTED[name][1], rel=1e-8)


def test_a_preset_with_loss_in_both_states():
    assert gilbert_elliott_preset("point2_percent") == GilbertElliott(
        p_good_to_bad=0.001, p_bad_to_good=0.45, loss_good=0.0001, loss_bad=0.86
    )


@pytest.mark.parametrize("name", ["one_percent", "", "ZERO"])
def test_an_unknown_id_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=r"ge_config = .* is unknown") as refusal:
        gilbert_elliott_preset(name)
    assert repr(name) in str(refusal.value)
    assert all(known in str(refusal.value) for known in EXPECTED)
    assert "\n" not in str(refusal.value)


# netem's notation

rates = st.floats(0, 1)


@reproducible
@given(loss_rate=rates)
def test_bernoulli_round_trip(loss_rate):
    text = Bernoulli(loss_rate=loss_rate).to_netem()
    again = from_netem(text)
    assert isinstance(again, Bernoulli)
    assert again.loss_rate == pytest.approx(loss_rate, rel=1e-9)
    assert again.to_netem() == text


@reproducible
@given(
    process=st.builds(
        GilbertElliott, p_good_to_bad=rates, p_bad_to_good=st.floats(1e-12, 1), loss_bad=rates, loss_good=rates
    )
)
def test_gilbert_elliott_round_trip(process):
    text = process.to_netem()
    again = from_netem(text)
    assert isinstance(again, GilbertElliott)
    for name in ("p_good_to_bad", "p_bad_to_good", "loss_bad", "loss_good"):
        assert getattr(again, name) == pytest.approx(getattr(process, name), rel=1e-9)
    assert again.to_netem() == text


def test_presets_are_written_as_for_tc():
    assert gilbert_elliott_preset("one").to_netem() == "loss gemodel 1% 19% 100% 0%"
    assert Bernoulli(loss_rate=0.015).to_netem() == "loss random 1.5%"


@pytest.mark.parametrize("text", ["loss 1%", "loss random 1%", "loss 1", "loss random 1", "  loss   1.0% "])
def test_ways_to_write_a_random_loss(text):
    assert from_netem(text) == Bernoulli(loss_rate=0.01)


@pytest.mark.parametrize(
    ("text", "leave", "back", "bad", "good"),
    [
        ("loss gemodel 1%", 0.01, 0.99, 1, 0),
        ("loss gemodel 1% 20%", 0.01, 0.2, 1, 0),
        ("loss gemodel 1% 20% 70%", 0.01, 0.2, 0.7, 0),
        ("loss gemodel 1% 20% 70% 0.1%", 0.01, 0.2, 0.7, 0.001),
        ("loss gemodel 1 20 70 0.1", 0.01, 0.2, 0.7, 0.001),
    ],
)
def test_values_left_out_take_the_defaults_of_tc(text, leave, back, bad, good):
    """tc-netem(8): with p alone, r = 1 - p, 1-h = 1 and 1-k = 0 make it Bernoulli."""
    process = from_netem(text)
    values = (process.p_good_to_bad, process.p_bad_to_good, process.loss_bad, process.loss_good)
    assert values == pytest.approx((leave, back, bad, good))


def test_gemodel_with_p_alone_is_bernoulli():
    process = from_netem("loss gemodel 3%")
    assert process.loss_rate == pytest.approx(0.03)
    assert process.autocorrelation(1) == pytest.approx(0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "loss",
        "loss random",
        "loss gemodel",
        "1%",
        "random 1%",
        "delay 1%",
        "loss x%",
        "loss 1%%",
        "loss 1 %",
        "loss nan%",
        "loss 1% random",
        "loss 1% loss 1%",
        "loss random 1% 25%",
        "loss state",
        "loss state 1% 2% 3% 4% 5% 6%",
        "loss gemodel 1% 2% 3% 4% 5%",
        "loss gemodel p 1%",
        "loss ge 1% 19%",
        "Loss 1%",
    ],
)
def test_malformed_text_is_refused(text):
    """Netem's correlation, deprecated there, is not read."""
    with pytest.raises(ValueError, match="is not understood: write 'loss random 1%' or 'loss gemodel") as refusal:
        from_netem(text)
    assert repr(text) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("value", ["101%", "200%", "-1%", "1e999%", "101"])
def test_rates_outside_0_to_100_percent_are_refused_as_percentages(value):
    for text in (f"loss random {value}", f"loss gemodel 1% {value}"):
        with pytest.raises(ValueError, match=r"which is not in \[0, 100 %\]: give 0 % to 100 %$") as refusal:
            from_netem(text)
        assert f"netem = {text!r} holds {value}" in str(refusal.value)


@pytest.mark.parametrize("value", ["e%", "1.2.3%", "+", "five", "1%%"])
def test_what_looks_like_a_number_and_is_none_is_refused_with_the_notation(value):
    with pytest.raises(ValueError, match=r"^netem = .* is not understood: write 'loss random 1%' or") as refusal:
        from_netem(f"loss {value}")
    assert value in str(refusal.value)


@pytest.mark.parametrize(("value", "rate"), [("1%", 0.01), ("1", 0.01), (".5%", 0.005), ("5.%", 0.05), ("1e-3%", 1e-5)])
def test_numbers_are_read_in_every_notation(value, rate):
    assert from_netem(f"loss {value}").loss_rate == pytest.approx(rate)

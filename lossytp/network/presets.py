"""Named loss processes: the Gilbert-Elliott settings of an earlier study, and netem's notation.

The earlier study's command lines pass these ids, spelling mistakes included, to ``--ge_config``. Several ids state a
loss rate that differs from that of their values: trust `loss_rate`, not the id.
"""

import re

from lossytp.network.bernoulli import Bernoulli
from lossytp.network.checks import check_known, shown
from lossytp.network.four_state import FourState
from lossytp.network.gilbert_elliott import GilbertElliott

# id: p_good_to_bad, p_bad_to_good, loss_good, loss_bad
_VALUES = {
    "zero": (0, 1, 0, 1),
    "default": (0.05, 0.45, 0, 1),
    "one": (0.01, 0.19, 0, 1),
    "one_precent": (0.005, 0.3, 0, 0.65),
    "half_percent": (0.001, 0.2, 0, 1),
    "point2_percent": (0.001, 0.45, 0.0001, 0.86),
    "long_point1_percent": (0.00005, 0.04995, 0, 1),
    "long_point1percent": (0.00098, 0.98, 0, 1),
    "long_2percent": (0.0004, 0.0196, 0, 1),
    "lomg_2percent": (0.02, 0.98, 0, 1),
    "short_2percent": (0.0102, 0.5, 0, 1),
    "short_1percent": (0.00606, 0.6, 0, 1),
    "short_half_percent": (0.00303, 0.6, 0, 1),
    "short_point_2percent": (0.00121, 0.6, 0, 1),
    "short_point1_percent": (0.001001, 0.999, 0, 1),
    "20_loss": (0.245, 0.98, 0, 1),
    "long_50percent": (0.98, 0.98, 0, 1),
    "short_50percent": (0.5, 0.5, 0, 1),
    "90_loss": (1, 0.11111, 0, 1),
}
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?%?"
PRESETS = {
    name: GilbertElliott(p_good_to_bad=leave, p_bad_to_good=back, loss_good=good, loss_bad=bad)
    for name, (leave, back, good, bad) in _VALUES.items()
}


def gilbert_elliott_preset(name: str) -> GilbertElliott:
    """Return the preset with this id.

    Raises:
        ValueError: if no preset has this id; the message lists the ids.
    """
    check_known("ge_config", name, PRESETS)
    return PRESETS[name]


def from_netem(text: str) -> Bernoulli | GilbertElliott | FourState:
    """Return the process that ``tc netem`` runs for `text`.

    The text is ``loss [random] 1%``, ``loss gemodel p [r [1-h [1-k]]]`` or ``loss state p13 [p31 [p32 [p23 [p14]]]]``.
    Percent signs are optional, as for tc. Values that are left out have netem's defaults (r = 1 - p, 1-h = 100 %, 1-k =
    0 %; p31 = 1 - p13, p32 = 0 %, p23 = 100 %, p14 = 0 %).

    Raises:
        ValueError: if the text has another form, asks for netem's correlation, or gives more than 100 %.
    """
    words = str(text).split()
    values = [word for word in words if re.fullmatch(NUMBER, word)]
    names = words[: len(words) - len(values)]
    if words[len(names) :] == values and values:
        numbers = [float(value.rstrip("%")) / 100 for value in values]
        for value, number in zip(values, numbers, strict=True):
            if not 0 <= number <= 1:
                raise ValueError(f"netem = {text!r} holds {value}, which is not in [0, 100 %]: give 0 % to 100 %")
        if names in (["loss"], ["loss", "random"]) and len(numbers) == 1:
            return Bernoulli(loss_rate=numbers[0])
        if names == ["loss", "gemodel"] and len(numbers) <= 4:
            leave, back, bad, good = numbers + [1 - numbers[0], 1.0, 0.0][len(numbers) - 1 :]
            return GilbertElliott(p_good_to_bad=leave, p_bad_to_good=back, loss_bad=bad, loss_good=good)
        if names == ["loss", "state"] and len(numbers) <= 5:
            return FourState(*numbers, *[1 - numbers[0], 0.0, 1.0, 0.0][len(numbers) - 1 :])
    raise ValueError(
        f"netem = {shown(text)} is not understood: write 'loss random 1%' or 'loss gemodel 1% 19% 100% 0%' or "
        "'loss state 1% 20% 5% 30% 0.1%'"
    )

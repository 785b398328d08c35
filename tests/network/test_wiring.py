"""What ranks may be told about how to exchange messages, and what is refused."""

import re
import subprocess
import sys
from typing import Any

import pytest

from lossytp.network.lossy_network import Wiring
from lossytp.network.routes import ALGORITHMS

OWN = {"reliable_gather": False}
SEQUENCE = {"sequence_parallel": True}
NOISE = {"control": "noise"}
ONE_HOP = (
    "control = 'noise' does not work with algorithm = {!r}, whose hops carry several ranks' parts: choose one of {}"
)
NO_REPAIR = "control = 'noise' loses no packets that a repair or an adjoint could act on: leave both out"
NO_ADJOINT = (
    "exact_adjoint does not work with lossy gathers or sequence_parallel, because the adjoint of a gather would be "
    "another lossy collective: leave reliable_gather True and sequence_parallel False"
)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": "rings"}, "algorithm = 'rings' is unknown: choose one of direct, ring, sender, switch, tree"),
    (
        {"repair": "magic"},
        "repair = 'magic' is unknown: choose one of zero, rescale, rescale_counted, stale, local, fec, hadamard, "
        "retransmit, protect",
    ),
    ({"repair": "hadamard(6)"}, "repair = 'hadamard(6)': block = 6 is not a power of two: give one, such as 64"),
    ({"wire_dtype": "fp64"}, "wire_dtype = 'fp64' is unknown: choose one of fp32, bf16"),
    ({"control": "loud"}, "control = 'loud' is unknown: choose one of noise"),
    (
        {"repair": "local", "algorithm": "sender"},
        "repair = 'local' does not work with algorithm = 'sender', where every rank lacks what is lost, and none has a "
        "part to fill in: choose another algorithm",
    ),
    (
        {"repair": "local", **SEQUENCE, **OWN},
        "repair = 'local' does not work with sequence_parallel and reliable_gather = False, because a rank has no part "
        "of what it gathers: choose another repair",
    ),
    (
        {"repair": "local", "exact_adjoint": True},
        "exact_adjoint does not work with repair = 'local': choose another repair",
    ),
    ({"exact_adjoint": True, **OWN}, NO_ADJOINT),
    ({"exact_adjoint": True, **SEQUENCE}, NO_ADJOINT),
    ({"exact_adjoint": True, **SEQUENCE, **OWN}, NO_ADJOINT),
    (
        {"algorithm": "sender", **OWN},
        "reliable_gather = False does not work with algorithm = 'sender', whose sum reaches every rank: choose "
        "another algorithm",
    ),
    ({**NOISE, "algorithm": "ring"}, ONE_HOP.format("ring", "direct, sender, switch")),
    ({**NOISE, "algorithm": "tree"}, ONE_HOP.format("tree", "direct, sender, switch")),
    ({**NOISE, **SEQUENCE, "algorithm": "switch"}, ONE_HOP.format("switch", "direct")),
    ({**NOISE, "repair": "rescale"}, NO_REPAIR),
    ({**NOISE, "exact_adjoint": True}, NO_REPAIR),
]


@pytest.mark.parametrize(("wiring", "message"), REFUSED, ids=[str(wiring) for wiring, _ in REFUSED])
def test_what_cannot_be_is_refused(wiring: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Wiring.named(**wiring)


def test_whatever_else_there_is_can_be_combined() -> None:
    """Control: nothing more is refused than is listed."""
    repairs = ["zero", "rescale", "rescale_counted", "stale", "local", "fec(3, 2)", "hadamard", "retransmit(1)"]
    refused, taken = 0, 0
    for algorithm in ALGORITHMS:
        for repair in repairs:
            for number in range(16):
                gather, sequence, adjoint, noise = (bool(number >> bit & 1) for bit in range(4))
                own = not gather and not sequence
                hops = algorithm not in (("direct",) if sequence else ("direct", "sender", "switch"))
                expected = (
                    (repair == "local" and (algorithm == "sender" or (sequence and not gather) or adjoint))
                    or (adjoint and (not gather or sequence))
                    or (noise and (hops or repair != "zero" or adjoint))
                    or (algorithm == "sender" and own)
                )
                settings = {"reliable_gather": gather, "sequence_parallel": sequence, "exact_adjoint": adjoint}
                try:
                    wiring = Wiring.named(
                        algorithm=algorithm, repair=repair, control="noise" if noise else None, **settings
                    )
                except ValueError:
                    refused += 1
                    assert expected, (algorithm, repair, settings, noise)
                else:
                    taken += 1
                    assert not expected, (algorithm, repair, settings, noise)
                    assert wiring.own_streams == own
                    assert wiring.one_stream == (gather and not sequence)
    assert refused > 100
    assert taken > 100


def test_messages_have_their_own_dtype_where_none_is_given() -> None:
    assert [Wiring(wire_dtype=dtype).wire_dtype for dtype in (None, "fp32", "bf16")] == [None, "fp32", "bf16"]
    assert Wiring() == Wiring.named(algorithm="direct", repair="zero", reliable_gather=True)


def test_importing_it_costs_no_torch() -> None:
    code = "import sys, lossytp.network.lossy_network; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["reliable_gather", "sequence_parallel", "exact_adjoint"])
@pytest.mark.parametrize("value", ["no", "false", 0, 1, None])
def test_a_switch_is_true_or_false(name, value):
    with pytest.raises(TypeError, match=rf"^{name} = {value!r} is of type \w+, not bool: give True or False$"):
        Wiring(**{name: value})


@pytest.mark.parametrize("repair", [None, 0, ["zero"]])
def test_a_repair_is_text(repair):
    with pytest.raises(TypeError, match=r"^repair = .* is of type \w+, not str: give a name, or name\(1, option=2\)$"):
        Wiring.named(repair=repair)


@pytest.mark.parametrize("value", ["ring", None, 0])
@pytest.mark.parametrize(("name", "kind"), [("algorithm", "Algorithm"), ("repair", "Repair")])
def test_a_wiring_holds_objects_not_names(name, kind, value):
    with pytest.raises(TypeError, match=rf"^{name} = {value!r} is of type \w+, not {kind}: give one, or its name to"):
        Wiring(**{name: value})


def test_an_unknown_setting_is_refused_with_the_closest_one():
    with pytest.raises(ValueError, match=r"^unknown parameter 'reliable_gathers': did you mean reliable_gather\?$"):
        Wiring.named(reliable_gathers=False)

"""What ranks may be told about how to exchange messages, and what is refused."""

from typing import Any

import pytest

from lossytp.network.lossy_network import Wiring
from lossytp.network.routes import ALGORITHMS

OWN = {"reliable_gather": False}
SEQUENCE = {"sequence_parallel": True}
NOISE = {"control": "noise"}


@pytest.mark.parametrize(
    ("wiring", "name"),
    [
        ({"algorithm": "rings"}, "algorithm"),
        *(({"repair": repair}, "repair") for repair in ("magic", "hadamard(6)")),
        ({"wire_dtype": "fp64"}, "wire_dtype"),
        ({"control": "loud"}, "control"),
        *(({"repair": "local", **other}, "repair") for other in ({"algorithm": "sender"}, SEQUENCE | OWN)),
        ({"repair": "local", "exact_adjoint": True}, "exact_adjoint"),
        *(({"exact_adjoint": True, **other}, "exact_adjoint") for other in (OWN, SEQUENCE, SEQUENCE | OWN)),
        ({"algorithm": "sender", **OWN}, "reliable_gather"),
        *(({**NOISE, "algorithm": algorithm}, "one of direct, sender, switch") for algorithm in ("ring", "tree")),
        ({**NOISE, **SEQUENCE, "algorithm": "switch"}, "one of direct$"),
        *(({**NOISE, **other}, "control") for other in ({"repair": "rescale"}, {"exact_adjoint": True})),
        ({"reliable_gathers": False}, "did you mean reliable_gather"),
    ],
)
def test_what_cannot_be_is_refused(wiring: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name) as refusal:
        Wiring.named(**wiring)
    assert "\n" not in str(refusal.value)


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


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, ("no", 0, None)) for name in ("reliable_gather", "sequence_parallel", "exact_adjoint")),
        *((name, ("ring", None, 0)) for name in ("algorithm", "repair")),
    ],
)
def test_values_of_other_types_are_refused(name, values):
    for value in values:
        with pytest.raises(TypeError, match=name):
            Wiring(**{name: value})
    with pytest.raises(TypeError, match="repair"):
        Wiring.named(repair=None)

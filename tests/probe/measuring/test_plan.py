import pytest

from lossytp.probe.wire import Plan


def test_a_plan_knows_its_rate_and_time() -> None:
    plan = Plan(packets=100, flows=3, packet_bytes=1000, rate_packets_per_s=50.0)
    assert (plan.mbits_per_s, plan.seconds, plan.datagram_bytes) == (pytest.approx(1.2), 2.0, 972)


def test_a_plan_survives_the_way_to_another_machine() -> None:
    plan = Plan(packets=7, flows=2, both_directions=True)
    assert Plan.from_dict(plan.as_dict()) == plan


@pytest.mark.parametrize("values", [None, 3, [], {}, {"packets": 1}, {**Plan(packets=1).as_dict(), "more": 1}])
def test_another_machine_s_nonsense_is_refused(values: object) -> None:
    with pytest.raises((TypeError, ValueError), match="plan = "):
        Plan.from_dict(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"packets": 0}, "packets = 0 is below 1"),
        ({"packets": 2**40}, "packets = 1099511627776 is above 2147483648"),
        ({"packets": "1"}, "packets = '1' is not a whole number"),
        ({"flows": 257}, "flows = 257 is above 256"),
        ({"packet_bytes": 43}, "packet_bytes = 43 is below 44"),
        ({"packet_bytes": 65_536}, "packet_bytes = 65536 is above 65535"),
        ({"rate_packets_per_s": 0.0}, "rate_packets_per_s = 0.0 is not a finite number above 0"),
        ({"burst_packets": 0}, "burst_packets = 0 is below 1"),
        ({"both_directions": 1}, "both_directions = 1 is of type int"),
    ],
)
def test_values_out_of_bounds_are_refused(values: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Plan.from_dict({**Plan(packets=1).as_dict(), **values})


def test_a_rate_above_the_cap_is_refused() -> None:
    plan = Plan(packets=1, flows=2, rate_packets_per_s=10_000.0)
    plan.check_rate(240.0)
    with pytest.raises(ValueError, match=r"2 x 10000 packets/s of 1500 bytes are 240 Mbit/s, above max_mbits = 239"):
        plan.check_rate(239.0)

"""Which process each link has."""

import pytest

from lossytp.network import Bernoulli, LossyNetwork
from lossytp.network.lossy_network import LinkProcesses

SOME, MORE = Bernoulli(loss_rate=0.1), Bernoulli(loss_rate=0.2)


def test_named_links_have_their_own_and_the_others_the_default():
    processes = LinkProcesses({(0, 1): SOME}, MORE)
    assert (processes.of(0, 1), processes.of(1, 0)) == (SOME, MORE)
    assert LinkProcesses(SOME, None).of(3, 2) == SOME
    assert LinkProcesses({(0, 1): SOME}, None).of(1, 0).loss_rate == 0
    assert LinkProcesses({}, MORE).of(0, 1) == MORE


@pytest.mark.parametrize(
    ("process", "default", "message"),
    [
        (
            SOME,
            MORE,
            r"default = Bernoulli\(loss_rate=0.2\) needs named links: give process = .*, or leave default out",
        ),
        (SOME, SOME, "default = .* needs named links"),
        ({}, None, r"process = \{\} names no link: name one, such as \{\(0, 1\): process\}, or give a process for all"),
        ({(0, 1): 0.1}, None, r"process of 0>1 = 0.1 is not a loss process: give one, such as Bernoulli"),
        ({(0, 1): SOME}, 0.1, "default = 0.1 is not a loss process: give one, such as Bernoulli"),
        (0.1, None, "process = 0.1 is not a loss process"),
        (Bernoulli, None, "process = <class .*> is not a loss process"),
        ({(0, 0): SOME}, None, "leads from 0 to itself"),
    ],
)
def test_what_would_be_ignored_is_refused(process, default, message):
    with pytest.raises(ValueError, match=message) as refusal:
        LossyNetwork(process, default=default)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("key", ["0>1", (0, 1, 2), 3])
def test_a_key_that_is_no_link_is_refused(key):
    with pytest.raises(TypeError, match="is not a pair of ranks"):
        LossyNetwork({key: SOME})


def test_a_named_process_that_is_the_default_changes_no_description():
    assert LinkProcesses({(0, 1): SOME}, SOME).described() == LinkProcesses(SOME, None).described()
    assert LinkProcesses({(0, 1): MORE}, SOME).described() != LinkProcesses(SOME, None).described()

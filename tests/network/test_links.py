"""Names of links."""

import numpy as np
import pytest

from lossytp.network.routes import check_links_within, checked_link


def test_numbers_of_numpy_become_pythons():
    link = checked_link((np.int64(0), np.int32(-1)))
    assert link == (0, -1)
    assert [type(end) for end in link] == [int, int]


@pytest.mark.parametrize("key", ["0>1", "01", (0,), (0, 1, 2), (), (0, 1.0), ("0", "1"), (True, 0), [0, 1], 5, None])
def test_what_is_no_pair_of_ranks_is_refused(key):
    with pytest.raises(TypeError) as refusal:
        checked_link(key)
    assert str(refusal.value) == f"link = {key!r} is not a pair of ranks: give (src, dst), such as (0, 1)"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ((0, 0), r"link = \(0, 0\) leads from 0 to itself: give two different ends"),
        ((-1, -1), r"link = \(-1, -1\) leads from -1 to itself"),
        ((0, -2), r"link = \(0, -2\) names a rank below 0: give ranks from 0, or -1 for the switch"),
    ],
)
def test_a_link_that_cannot_be_is_refused(key, message):
    with pytest.raises(ValueError, match=message):
        checked_link(key)


@pytest.mark.parametrize("link", [(0, 4), (99, 1), (-1, 4)])
def test_a_link_of_a_rank_that_is_not_there_is_refused(link):
    check_links_within([(0, 3), (3, -1), (-1, 2)], 4)
    with pytest.raises(ValueError, match=rf"link {link[0]}>{link[1]} names rank \d+, .* above 3.*: name links among"):
        check_links_within([(0, 3), link], 4)

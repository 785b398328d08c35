"""Where packets may be lost."""

import itertools
import re

import pytest

from lossytp.network.scope import EVERYWHERE, Scope, Site, links_named

SITES = [
    Site(layer, module, direction, "all_reduce", phase)
    for layer, module, direction, phase in itertools.product(
        (None, 0, 1, 2, 3), (None, "attention", "mlp"), (None, "forward", "backward"), ("reduce", "gather")
    )
]


@pytest.mark.parametrize("site", [*SITES, None])
def test_what_is_left_out_is_not_restricted(site):
    assert EVERYWHERE.covers(site)
    assert Scope() == EVERYWHERE


@pytest.mark.parametrize(
    ("scope", "inside"),
    [
        (Scope(direction="forward"), lambda site: site.direction == "forward"),
        (Scope(module="mlp"), lambda site: site.module == "mlp"),
        (Scope(phase="gather"), lambda site: site.phase == "gather"),
        (Scope(layers=(1, 3)), lambda site: site.layer in (1, 2)),
        (Scope(layers=(0, 1)), lambda site: site.layer == 0),
        (
            Scope(direction="backward", module="attention", layers=(2, 4), phase="reduce"),
            lambda site: site.layer in (2, 3) and site[1:] == ("attention", "backward", "all_reduce", "reduce"),
        ),
    ],
)
def test_a_scope_covers_its_part_and_no_other(scope, inside):
    covered = [site for site in SITES if scope.covers(site)]
    assert covered == [site for site in SITES if inside(site)]
    assert 0 < len(covered) < len(SITES)


def test_a_message_of_no_known_place_is_a_reduction_outside_all_layers():
    assert Scope(phase="reduce").covers(None)
    assert not Scope(phase="gather").covers(None)
    assert not Scope(layers=(0, 100)).covers(None)
    assert not Scope(direction="forward").covers(None)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"direction": "up"}, "direction = 'up' is unknown: choose one of forward, backward"),
        ({"module": "ffn"}, "module = 'ffn' is unknown: choose one of attention, mlp"),
        ({"phase": "scatter"}, "phase = 'scatter' is unknown: choose one of reduce, gather"),
        ({"layers": (2, 2)}, r"layers = \(2, 2\) is not a range: give the first layer and the layer after the last"),
        (
            {"layers": (0, 2, 5)},
            r"layers = \(0, 2, 5\) is not a range: give the first layer and the layer after the last",
        ),
        ({"layers": ()}, r"layers = \(\) is not a range"),
        ({"layers": (-1, 2)}, "layers = -1 is below 0: give 0 or more"),
    ],
)
def test_a_part_that_there_is_not_is_refused(what, message):
    with pytest.raises(ValueError, match=message):
        Scope(**what)


@pytest.mark.parametrize("layers", ["1:3", 5, range(2), {0, 2}])
def test_layers_are_a_pair_and_nothing_else(layers):
    with pytest.raises(TypeError, match=r"^layers = .* is of type \w+, not tuple or list: give the first layer and"):
        Scope(layers=layers)


def test_a_list_of_layers_is_as_good_as_a_tuple():
    assert Scope(layers=[1, 3]) == Scope(layers=(1, 3))
    assert hash(Scope(layers=[1, 3])) == hash(Scope(layers=(1, 3)))


def test_links_are_read_from_text():
    assert links_named("0>1, 2>-1,-1>3") == [(0, 1), (2, -1), (-1, 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0>1,0>1", "lossy_links = '0>1,0>1' names 0>1 more than once: name each link once"),
        ("0>1,00>1", "lossy_links = '0>1,00>1' names 0>1 more than once: name each link once"),
        ("0>0", "link = (0, 0) leads from 0 to itself: give two different ends"),
        ("0>1,", "lossy_links = '0>1,' is not understood: write source>destination, such as 0>1,2>3"),
        ("", "lossy_links = '' is not understood: write source>destination, such as 0>1,2>3"),
    ],
)
def test_links_that_are_none_or_named_twice_are_refused(text, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        links_named(text)

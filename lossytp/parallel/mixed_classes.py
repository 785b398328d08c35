"""Classes made at run time: a model's or a block's own class with methods added.

The class keeps the name of the one it extends, since libraries find models by it. Copies and pickles find it through
the classes that it is made of.
"""

from typing import Any

_made: dict[tuple[type, ...], type] = {}


class Mixed:
    """The base of all classes of `mixed`: they know their `base_class` and can be pickled."""

    base_class: type
    mixins: tuple[type, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (self.base_class, *self.mixins), self.__dict__


def mixed(base: type, *mixins: type) -> type:
    """Return `base` with the methods of `mixins` before its own. The same classes give the same class."""
    if (base, *mixins) not in _made:
        contents = {"base_class": base, "mixins": mixins, "__module__": base.__module__, "__doc__": base.__doc__}
        _made[base, *mixins] = type(base.__name__, (*mixins, Mixed, base), contents)
    return _made[base, *mixins]


def _blank(base: type, *mixins: type) -> Any:
    kind: Any = mixed(base, *mixins)
    return kind.__new__(kind)

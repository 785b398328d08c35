"""How ranks exchange messages: one object, made once from names and passed on whole."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from lossytp.network.algorithms import ALGORITHMS, algorithm_named
from lossytp.network.checks import check_bool, check_is, check_known, check_names
from lossytp.network.links import Link
from lossytp.network.repairs import ZERO, Repair, repair_named
from lossytp.network.repairs.chain import stage_of
from lossytp.network.routes import Algorithm

if TYPE_CHECKING:
    from lossytp.network.lossy_network import LossyNetwork

WIRE_DTYPES = ("fp32", "bf16")
CONTROLS = ("noise",)


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """How ranks exchange messages. `Wiring.named` makes one from the names that `parallelize` takes.

    Args:
        algorithm: the packets' routes.
        repair: what to do about lost packets.
        reliable_gather: False also loses packets of the results. Each rank then has its own residual stream or, with
            `sequence_parallel`, its own holes in the stream that it gathers.
        sequence_parallel: reduce-scatter and all-gather around a residual stream that is sharded over ranks.
        exact_adjoint: whether backward uses what forward lost, although no real sender knows it.
        wire_dtype: "fp32" or "bf16": round contributions and results to it for sending, but not partial sums on their
            way. None keeps the messages' own dtype.
        control: "noise" adds Gaussian noise with the losses' expected squared error, instead of losing packets.

    Raises:
        TypeError: if a value is of another type.
        ValueError: if a name is unknown, or two settings cannot be combined.
    """

    algorithm: Algorithm = ALGORITHMS["direct"]
    repair: Repair = ZERO
    reliable_gather: bool = True
    sequence_parallel: bool = False
    exact_adjoint: bool = False
    wire_dtype: str | None = None
    control: str | None = None

    @classmethod
    def named(cls, *, algorithm: str = "direct", repair: str = "zero", **settings: Any) -> Self:
        """Return the wiring of an algorithm and a repair by name, such as "ring" and "fec(10, 8)"."""
        check_names(settings, [field.name for field in fields(cls)])
        return cls(algorithm=algorithm_named(algorithm), repair=repair_named(repair), **settings)

    def __post_init__(self) -> None:
        check_is("algorithm", self.algorithm, Algorithm, 'one, or its name to Wiring.named, such as "ring"')
        check_is("repair", self.repair, Repair, 'one, or its name to Wiring.named, such as "rescale"')
        for name in ("reliable_gather", "sequence_parallel", "exact_adjoint"):
            check_bool(name, getattr(self, name))
        if self.wire_dtype is not None:
            check_known("wire_dtype", self.wire_dtype, WIRE_DTYPES)
        if self.control is not None:
            check_known("control", self.control, CONTROLS)
        if self.repair.uses_own_part:
            self._check_own_part()
        if self.exact_adjoint and (not self.reliable_gather or self.sequence_parallel):
            raise ValueError(
                "exact_adjoint does not work with lossy gathers or sequence_parallel, because the adjoint of a gather "
                "would be another lossy collective: leave reliable_gather True and sequence_parallel False"
            )
        if self.control == "noise":
            self._check_noise()
        if self.algorithm.sum_reaches_all and self.own_streams:
            raise ValueError(
                f"reliable_gather = False does not work with algorithm = {self.algorithm.name!r}, whose sum "
                "reaches every rank: choose another algorithm"
            )

    @property
    def own_streams(self) -> bool:
        """Return whether each rank has its own residual stream."""
        return not self.reliable_gather and not self.sequence_parallel

    @property
    def one_stream(self) -> bool:
        """Return whether all ranks share one residual stream that is not sharded."""
        return self.reliable_gather and not self.sequence_parallel

    def lossy_links(self, ranks: tuple[int, ...], phase: str | None) -> set[Link]:
        """Return the links over which messages of these ranks may lose packets, in one phase or, if None, in both."""
        reduce, gather = self.algorithm.pair(self.sequence_parallel)
        phases = {"reduce": reduce} | ({} if self.reliable_gather else {"gather": gather})
        routes = [of for name, of in phases.items() if phase in (None, name)]
        return {(hop.src, hop.dst) for of in routes for hop in of(len(ranks) ** 2, ranks)}

    def check_delivers(self, network: "LossyNetwork", ranks: tuple[int, ...]) -> None:
        """Raise ValueError if a link loses everything, so that what `protect` sends would never arrive."""
        if stage_of(self.repair, "select") == ZERO:
            return
        for src, dst in sorted(self.lossy_links(ranks, None)):
            if network.loss_rate(src, dst) == 1:
                raise ValueError(
                    f"repair = '{self.repair}' cannot work, because the link {src}>{dst} loses every packet: give it a "
                    "loss rate below 1, or choose another repair"
                )

    def _check_own_part(self) -> None:
        if not self.algorithm.has_receiving_ranks:
            raise ValueError(
                f"repair = '{self.repair}' does not work with algorithm = {self.algorithm.name!r}, where every rank "
                f"lacks what is lost, and none has a part to fill in: choose another algorithm"
            )
        if self.sequence_parallel and not self.reliable_gather:
            raise ValueError(
                f"repair = '{self.repair}' does not work with sequence_parallel and reliable_gather = False, because a "
                "rank has no part of what it gathers: choose another repair"
            )
        if self.exact_adjoint:
            raise ValueError(f"exact_adjoint does not work with repair = '{self.repair}': choose another repair")

    def _check_noise(self) -> None:
        fit = [name for name, other in ALGORITHMS.items() if other.hops_carry_one(self.sequence_parallel)]
        if not self.algorithm.hops_carry_one(self.sequence_parallel):
            raise ValueError(
                f"control = 'noise' does not work with algorithm = {self.algorithm.name!r}, whose hops carry several "
                f"ranks' parts: choose one of {', '.join(fit)}"
            )
        if self.repair != ZERO or self.exact_adjoint:
            raise ValueError(
                "control = 'noise' loses no packets that a repair or an adjoint could act on: leave both out"
            )

"""How tensor-parallel ranks exchange messages. Importing this module costs no torch."""

from dataclasses import dataclass

from lossytp.network.algorithms import ALGORITHMS, algorithm_named
from lossytp.network.checks import check_bool, check_known
from lossytp.network.repair import Local, Repair, Zero
from lossytp.network.repairs import repair_named

WIRE_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """How ranks exchange messages; `parallelize` takes the same names.

    Args:
        algorithm: a name of `lossytp.network.algorithms`.
        repair: as `lossytp.network.repairs.repair_named` reads it, such as "zero" or "fec(10, 8)".
        reliable_gather: False loses packets of the results too. Each rank then has a residual stream of its own, or,
            with `sequence_parallel`, its own holes in what it gathers.
        sequence_parallel: reduce-scatter and all-gather around a residual stream that is sharded over ranks.
        exact_adjoint: backward knows what forward lost, as no sender does.
        wire_dtype: "fp32" or "bf16", to which contributions and results are rounded for sending (partial sums on their
            way are not); their own dtype when left out.
        control: "noise" adds, in place of losses, Gaussian noise of their expected squared error.

    Raises TypeError for a value of another type, ValueError for an unknown name and for what cannot be combined.
    """

    algorithm: str = "direct"
    repair: str = "zero"
    reliable_gather: bool = True
    sequence_parallel: bool = False
    exact_adjoint: bool = False
    wire_dtype: str | None = None
    control: str | None = None

    def __post_init__(self) -> None:
        for name in ("reliable_gather", "sequence_parallel", "exact_adjoint"):
            check_bool(name, getattr(self, name))
        algorithm = algorithm_named(self.algorithm)
        repair = repair_named(self.repair)
        if self.wire_dtype is not None:
            check_known("wire_dtype", self.wire_dtype, WIRE_DTYPES)
        if isinstance(repair, Local):
            if not algorithm.has_receiving_ranks:
                raise ValueError(
                    f"repair = 'local' with algorithm = {self.algorithm!r}: a loss there is everyone's, so no receiver "
                    "has a part of its own to put in; choose another algorithm"
                )
            if self.sequence_parallel and not self.reliable_gather:
                raise ValueError(
                    "repair = 'local' with sequence_parallel and reliable_gather = False: a rank has no part of its "
                    "own of what it gathers; choose another repair"
                )
        if self.exact_adjoint:
            if isinstance(repair, Local):
                raise ValueError("exact_adjoint with repair = 'local' is not built: choose another repair")
            if not self.reliable_gather or self.sequence_parallel:
                raise ValueError(
                    "exact_adjoint with lossy gathers or sequence_parallel: the adjoint of a gather would be another "
                    "collective, with losses of its own; leave reliable_gather True and sequence_parallel False"
                )
        if self.control is not None:
            check_known("control", self.control, ("noise",))
            self._check_noise(repair)
        if algorithm.sum_reaches_all and self.own_streams:
            raise ValueError(
                f"reliable_gather = False with algorithm = {self.algorithm!r}, whose sum reaches every rank: choose "
                "another algorithm"
            )

    @property
    def own_streams(self) -> bool:
        """Whether each rank carries a residual stream of its own."""
        return not self.reliable_gather and not self.sequence_parallel

    @property
    def one_stream(self) -> bool:
        """Whether all ranks share one residual stream, whole."""
        return self.reliable_gather and not self.sequence_parallel

    def _check_noise(self, repair: Repair) -> None:
        fit = [name for name, other in ALGORITHMS.items() if other.hops_carry_one(self.sequence_parallel)]
        if self.algorithm not in fit:
            raise ValueError(
                f"control = 'noise' with algorithm = {self.algorithm!r}: its hops carry several ranks' parts, whose "
                f"error adds up; choose one of {', '.join(fit)}"
            )
        if not isinstance(repair, Zero) or self.exact_adjoint:
            raise ValueError("control = 'noise' loses nothing that a repair or an adjoint could act on: leave them out")

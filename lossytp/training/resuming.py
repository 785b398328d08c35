"""Save a run's state in checkpoints, and go on from it, at this layout or at another."""

import hashlib
import json
import math
import sys
from typing import TYPE_CHECKING, Any

import torch

from lossytp.network.counters import Counters
from lossytp.parallel.dense_places import places
from lossytp.training.checkpoint_folder import Found
from lossytp.training.inputs import check_same_data, check_same_trace, check_same_weights
from lossytp.training.progress import waiting
from lossytp.training.sharded_files import read_
from lossytp.training.training_state import STATE, TrainingState, counted, of_another_layout
from lossytp.training.weights_file import load_weights_

if TYPE_CHECKING:
    from lossytp.training.loop import Run

COUNTS = ("tokens", "real_tokens", "best", "saved_best", "since_best", "drift", "earlier_seconds", "earlier_packets")
KEPT = (
    "losses",
    "evaluations",
    "step_seconds",
    "resumed",
    "layouts",
    "first_weights",
    *COUNTS,
)  # attributes that checkpoints save as JSON


def training_state(run: "Run") -> TrainingState:
    """Return what checkpoints hold of the model, the optimizer and the network."""
    engine = run.engine
    held = places(engine.module, run.layout)
    return TrainingState(engine.module, held, run.optimizer, run.scaler, run.network)


def save_checkpoint(run: "Run", step: int) -> None:
    """Save the state after a step."""
    plain = {name: getattr(run, name) for name in KEPT}
    plain |= {"data": run.objective.sha256, "trace": run.trace_sha256, "earlier_seconds": run.total_seconds()}
    state = training_state(run)
    own = {**state.own(), "position": run.objective.state_dict(), "plain": json.dumps(plain)}
    with waiting(f"saving the state after step {step}"):
        run.checkpoints.save(step, state.tensors(), own)


def resume(run: "Run") -> None:
    """Restore the last checkpoint, if there is one."""
    found = run.checkpoints.find()
    if found is None:
        _take_weights(run)
        return
    states = run.checkpoints.own_states(found, (*STATE, "position", "plain"), (*KEPT, "data", "trace"))
    plain = json.loads(states[0]["plain"])
    start_over = run.checkpoints.to_start_over(found.folder)
    fix = f"put the old file back, or {start_over}"
    check_same_data(run.config, plain["data"], run.objective.sha256, str(found.folder), fix)
    check_same_trace(run.config, plain["trace"], str(found.folder), fix)
    own_folder = run.checkpoints.is_own(found.folder)  # not that of another run, from which this one begins
    if own_folder:
        check_same_weights(run.config, plain["first_weights"], str(found.folder))
    run.engine.warm_up(run.objective.batch, run.scaler)
    try:
        run.objective.load_state_dict(states[0]["position"], len(plain["losses"]))
        own = states[0] if found.layout == run.checkpoints.layout else _moved(run, found, states, plain)
        state = training_state(run)
        state.begin_moments_(own["steps"])
        read_(found.folder, state.tensors(run.checkpoints.known(found)))
        state.restore_own_(own)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a state that another program wrote can raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{found.folder} does not belong to this run ({reason}): {start_over}") from error
    for name in KEPT:
        setattr(run, name, plain[name])
    if not own_folder:
        run.saved_best = -math.inf
    run.resumed.append(len(run.losses))


def _take_weights(run: "Run") -> None:
    """Start from the weights that another program saved, if `checkpoint_path` names a file of them."""
    file = run.checkpoints.weights_file()
    if file is None:
        return
    load_weights_(training_state(run).places, file)
    with file.open("rb") as opened:
        run.first_weights = {"file": file.name, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}
    if run.layout.rank == 0:
        print(f"{file} gives the weights; the optimizer, the data and the steps begin anew", file=sys.stderr)


def _moved(run: "Run", found: Found, states: list[dict[str, Any]], plain: dict[str, Any]) -> dict[str, Any]:
    """Return this process's own state after a change of layout.

    Add the change to `plain`, and print it.
    """
    packets = counted(states)
    earlier = Counters()
    earlier.load_state_dict(plain["earlier_packets"])
    packets.add_all(earlier)
    plain["earlier_packets"] = packets.state_dict()
    plain["layouts"].append({"steps": found.step, **found.layout})
    if run.layout.rank == 0:
        print(
            f"{found.folder} is of another layout ({run.checkpoints.changes(found)}). Links that are in both keep "
            "their states, and others start afresh. Replicas start from the first one's weights.",
            file=sys.stderr,
        )
    here = run.layout.data_index, run.layout.pipeline_index
    earlier_places = [found.place(rank) for rank in range(found.processes)]
    like = [rank for rank, place in enumerate(earlier_places) if (place.data_index, place.pipeline_index) == here]
    same_ranks = earlier_places[0].tensor_parallel_size == run.layout.tensor_parallel_size
    return of_another_layout(states, like[0] if like else None, same_ranks=same_ranks)

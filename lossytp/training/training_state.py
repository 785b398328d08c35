"""The state that training steps change: tensors, which any layout can read, and the state that each process has alone.

Parameters and the optimizer's moments are named as in the dense model (`lossytp.parallel.dense_boxes`). A process's
own state has its random generator, its links and what repairs remember. At the layout that wrote a checkpoint, the run
goes on as if it had never stopped, to the last digit. Another layout takes over only what both layouts have.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lossytp.network.counters import Counters
from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.collectives import collective_of
from lossytp.parallel.dense_boxes import Box, Place
from lossytp.training.sharded_files import Piece

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, for each parameter, beside the number of steps
STATE = ("steps", "scaler", "random", "random_cuda", "network", "memories")  # keys of `own`


@dataclass(frozen=True)
class TrainingState:
    """The state of a model and its optimizer on this process.

    The learning rate and the order of the data are not in it: they depend only on the step.
    """

    module: nn.Module
    places: Sequence[Place]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    network: LossyNetwork

    @property
    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    def tensors(self, known: Collection[str] | None = None) -> dict[str, list[Piece]]:
        """Return parameters and moments: this process's pieces of each, in its memory, by name.

        Args:
            known: names in a checkpoint. A copy that is not among them has the name of the first copy.
        """
        pieces: dict[str, list[Piece]] = {}
        for place in self.places:
            moments = self.optimizer.state.get(place.parameter, {})
            for kind, values in {"parameter": place.parameter, **moments}.items():
                for box in place.boxes(values) if kind != "step" else ():
                    name = _name(kind, box, known)
                    pieces.setdefault(name, []).append(Piece(box.shape, box.start, box.view))
        return pieces

    def own(self) -> dict[str, Any]:
        """Return what this process has alone: tensors on the CPU, numbers and text."""
        collective = collective_of(self.module)
        return {
            "steps": {
                name: float(self.optimizer.state[place.parameter]["step"])
                for place in self.places
                if self.optimizer.state.get(place.parameter)
                for name in place.names
            },
            "scaler": self.scaler.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
            "network": json.dumps(self.network.state_dict()),
            "memories": collective.memories_state() if collective is not None else [],
        }

    def begin_moments_(self, steps: dict[str, float]) -> None:
        """Give the optimizer zero moments for each parameter that it has updated."""
        for place in self.places:
            made = [steps[name] for name in place.names if name in steps]
            if made:
                zeros = {name: torch.zeros_like(place.parameter) for name in MOMENTS}
                self.optimizer.state[place.parameter] = {"step": torch.tensor(made[0]), **zeros}

    def restore_own_(self, state: dict[str, Any]) -> None:
        """Restore what `own` returned."""
        self.scaler.load_state_dict(state["scaler"])
        if state["random"] is not None:
            torch.set_rng_state(state["random"])
        if self._device.type == "cuda" and state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"], self._device)
        self.network.load_state_dict(json.loads(state["network"]))
        collective = collective_of(self.module)
        if collective is not None:
            collective.load_memories_state(state["memories"], self._device)


def of_another_layout(states: Sequence[dict[str, Any]], like: int | None, *, same_ranks: bool) -> dict[str, Any]:
    """Return a process's own state from those of all processes of another layout.

    Links that are in both layouts go on. Its counters are empty: `counted` adds them up.

    Args:
        states: by rank.
        like: the process whose random generator this one takes over, or None if the replica is new.
        same_ranks: whether there are as many tensor-parallel ranks, so that what repairs remember is of use.
    """
    networks = [json.loads(state["network"]) for state in states]
    merged = {**networks[0], "counters": Counters().state_dict()}
    for kind in ("links", "normals"):
        merged[kind] = list({json.dumps(link): [link, kept] for each in networks for link, kept in each[kind]}.values())
    memories: dict[Any, list] = {}
    for state in states if same_ranks else ():
        for site, memory in state["memories"]:
            memories.setdefault(site and tuple(site), []).extend(memory)
    return {
        "steps": {name: step for state in states for name, step in state["steps"].items()},
        "scaler": states[0]["scaler"],
        "random": None if like is None else states[like]["random"],
        "random_cuda": None if like is None else states[like]["random_cuda"],
        "network": json.dumps(merged),
        "memories": [[site, memory] for site, memory in memories.items()],
    }


def counted(states: Sequence[dict[str, Any]]) -> Counters:
    """Return what all processes counted.

    Raises:
        ValueError: if they disagree.
    """
    total = Counters()
    for state in states:
        each = Counters()
        each.load_state_dict(json.loads(state["network"])["counters"])
        total.merge(each)
    return total


def _name(kind: str, box: Box, known: Collection[str] | None) -> str:
    name = f"{kind} {box.name}{box.copy}"
    return name if known is None or name in known else f"{kind} {box.name}"

"""Save an unfinished run's state, so that the same command resumes it as if it had never been stopped.

Each checkpoint is a folder `step-N`. It is written beside the others under another name, and renamed once it is whole
and on the disk. Its file `checkpoint.json` has the run's configuration and the checksums of all other files. So a run
that is killed at any moment harms no earlier checkpoint, and a damaged one is noticed.
"""

import io
import json
import sys
from pathlib import Path
from typing import Any

import torch

from lossytp.network.lossy_network import LossyNetwork
from lossytp.parallel.dense_boxes import is_first_copy
from lossytp.parallel.layout import Layout
from lossytp.parallel.replicas import gathered, on_rank_zero
from lossytp.training.checkpoint_folder import (
    FOLDER,
    LAYOUT,
    MARKER,
    Found,
    candidates,
    first_weights,
    home,
    layout_of,
    number_of,
    read_marker,
    run_name,
    steps_in,
)
from lossytp.training.config import RunSettings
from lossytp.training.files import crc32_of, saving, sync_names, write_atomically
from lossytp.training.own_files import claim, is_marked, others, refuse, remove, remove_parts
from lossytp.training.sharded_files import INDEX, Pieces, read_, shapes, whole, write

FILES = ("step-*", ".step-*.part")
WRITTEN = (MARKER, f"{INDEX}*", "__*.distcp")  # in a checkpoint
OLD_MARKER = "step.json"


class Checkpoints:
    """Save and load a run's checkpoints, and keep the last ones. All processes must call each method."""

    def __init__(self, config: RunSettings, layout: Layout, network: LossyNetwork) -> None:
        self._config, self._network = config, network
        self._rank, self._processes = layout.rank, layout.world_size
        self.folder = on_rank_zero(lambda: home(config), network)

    def check(self) -> None:
        """Raise ValueError if the checkpoints' folder holds the user's files."""
        on_rank_zero(self._check, self._network)

    @property
    def layout(self) -> dict[str, Any]:
        """Return the layout of this run, by name."""
        return layout_of(self._processes, self._config.result_settings())

    def changes(self, found: Found) -> str:
        """Return how this run's layout differs from that of a checkpoint."""
        mine = self.layout
        return ", ".join(f"{name} {then} -> {mine[name]}" for name, then in found.layout.items() if then != mine[name])

    def save(self, step: int, tensors: Pieces, own: dict[str, Any]) -> None:
        """Save the state after `step`: this process's pieces of tensors, and its `own` state.

        Raises:
            ValueError: if it cannot be written; the previous checkpoint stays.
        """
        self.folder = on_rank_zero(self._folder_to_write, self._network)
        part = self.folder / f".step-{step}.part"
        on_rank_zero(lambda: self._begin(part), self._network)
        with saving(self.folder / f"step-{step}"):
            try:
                names = write(part, {**tensors, _own_name(self._rank): whole(_as_bytes(own))}, self._network)
                everyones = gathered({name: crc32_of(part / name) for name in names}, self._network)
                sums = {name: crc for each in everyones for name, crc in each.items()}
                on_rank_zero(lambda: self._end(part, step, sums), self._network)
            except Exception:
                remove(part)
                raise

    def find(self) -> Found | None:
        """Return the newest whole checkpoint to resume from, or None if there is none.

        Raises:
            ValueError: if it is of another configuration, or damaged and there is no older one.
        """
        return on_rank_zero(self._find, self._network)

    def known(self, found: Found) -> set[str]:
        """Return the names of the tensors to read from a checkpoint.

        If the number of copies changed, only the first copies are read.
        """
        sizes = [
            [layout[f"{kind}_parallel_size"] for kind in ("tensor", "data")] for layout in (found.layout, self.layout)
        ]
        return {name for name in shapes(found.folder) if sizes[0] == sizes[1] or is_first_copy(name)}

    def own_states(self, found: Found, names: tuple[str, ...], plain: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return this process's own state; if the layout has changed, those of all processes that wrote it.

        Args:
            found: the checkpoint.
            names: of the entries that each state must have.
            plain: names that its JSON entry "plain" must have.

        Raises:
            ValueError: if a state cannot be read, or lacks a name.
        """
        same = found.layout == self.layout
        try:
            sizes = shapes(found.folder)
            states = []
            for rank in (self._rank,) if same else range(found.processes):
                contents = torch.empty(sizes[_own_name(rank)], dtype=torch.uint8)
                read_(found.folder, {_own_name(rank): whole(contents)})
                states.append(torch.load(io.BytesIO(contents.numpy().tobytes()), weights_only=True))
                kept = json.loads(states[-1].get("plain", "{}"))
                lacking = [name for name in names if name not in states[-1]] or [x for x in plain if x not in kept]
                if lacking:
                    raise ValueError(f"it lacks {', '.join(lacking)}")
        except Exception as error:
            reason = " ".join(str(error).split())[:100]
            raise ValueError(f"{found.folder} cannot be read ({reason}): {self.to_start_over(found.folder)}") from error
        return states

    def to_start_over(self, folder: Path) -> str:
        """Return how to start without a checkpoint: delete it only if it is this run's."""
        remedy = f"delete {folder}" if self.is_own(folder) else "leave checkpoint_path out"
        return f"{remedy} to start over"

    def remove(self) -> None:
        """Delete the checkpoints of a finished run, which needs none."""
        on_rank_zero(lambda: remove(self.folder), self._network)

    def _check(self) -> None:
        if (self.folder / OLD_MARKER).exists():
            raise ValueError(
                f"{self.folder} is of an older version, which this one cannot read: delete it to start over, or finish "
                "the run with that version"
            )
        if not is_marked(self.folder):
            refuse(others(self.folder))
            return
        remove_parts(self.folder, FILES)
        for part in self.folder.glob(".step-*.part"):
            remove(part)

    def _folder_to_write(self) -> Path:
        """Return the folder, unless it was new when the run began, and another run has begun to write there since."""
        own = Path(self._config.output_dir) / FOLDER
        folder = own if self.folder == own else home(self._config)
        if folder != self.folder:
            print(f"{self.folder} is no longer this run's to write: checkpoints go to {folder}", file=sys.stderr)
        return folder

    def _begin(self, part: Path) -> None:
        claim(self.folder, FILES, run_name(self._config))
        remove(part)
        claim(part, WRITTEN)

    def _end(self, part: Path, step: int, sums: dict[str, int]) -> None:
        """Finish the part, rename it, and delete older checkpoints."""
        unseen = [name for name in sums if not (part / name).is_file()]
        if unseen:
            raise ValueError(
                f"{part / unseen[0]} was written on another machine, and is not here: give an output_dir that all "
                "machines see"
            )
        marker = {
            "step": step,
            "run": run_name(self._config),
            "processes": self._processes,
            "config": self._config.result_settings(),
            "files": sums,
        }
        write_atomically(part / MARKER, json.dumps(marker))
        sync_names(part)
        finished = self.folder / f"step-{step}"
        remove(finished)
        part.rename(finished)
        sync_names(self.folder)
        steps = steps_in(self.folder)
        kept = [each for each in steps if number_of(each) <= step][-self._config.keep_checkpoints :]
        for each in steps:
            if each not in kept:
                remove(each)

    def _find(self) -> Found | None:
        """Return the newest whole checkpoint, once it is checked."""
        damage: list[tuple[Path, str]] = []
        for folder in candidates(self.folder, self._config.checkpoint_path):
            try:
                found = read_marker(folder)
            except ValueError as error:
                damage.append((folder, str(error)))
                continue
            self._check_config(found)
            for damaged, reason in damage:
                print(f"{damaged} is damaged ({reason}): resuming from {folder} instead", file=sys.stderr)
            return found
        if damage:
            folder, reason = damage[0]
            raise ValueError(f"{folder} is damaged ({reason}): {self.to_start_over(folder)}")
        return None

    def weights_file(self) -> Path | None:
        """Return the file of weights with which `checkpoint_path` begins the run; None if it names no such file."""
        return on_rank_zero(lambda: first_weights(self.folder, self._config.checkpoint_path), self._network)

    def _check_config(self, found: Found) -> None:
        written = {**self._config.result_defaults(), **found.config}
        changed = [name for name in self._config.differences(written) if name not in LAYOUT]
        if changed:
            raise ValueError(
                f"{found.folder} belongs to an unfinished run with {self._config.compared(changed, written)}: "
                + ("give another output_dir, or " if self.is_own(found.folder) else "")
                + self.to_start_over(found.folder)
            )
        if found.layout != self.layout:
            self._check_layout(found)

    def is_own(self, folder: Path) -> bool:
        """Return whether a checkpoint lies in this run's folder."""
        return folder.parent.resolve() == self.folder.resolve()

    def _check_layout(self, found: Found) -> None:
        """Raise ValueError if the run cannot go on at this layout."""
        settings = [found.config, self._config.result_settings()]
        copies = [
            (each["tensor_parallel_size"], each["data_parallel_size"])
            for each in settings
            if each["replicated_gradients"] != "reliable"
        ]
        reasons = {
            "each rank's copies have drifted away from the others'": len(set(copies)) > 1,
            "the packets that it really sent are recorded by link": self._config.transport == "udp",
        }
        for reason, holds in reasons.items():
            if holds:
                raise ValueError(
                    f"{found.folder} is of another layout ({self.changes(found)}), and {reason}: start the run as it "
                    "was, or give another output_dir"
                )


def _own_name(rank: int) -> str:
    return f"state of process {rank}"


def _as_bytes(state: dict[str, Any]) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)

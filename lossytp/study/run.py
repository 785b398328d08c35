"""Run a notebook with parameters: `python -m lossytp.study.run NOTEBOOK OUTPUT --parameters JSON`.

papermill's own command line shows errors as tracebacks, and cannot put the kernel's sockets where parallel kernels do
not clash.
"""

import json
import logging
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import papermill
import psutil
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config

from lossytp.network.checks import check_names, refuse_if
from lossytp.study.parameters import IN_ONE_LINE
from lossytp.training.command_line import Parser, run_as_command
from lossytp.training.files import check_writable

WATCH_SECONDS = 0.5
CHECKS = "lossytp.study.parameters"  # a notebook that imports it checks its parameters itself
NO_WIDGETS = "ignore:IProgress not found"  # tqdm's advice to install widgets, which papermill does not need


def execute(notebook: Path, output: Path, parameters: dict[str, Any]) -> None:
    """Run `notebook`, save it to `output`, and copy its stderr to this process's stderr."""
    if not notebook.is_file():
        raise ValueError(f"{notebook} does not exist: give the path of a notebook")
    if CHECKS not in notebook.read_text(encoding="utf-8"):
        check_names(parameters, papermill.inspect_notebook(str(notebook)))
    if output.is_dir():
        raise ValueError(f"{output} is a folder: give the path of a file")
    check_writable(str(output.parent), "the folder of OUTPUT")
    filters = dict.fromkeys(filter(None, [*os.environ.get("PYTHONWARNINGS", "").split(","), NO_WIDGETS]))
    os.environ["PYTHONWARNINGS"] = ",".join(filters)  # for the kernel, which takes this process's environment
    with tempfile.TemporaryDirectory(prefix="ltp") as sockets:  # a short path: ipc socket names are limited
        config = Config()
        config.KernelManager.transport = "ipc"
        config.KernelManager.ip = f"{sockets}/k"
        config.KernelManager.connection_file = f"{sockets}/kernel.json"
        try:
            papermill.execute_notebook(
                str(notebook),
                str(output),
                parameters=parameters,
                config=config,
                kernel_name="python3",
                shutdown_kernel="immediate",
                progress_bar=False,
                log_output=True,
                cwd=str(Path.cwd()),
            )
        except PapermillExecutionError as error:
            if error.ename in [each.__name__ for each in IN_ONE_LINE]:
                raise ValueError(f"{notebook.name}: {error.evalue}") from error
            raise


def end_with(pid: int) -> None:
    """Kill this process and its kernel once process `pid` is gone, so that a killed run leaves no orphan."""
    try:
        watched = psutil.Process(pid)
    except psutil.NoSuchProcess:
        os._exit(1)

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):  # it may end between the two calls
            while watched.is_running() and watched.status() != psutil.STATUS_ZOMBIE:
                time.sleep(WATCH_SECONDS)
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # if one child has just ended, kill the others all the same
                child.kill()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Run a notebook as the command line says."""
    parser = Parser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--parameters", default="{}", help="JSON object")
    arguments = parser.parse_args()
    watched = os.environ.get("LOSSYTP_RUN_PID")
    if watched is not None:
        refuse_if(not watched.isdecimal(), "LOSSYTP_RUN_PID", watched, "is not a process number: give one, or unset it")
        end_with(int(watched))
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    logging.getLogger("papermill").setLevel(logging.ERROR)  # parameters are checked, so its warnings of them say less
    try:
        parameters = dict(json.loads(arguments.parameters))
    except (ValueError, TypeError) as error:
        raise ValueError(f"--parameters {arguments.parameters!r} is no JSON object ({error}): give one") from error
    execute(arguments.notebook, arguments.output, parameters)


if __name__ == "__main__":
    run_as_command(main)

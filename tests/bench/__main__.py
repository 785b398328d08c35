"""Measure speed ratios, into a JSON file for each line: `./run_all.sh bench [--line NAME] [--again] [--folder FOLDER]`.

A line that has a record of this code and this processor is not measured again without --again or --line. A line is
written as soon as it is measured, so you can stop at any moment. Run it on a quiet machine: 13 minutes on 2 cores.
"""

import time
from pathlib import Path

from lossytp.training.command_line import Parser, run_as_command
from tests.bench import pretraining, processes, steps
from tests.bench.measure import LINES, NotHere, is_recorded, one_thread, record_of, write

MODULES = (steps, pretraining, processes)  # they define the lines


def measure(name: str, file: Path) -> None:
    """Measure a line, write it, and print it."""
    start = time.perf_counter()
    print(f"{LINES[name].what}, against {LINES[name].against}", flush=True)
    try:
        record = record_of(name, LINES[name].measure())
    except NotHere as error:
        print(f"  left out: {error}", flush=True)
        return
    write(file, record)
    for arm, found in record["ratios"].items():
        low, high = found["quartiles"]
        target = f", {found['target']}" if found["target"] else ""
        print(f"  {arm:32} {found['ratio']:8.3f} ({low:.3f} to {high:.3f}){target}", flush=True)
    print(f"  measured in {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    parser = Parser(prog="./run_all.sh bench", description=__doc__)
    parser.add_argument("--line", action="append", choices=LINES, metavar="NAME", help=f"one of {', '.join(LINES)}")
    parser.add_argument("--again", action="store_true", help="measure what has a record, too")
    parser.add_argument("--folder", type=Path, default=Path("results/bench"))
    given = parser.parse_args()
    one_thread()
    for name in given.line or LINES:
        file = given.folder / f"{name}.json"
        if given.again or given.line or not is_recorded(file):
            measure(name, file)


if __name__ == "__main__":
    run_as_command(main)

"""Turn losses that another program recorded into a trace.

python -m lossytp.probe import losses.txt                                  # zeros and ones, 1 for a lost packet
python -m lossytp.probe import log.csv --column state --ones arrived --where link=uplink --output uplink.parquet

It also reads .npy arrays, .parquet tables, tables with one flow per row (whose packets are a string of zeros and ones),
and text compressed with gzip.
"""

from pathlib import Path
from typing import Literal

from lossytp.network.checks import printable
from lossytp.network.importing import import_trace
from lossytp.network.traces import write_trace
from lossytp.probe.measure import caveats
from lossytp.probe.recorded import first_word_as
from lossytp.training.command_line import parse
from lossytp.training.files import saving
from lossytp.training.settings import Settings


class ImportConfig(Settings):
    """The settings of the command `import`."""

    file: str
    """File to read. The command's first word may give it."""
    column: str | None = None
    """Column of a table that holds the losses. If left out, lost, received, success or the like, or else the only
    column of zeros and ones."""
    where: str | None = None
    """NAME=VALUE: read only those rows of a table whose column NAME has this value."""
    ones: Literal["lost", "arrived"] | None = None
    """What a 1 stands for. If left out, arrived in a column named received, success or the like, else lost."""
    output: str | None = None
    """Trace to write. If left out, the file's name with the ending .parquet, in the current folder."""


def main(words: list[str]) -> None:
    """Read the file and write the trace."""
    config: ImportConfig = parse(ImportConfig, __doc__, first_word_as("--file", words))
    file = Path(config.file)
    output = Path(f"{Path(file.name.removesuffix('.gz')).stem}.parquet" if config.output is None else config.output)
    if output.suffix != ".parquet":
        raise ValueError(f"output = {config.output!r} does not end in .parquet: give {output.stem}.parquet")
    if output.exists() and output.samefile(file):
        raise ValueError(f"output = {str(output)!r} is the file to read: give --output {output.stem}_trace.parquet")
    trace = import_trace(file, column=config.column, where=config.where, ones=config.ones)
    with saving(output):
        write_trace(output, trace)
    lost, source = trace.all_lost(), printable(trace.source)
    print(f"{source}: {len(trace.flows)} flows, {len(lost)} packets, {int(lost.sum())} lost; see {output}")
    for line in caveats(trace):
        print(line)

"""Measure how much packet loss a language model bears, without training.

python -m lossytp.tolerance --model_name smollm2-135m
python -m lossytp.tolerance --model_name path/to/model --text "notes/*.txt" --loss_rates 0.01,0.05 --phases both
"""

import sys
from pathlib import Path

from tqdm import tqdm

from lossytp.parallel.group import rank_and_world_size
from lossytp.tolerance.config import Setup, ToleranceConfig
from lossytp.training.command_line import parse, run_as_command
from lossytp.training.models import check_there
from lossytp.training.progress import waiting

COLUMNS = "{:9} {:6} {:{width}} {:>9} {:>20} {:>9} {:>5}"
TITLES = ("algorithm", "phase", "repair", "loss rate", "rise (nats)", "collapsed", "draws")
DECODED = ("same", "degenerate", "rise")
DECODED_COLUMNS = "{:9} {:6} {:8} {:{width}} {:>9} {:>12} {:>13} {:>15} {:>13}"
DECODED_TITLES = (
    *("algorithm", "phase", "prefill", "repair", "loss rate"),
    *("same tokens", "degenerate", "rise (nats)", "packets/token"),
)


def main() -> None:
    """Measure as the command line says."""
    measure_and_print(parse(ToleranceConfig, __doc__))


def measure_and_print(config: ToleranceConfig) -> None:
    """Measure, print each row of the table as it is finished, and end with advice."""
    if rank_and_world_size()[1] > 1:
        raise ValueError("lossytp.tolerance runs in one process, with virtual ranks: start it without torchrun")
    check_there(config.model_name)
    config.files()

    with waiting("importing torch"):
        from lossytp.training.folder import exclusive_run  # it takes seconds: check arguments first

    with exclusive_run(config.output_dir):  # another measurement there would overwrite this one's rows
        (_decode_and_print if config.decode else _measure_and_print)(config)


def _measure_and_print(config: ToleranceConfig) -> None:
    with waiting("importing transformers"):
        from lossytp.tolerance.measure import (
            FIGURE,
            RECORD,
            Measurement,
            Row,
            advice,
            draw,
            keep_advice,
            keep_rows,
            load_rows,
        )

    done = load_rows(config)
    measurement = Measurement(config)
    tokens = measurement.blocks_NT.numel()
    first = "".join(f", each block after {' '.join(names)}" for names in measurement.first_tokens.values())
    text = f"{tokens} tokens of {config.with_text().text}{first}"
    width = max(14, *(len(setup.repair) for setup in config.setups()))
    print(
        f"{config.model_name} on {text}, {measurement.ranks} tensor-parallel ranks: {measurement.lossless:.3f} nats a "
        f"token without losses\n\n{COLUMNS.format(*TITLES, width=width)}",
        flush=True,
    )
    bar = tqdm(unit="draw", leave=False, disable=not sys.stderr.isatty())

    def drawn(setup: Setup, number: int) -> None:
        bar.set_description(f"{setup.repair} at {setup.loss_rate:g}", refresh=False)
        bar.update()

    rows: list[Row] = []
    for row in keep_rows(measurement, done, drawn):
        rows.append(row)
        algorithm, phase, repair, rate = row.setup
        rise = f"{row.rise.value:.4f} ± {row.rise.high - row.rise.value:.4f}"
        values = (algorithm, phase, repair, f"{rate:.3g}", rise, f"{row.collapsed:.0%}", len(row.rises))
        bar.write(COLUMNS.format(*values, width=width), file=sys.stdout)
        sys.stdout.flush()
    bar.close()
    lines = advice(rows)
    keep_advice(measurement, lines)
    draw(rows, config.model_name, Path(config.output_dir))
    print("", *lines, "", f"see {config.output_dir}/{RECORD} and {FIGURE}.png there", sep="\n")


def _decode_and_print(config: ToleranceConfig) -> None:
    with waiting("importing transformers"):
        from lossytp.tolerance.decode import DECODING, Decoder, load_decoded

    done = load_decoded(config)
    decoder = Decoder(config)
    width = max(14, *(len(setup.repair) for setup in config.setups()))
    print(
        f"{config.model_name}, {config.prompts} prompts of {config.prompt_tokens} tokens of {config.with_text().text}, "
        f"continued by {config.new_tokens} tokens over {decoder.ranks} tensor-parallel ranks\n"
        f"{decoder.message_of_a_token()}\n"
        f"Without losses, {decoder.degenerate:.0%} of the continuations degenerate, and they have "
        f"{decoder.lossless_N.mean():.3f} nats a token.\n\n{DECODED_COLUMNS.format(*DECODED_TITLES, width=width)}",
        flush=True,
    )
    bar = tqdm(unit="draw", leave=False, disable=not sys.stderr.isatty())
    for row in decoder.rows(done, bar.update):
        estimates = [f"{row[name]['value']:.3g} ± {row[name]['high'] - row[name]['value']:.2g}" for name in DECODED]
        values = [row["algorithm"], row["phase"], row["prefill"], row["repair"], f"{row['loss_rate']:.3g}"]
        line = DECODED_COLUMNS.format(*values, *estimates, f"{row['packets']:.0f}", width=width)
        bar.write(line, file=sys.stdout)
        sys.stdout.flush()
    bar.close()
    print(f"\nsee {config.output_dir}/{DECODING}")


if __name__ == "__main__":
    run_as_command(main)

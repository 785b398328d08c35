"""Measure how much packet loss a language model bears, without training.

python -m lossytp.tolerance --model_name smollm2-135m
python -m lossytp.tolerance --model_name path/to/model --text "notes/*.txt" --loss_rates 0.01,0.05
"""

import sys
from pathlib import Path

from tqdm import tqdm

from lossytp.parallel.group import rank_and_world_size
from lossytp.tolerance.config import ToleranceConfig
from lossytp.training.command_line import parse, run_as_command
from lossytp.training.models import check_there
from lossytp.training.progress import waiting

DECODED = {"same": "same tokens", "degenerate": "degenerate", "rise": "rise (nats)"}
DECODED_COLUMNS = "{:9} {:6} {:8} {:{width}} {:>9} {:>12} {:>13} {:>15} {:>13}"


def main() -> None:
    """Measure as the command line says."""
    measure_and_print(parse(ToleranceConfig, __doc__))


def measure_and_print(config: ToleranceConfig) -> None:
    """Measure, and print what losses cost: all that `lossytp.tolerance.report` says."""
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
        from lossytp.tolerance.measure import RECORD, Measurement, Record, measure
        from lossytp.tolerance.report import FIGURE, draw, lines, report_of, table

    record = Record(config)
    measurement = Measurement(config)
    blocks, tokens = measurement.blocks_NT.shape
    first = "".join(f", each after {' '.join(names)}" for names in measurement.first_tokens.values())
    print(
        f"{config.model_name} on {blocks} sequences of {tokens} tokens of {config.text_name()}{first}; "
        f"{measurement.ranks} tensor-parallel ranks, {config.batch_size} sequences a message",
        flush=True,
    )
    bar = tqdm(unit="step", leave=False, disable=not sys.stderr.isatty())

    def drawn(name: str) -> None:
        bar.set_description(name or None, refresh=False)
        bar.update()

    reports, names = [], []
    for measured in measure(measurement, record, drawn):
        reports.append(report_of(measured, config))
        names.append("_".join([FIGURE, *(measured[:2] if len(config.networks()) > 1 else ())]))
        draw(measured, reports[-1], config.model_name, Path(config.output_dir), names[-1])
        bar.write("\n".join(["", *lines(reports[-1], config), *table(reports[-1])]), file=sys.stdout)
        sys.stdout.flush()
    bar.close()
    record.write(reports=[each.as_json() for each in reports])
    print(f"\nsee {config.output_dir}/{RECORD} and {names[0]}.png there")


def _decode_and_print(config: ToleranceConfig) -> None:
    with waiting("importing transformers"):
        from lossytp.tolerance.decode import DECODING, Decoder, load_decoded

    done = load_decoded(config)
    decoder = Decoder(config)
    width = max(14, *(len(setup.repair) for setup in config.setups()))
    titles = ("algorithm", "phase", "prefill", "repair", "loss rate", *DECODED.values(), "packets/token")
    print(
        f"{config.model_name}, {config.prompts} prompts of {config.prompt_tokens} tokens of {config.text_name()}, "
        f"continued by {config.new_tokens} tokens over {decoder.ranks} tensor-parallel ranks\n"
        f"{decoder.message_of_a_token()}\n"
        f"Without losses, {decoder.degenerate:.0%} of the continuations degenerate, and they have "
        f"{decoder.lossless_N.mean():.3f} nats a token.\n\n{DECODED_COLUMNS.format(*titles, width=width)}",
        flush=True,
    )
    bar = tqdm(unit="draw", leave=False, disable=not sys.stderr.isatty())
    for row in decoder.rows(done, bar.update):
        estimates = [f"{row[name]['value']:.3g} ± {row[name]['high'] - row[name]['value']:.2g}" for name in DECODED]
        values = [*(row[name] for name in titles[:4]), f"{row['loss_rate']:.3g}", *estimates, f"{row['packets']:.0f}"]
        bar.write(DECODED_COLUMNS.format(*values, width=width), file=sys.stdout)
        sys.stdout.flush()
    bar.close()
    print(f"\nsee {config.output_dir}/{DECODING}")


if __name__ == "__main__":
    run_as_command(main)

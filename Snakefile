"""The graph of the study: experiments -> records -> figures -> paper. Run it with ./run_all.sh.

Config: `profile` (smoke, small, laptop or paper) and `figures_only` (draw the finished runs, and start none). The laptop
profile runs some of the paper's cells again and compares them with the published ones. A profile of your own, whose
grids do not have 01_tolerance, ends with experiment_summary.csv, without figures and a text.
"""

import csv
import json
import os
from pathlib import Path

from lossytp.study.grid import load_experiments

PROFILE = config.get("profile", "laptop")
RESULTS = f"results/{PROFILE}"
REPRODUCES = PROFILE == "laptop"
TEXT = "lossytp" if PROFILE == "paper" else "report"
CELLS_EXIST = bool(config.get("figures_only"))
CHECKS = ["channel.csv", "bursts.csv", "baseline.json", "collective_errors.csv", "collective_times.csv", "step_times.csv"]
FEW_STEPS = {"samples": 2, "bandwidths_gbits": [10], "round_trips_us": [100], "loss_rates": [0.0, 0.2], "tokens": 256}
NUM_PACKETS = {"smoke": 1_000_000}.get(PROFILE, 10_000_000)

EXPERIMENTS = load_experiments(Path("notebooks/experiments"), PROFILE, Path(RESULTS))
FOLDERS = sorted(frozenset().union(*(experiment.folders for experiment in EXPERIMENTS)))
RECORDS = [f"{folder}/record.json" for folder in FOLDERS]
TABLES = [output for experiment in EXPERIMENTS for output in experiment.outputs]
TOLERANCE = [cell.config for each in EXPERIMENTS if each.name == "01_tolerance" for cell in each.cells]
OWN = not TOLERANCE  # grids that are not the study's
CHECKS = [] if OWN else CHECKS
FIGURES = [] if OWN else [f"{RESULTS}/figures/{name}.svg" for name in ("tolerance", "burst_lengths")]
BASELINES = list({each.data.dataset: each.as_dict() for each in TOLERANCE}.values())  # one cell per task
SUMMARY = Path(RESULTS) / "experiment_summary.csv"  # lists the runs in the figures
DRAWN = {row["run"] for row in csv.DictReader(SUMMARY.open(encoding="utf-8"))} if SUMMARY.exists() else set()
INFERENCE = "--model_name gpt2-nano --text stdlib --loss_rates 0.1 --repairs 'hadamard(64)' --min_draws 6 --max_draws 6"
RUN = "python -m lossytp.study.run notebooks/{params.notebook}.ipynb {log} --parameters {params.values:q}"

if workflow.remote_exec:  # on a cluster ./run_all.sh is on another machine, so the notebook ends with its job
    os.environ["LOSSYTP_RUN_PID"] = str(os.getpid())


localrules:
    all,
    figures,
    paper,
    reproduction,


rule all:
    input:
        # listed, because existing figures alone would not make Snakemake run a missing cell
        [] if CELLS_EXIST else [*RECORDS, *TABLES],
        [] if CELLS_EXIST or REPRODUCES else [f"{RESULTS}/{name}" for name in CHECKS],
        f"{RESULTS}/inference/tolerance.json" if PROFILE == "paper" and not CELLS_EXIST else [],
        f"{RESULTS}/reproduction.pdf" if REPRODUCES else str(SUMMARY) if OWN else f"{RESULTS}/{TEXT}.pdf",


rule paper:
    input:
        f"{RESULTS}/paper.json",
        FIGURES,
        sorted(str(file) for file in Path("paper").iterdir() if file.suffix in (".typ", ".csv", ".bib")),
    output:
        f"{RESULTS}/{TEXT}.pdf",
    shell:
        "python -m paper.study paper/{TEXT}.typ {output} --results {RESULTS}"


rule figures:
    input:
        # in a fresh clone every file is new, so a drawn record's age means nothing; its folder's name holds its hash
        [] if CELLS_EXIST else [ancient(file) if Path(file).parent.name in DRAWN else file for file in RECORDS],
        [f"{RESULTS}/{name}" for name in CHECKS] if not CELLS_EXIST else [],
        TABLES if not CELLS_EXIST else [],
        "notebooks/50_figures.ipynb",
        sorted(str(file) for file in Path(RESULTS).glob("real_model/**/*") if file.suffix in (".json", ".csv")),
        sorted(str(file) for file in [*Path(RESULTS).glob("predictions/*.csv"), *Path("models").glob("*/pretrain.json")]),
        sorted(str(file) for file in Path("notebooks").rglob("*.yaml")),
        sorted(str(file) for each in ("lossytp/network", "lossytp/training", "lossytp/study", "paper") for file in Path(each).rglob("*.py")),
    output:
        f"{RESULTS}/paper.json",
        f"{RESULTS}/experiment_summary.csv",
        FIGURES,
    log:
        f"{RESULTS}/notebooks/50_figures.ipynb",
    params:
        notebook="50_figures",
        values=json.dumps(
            {"profile": PROFILE, "results_dir": RESULTS, "experiments_dir": "notebooks/experiments"}
        ),
    shell:
        RUN


rule reproduction:
    input:
        RECORDS,
        f"{RESULTS}/inference/tolerance.json",
        "paper/reproduction.typ",
        "paper/numbers.typ",
        ancient("notebooks/51_reproduction.ipynb"),
    output:
        f"{RESULTS}/reproduction.json",
        f"{RESULTS}/figures/reproduction.svg",
        f"{RESULTS}/reproduction.pdf",
    log:
        f"{RESULTS}/notebooks/51_reproduction.ipynb",
    params:
        notebook="51_reproduction",
        values=json.dumps(
            {
                "profile": PROFILE,
                "results_dir": RESULTS,
                "published_dir": "results/paper",
                "experiments_dir": "notebooks/experiments",
            }
        ),
    shell:
        RUN + " && python -m paper.study paper/reproduction.typ {output[2]} --results {RESULTS}"


if not CELLS_EXIST:

    rule inference:
        output:
            f"{RESULTS}/inference/tolerance.json",
        shell:
            "python -m paper.inference {INFERENCE} --output_dir {RESULTS}/inference > /dev/null"

    rule channel_check:
        input:
            ancient("notebooks/10_channel_check.ipynb"),
        output:
            f"{RESULTS}/channel.csv",
            f"{RESULTS}/bursts.csv",
        log:
            f"{RESULTS}/notebooks/10_channel_check.ipynb",
        params:
            notebook="10_channel_check",
            values=json.dumps({"results_dir": RESULTS, "num_packets": NUM_PACKETS}),
        shell:
            RUN

    rule collectives:
        input:
            ancient("notebooks/12_collectives.ipynb"),
        output:
            f"{RESULTS}/collective_errors.csv",
            f"{RESULTS}/collective_times.csv",
        log:
            f"{RESULTS}/notebooks/12_collectives.ipynb",
        params:
            notebook="12_collectives",
            values=json.dumps(
                {"results_dir": RESULTS} | ({"num_messages": 4, "samples": 100} if PROFILE == "smoke" else {})
            ),
        shell:
            RUN

    rule step_times:
        input:
            ancient("notebooks/13_step_times.ipynb"),
        output:
            f"{RESULTS}/step_times.csv",
        log:
            f"{RESULTS}/notebooks/13_step_times.ipynb",
        params:
            notebook="13_step_times",
            values=json.dumps({"results_dir": RESULTS} | (FEW_STEPS if PROFILE == "smoke" else {})),
        shell:
            RUN

    rule task_baseline:
        input:
            ancient("notebooks/15_task_baseline.ipynb"),
        output:
            f"{RESULTS}/baseline.json",
        priority: 1
        log:
            f"{RESULTS}/notebooks/15_task_baseline.ipynb",
        params:
            notebook="15_task_baseline",
            values=json.dumps({"results_dir": RESULTS, "cells": BASELINES}),
        shell:
            RUN

    earlier = frozenset()  # cells of the experiments so far, which the next ones may share
    for experiment in EXPERIMENTS:
        batches = experiment.batches(earlier)
        earlier |= experiment.folders
        for number, cells in enumerate(batches):

            rule:
                name:
                    f"{experiment.name}_{number:02d}"
                input:
                    ancient(f"notebooks/{experiment.notebook}.ipynb"),
                output:
                    # update() keeps the records of an interrupted batch, and tables whose rows need deleted models
                    update([*(f"{cell.output.output_dir}/record.json" for cell in cells), *experiment.outputs]),
                log:
                    f"{RESULTS}/notebooks/{experiment.name}-{number:02d}.ipynb",
                params:
                    notebook=experiment.notebook,
                    values=json.dumps(
                        {"cells": [cell.as_dict() for cell in cells]}
                        | ({"results_dir": RESULTS} if experiment.outputs else {})
                    ),
                threads: experiment.processes
                retries: 1
                shell:
                    RUN

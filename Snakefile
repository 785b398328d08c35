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
CELLS_EXIST = bool(config.get("figures_only"))
CHECKS = ["channel.csv", "bursts.csv", "collective_errors.csv", "collective_times.csv", "step_times.csv"]
FEW_STEPS = {"samples": 2, "bandwidths_gbits": [10], "round_trips_us": [100], "loss_rates": [0.0, 0.2], "tokens": 256}
NUM_PACKETS = {"smoke": 1_000_000}.get(PROFILE, 10_000_000)

EXPERIMENTS = load_experiments(Path("notebooks/experiments"), PROFILE, Path(RESULTS))
FOLDERS = {experiment.name: sorted(experiment.folders) for experiment in EXPERIMENTS}
RECORDS = sorted(frozenset(f"{folder}/record.json" for folders in FOLDERS.values() for folder in folders))
TABLES = [output for experiment in EXPERIMENTS for output in experiment.outputs]
OWN = "01_tolerance" not in FOLDERS  # grids that are not the study's
CHECKS = [] if OWN else CHECKS
SUMMARY = Path(RESULTS) / "experiment_summary.csv"  # lists the runs in the figures
DRAWN = {row["run"] for row in csv.DictReader(SUMMARY.open(encoding="utf-8"))} if SUMMARY.exists() else set()
TASKS = [str(file) for file in Path("notebooks").glob("*.yaml")]
LIBRARY = [str(file) for each in ("network", "study", "tolerance", "training") for file in Path("lossytp", each).glob("*.py")]
LIBRARY.append("lossyprobe/expected_cost.py")

TOLERANCE = ("51_tolerance", ["tolerance"], ["01_tolerance", "01_tolerance_of_both_phases", "03_rings"], [])
PRETRAINING = ["11_pretraining", "18_pretraining_gpt2", "18_pretraining_gpt2_jumbo"]
QUESTIONS = {  # notebook, figures, experiments, and other files below the results
    "paper": (
        TOLERANCE,
        ("52_real_model", ["texts"], [], ["real_model/**/*.*"]),
        ("53_models", ["line", "repairs"], [], ["models*/*.json", "norms/*.json"]),
        ("54_both_phases", ["both_phases"], ["05_masked_backward", "11_pretraining", "11_pretraining_masked"], ["both_phases/*.json"]),
        ("55_pretraining", ["training_losses"], PRETRAINING, []),
        ("56_price", ["price"], PRETRAINING[:1], ["step_times.csv"]),
        ("57_sizes", ["sizes"], ["15_sizes"], ["sizes/*.csv"]),
        ("59_lost_together", [], [], ["lost_together/*.json"]),
    ),
    "laptop": (("58_reproduction", ["reproduction"], list(FOLDERS), []),),
}.get(PROFILE, () if OWN else (TOLERANCE,))
USES = {  # modules
    "53_models": ["second_order"],
    "56_price": ["pretraining", "timing"],
    "58_reproduction": ["models", "second_order"],
    "59_lost_together": ["models", "second_order"],
}
TEXT = {"paper": "lossytp", "laptop": "reproduction"}.get(PROFILE, "report")
ANSWERS = [f"{RESULTS}/answers/{notebook.partition('_')[2]}.json" for notebook, *_ in QUESTIONS]
ALL_RUNS = [] if PROFILE == "laptop" else [str(SUMMARY), f"{RESULTS}/answers/runs.json"]
READ = json.dumps({"profile": PROFILE, "results_dir": RESULTS, "output_dir": RESULTS})
RUN = "python -m lossytp.study.run notebooks/{params.notebook}.ipynb {log} --parameters {params.values:q}"

if workflow.remote_exec:  # on a cluster ./run_all.sh is on another machine, so the notebook ends with its job
    os.environ["LOSSYTP_RUN_PID"] = str(os.getpid())


def records_of(names):
    """Return the records of experiments, and their grids.

    In a fresh clone every file is new, so a drawn record's age means nothing; its folder's name holds its hash.
    """
    folders = [folder for name in names for folder in FOLDERS.get(name, ())]
    files = [(f"{folder}/record.json", Path(folder).name in DRAWN) for folder in folders]
    records = [] if CELLS_EXIST else [ancient(file) if drawn else file for file, drawn in files]
    return [*records, *(f"notebooks/experiments/{name}.yaml" for name in names if name in FOLDERS)]


localrules:
    all,
    runs,
    paper,


rule all:
    input:
        # listed, because existing figures alone would not make Snakemake run a missing cell
        [] if CELLS_EXIST else [*RECORDS, *TABLES],
        [] if CELLS_EXIST or PROFILE == "laptop" else [f"{RESULTS}/{name}" for name in CHECKS],
        ALL_RUNS if OWN else f"{RESULTS}/{TEXT}.pdf",


rule paper:
    input:
        ALL_RUNS,
        ANSWERS,
        sorted(str(file) for file in Path("paper").iterdir() if file.suffix in (".typ", ".csv", ".bib")),
    output:
        f"{RESULTS}/{TEXT}.pdf",
    shell:
        "python -m paper.study paper/{TEXT}.typ {output} --results {RESULTS}"


rule runs:
    input:
        ANSWERS,  # the summary says which runs are drawn, so it is written last
        records_of(FOLDERS),
        [] if CELLS_EXIST else TABLES,
        LIBRARY,
        "notebooks/50_runs.ipynb",
        TASKS,
        "paper/study.py",
    output:
        SUMMARY,
        f"{RESULTS}/answers/comparisons.csv",
        f"{RESULTS}/answers/runs.json",
    log:
        f"{RESULTS}/notebooks/50_runs.ipynb",
    params:
        notebook="50_runs",
        values=READ,
    shell:
        RUN


for notebook, figures, experiments, files in QUESTIONS:

    rule:
        name:
            notebook.partition("_")[2]
        localrule: True
        input:
            records_of(experiments),
            # step_times.csv is made here, too; other files are records
            [f"{RESULTS}/{each}" for each in files if "*" not in each and not CELLS_EXIST],
            sorted(str(file) for each in files if "*" in each for file in Path(RESULTS).glob(each)),
            LIBRARY,
            f"notebooks/{notebook}.ipynb",
            TASKS,
            [f"paper/{each}.py" for each in (notebook.partition("_")[2], "study", *USES.get(notebook, ()))],
        output:
            f"{RESULTS}/answers/{notebook.partition('_')[2]}.json",
            [f"{RESULTS}/figures/{name}.svg" for name in figures],
        log:
            f"{RESULTS}/notebooks/{notebook}.ipynb",
        params:
            notebook=notebook,
            values=READ,
        shell:
            RUN


if not CELLS_EXIST:

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

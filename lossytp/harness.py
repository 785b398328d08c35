"""Score tasks of EleutherAI's lm-evaluation-harness over lossy networks, without training.

python -m lossytp.harness --model_name smollm2-135m --tasks last_word,sst2_prompt --loss_rates 0,0.01,0.1
python -m lossytp.harness --model_name path/to/model --tasks my_task.yaml,arc_easy --repairs "protect(0.1)"

Every draw of losses scores the same examples. Each row has the score, and its change from the dense model's score on
these examples, both with a 95 % interval for other draws and other examples: the variance over draws of their mean,
plus the variance over examples of their mean over draws (`lossytp.study.statistics.crossed_interval`). A score that is
no mean of its examples' values, such as a perplexity, enters by jackknife pseudo-values (Tukey 1958). The harness's own
standard error knows the examples alone.

Requests pass the model one by one, in the harness's order: each is a message of its own. Choices of one prompt do not
share a forward pass. If ranks have their own streams, the first rank answers. At a loss rate of 0 there is one draw,
whose log-likelihoods are the dense model's up to the order of sums.

Shapes: S draws, N examples.
"""

import hashlib
import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator
from tqdm import tqdm

from lossytp.network.checks import refuse_if
from lossytp.parallel.group import rank_and_world_size
from lossytp.study.statistics import Estimate, crossed_interval
from lossytp.tolerance.config import OTHER_FOLDER, NetworksConfig, Setup, parts, read_record
from lossytp.training.command_line import parse, run_as_command
from lossytp.training.files import first_line, write_atomically
from lossytp.training.models import check_there
from lossytp.training.progress import waiting
from lossytp.training.record import commit, environment, trace_sha256
from lossytp.training.rows import DATA_VARIABLE, hub_or_its_cache, sample_indices

OWN, YAML = Path(__file__).parent / "harness_tasks", ".yaml"
RECORD = "harness.json"
CHOOSE_ROWS = ("loss_rates", "algorithms", "phases", "repairs", "output_dir")  # the others change the rows' values
PACKAGE = "lm_eval"
TITLES = ("task", "metric", "algorithm", "phase", "repair", "loss rate", "score", "change")


class HarnessConfig(NetworksConfig):
    """A language model, tasks, and the networks and repairs to score them over."""

    repairs: str = "zero,retransmit(2)"
    """Repairs, separated by commas, such as "rescale,protect(0.01) + stale". zero, which repairs nothing, is always
    measured too."""
    tasks: str = "last_word"
    """Tasks, separated by commas: .yaml files, names that the harness knows, and last_word (complete a passage of a
    docstring), last_word_wikitext and sst2_prompt, whose texts are under LOSSYTP_DATA."""
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    """Solved examples before each question; if left out, as many as the task asks for."""
    eval_samples: Annotated[int, Field(ge=2)] | None = 100
    """Examples of each task, a fixed pseudo-random sample; none for all."""
    draws: Annotated[int, Field(ge=2)] = 5
    """Draws of losses for each row; their seeds follow from `seed`."""
    output_dir: str = "output/harness"
    """Folder for harness.json."""

    @model_validator(mode="after")
    def _check_tasks(self) -> Self:
        refuse_if(not parts(self.tasks), "tasks", self.tasks, "names none: give one, such as last_word")
        for name in parts(self.tasks):
            if name.endswith(YAML) and not Path(name).is_file():
                raise ValueError(f"tasks = {name!r} does not exist: give the path of a YAML file, or a name")
        return self


@cache  # the harness's own tasks take 10 s to list
def _manager(*, include_defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(OWN), include_defaults=include_defaults)


def load_tasks(names: list[str], num_fewshot: int | None) -> dict[str, Any]:
    """Return the harness's tasks by name. A group or a tag gives all of its tasks.

    Raises:
        ValueError: if there is no such task, or it has no data here.
    """
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)  # it warns in each pass of each request that is cut
    own = {file.stem for file in OWN.glob(f"*{YAML}")}
    files = [name for name in names if name.endswith(YAML)]
    groups = any("group:" in Path(file).read_text("utf-8", "replace") for file in files)
    local = not groups and own.issuperset(set(names) - set(files))
    manager = _manager(include_defaults=not local)
    tasks: dict[str, Any] = {}
    for name in names:
        fault = f"is unknown: give a .yaml file, {', '.join(sorted(own))}, or a name that `lm-eval ls tasks` lists"
        refuse_if(name not in files and name not in manager.task_index, "tasks", name, fault)
        try:
            with waiting(f"{name}: reading its examples"), hub_or_its_cache():
                found = manager.load([name])["tasks"]
        except Exception as error:  # a YAML file, and the code and the data that it names, can raise anything
            why = first_line(error).removeprefix("ValueError: ")
            if DATA_VARIABLE not in why:  # as in an error of this project, which names the fix
                why = f"{why}: set {DATA_VARIABLE}, go online once, or mend it"
            raise ValueError(f"tasks = {name!r} cannot be read: {why}") from error
        if twice := tasks.keys() & found.keys():
            raise ValueError(f"tasks = {name!r} gives {min(twice)!r} a second time: give it once, or rename it")
        tasks |= found
    for task in tasks.values():
        if num_fewshot is not None and task.get_config("num_fewshot") != 0:  # as in the harness, a task's own 0 stays
            task.set_config(key="num_fewshot", value=num_fewshot)
    return tasks


class Score(NamedTuple):
    """A metric of a task, in one pass over its examples, and the examples' pseudo-values (N,), whose mean it is."""

    value: float
    values_N: np.ndarray


Metric = tuple[str, str]  # a task's name and a metric's


def score_of(aggregate: Callable[[list], float], values: list) -> Score:
    """Return the score of the examples' values. If it is their mean, the pseudo-values are the values.

    Raises:
        ValueError: if there is only one value.
    """
    whole, number = float(aggregate(values)), len(values)
    if number < 2:
        raise ValueError(f"a task has {number} example, too few for an interval: give one with two or more")
    without = [aggregate(values[:each] + values[each + 1 :]) for each in range(number)]
    return Score(whole, number * whole - (number - 1) * np.array(without, dtype=float))


class Measurement:
    """A model and tasks. `lossless` are the dense model's scores.

    Attributes:
        cut: the number of requests that lose their beginning, because the model has too few positions.

    Raises:
        ValueError: if a task or the model cannot be used.
    """

    def __init__(self, config: HarnessConfig) -> None:
        with waiting("importing the harness and transformers, and reading the list of tasks"):
            from lm_eval.api import model, task
            from lm_eval.models import huggingface

            from lossytp.tolerance.measure import language_model

            for module in (model, task, huggingface):
                vars(module)["tqdm"] = lambda *items, **named: tqdm(
                    *items, **named | {"disable": True}
                )  # it would show three in each pass
            self.config, self.tasks = config, load_tasks(parts(config.tasks), config.num_fewshot)
        self.samples = {
            name: sample_indices(len(task.eval_docs), config.eval_samples).tolist()
            for name, task in self.tasks.items()
            if config.eval_samples is not None and config.eval_samples < len(task.eval_docs)
        }
        self.tokenizer, self.dense, self.ranks = language_model(config)
        with waiting(f"{config.model_name}: scoring without losses"):
            self.lossless = self.score(self.dense)
        requests = [request for task in self.tasks.values() for request in task.instances]
        texts = ["".join(each.args) for each in requests if each.request_type == "loglikelihood"]
        self.cut = sum(len(self.tokenizer(text)["input_ids"]) > self.positions + 1 for text in texts)
        self.sha256 = hashlib.sha256(repr([each.args for each in requests]).encode()).hexdigest()

    def score(self, model: Any) -> dict[Metric, Score]:
        """Return the score of every metric of every task. Each pass asks the same questions."""
        import torch
        from lm_eval.api.metrics import mean
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM

        lm = HFLM(
            pretrained=model,
            tokenizer=self.tokenizer,
            batch_size=1,
            logits_cache=False,
            softmax_dtype="float32",
            mixed_precision_dtype="bfloat16" if self.config.bf16 else None,
        )
        self.positions = lm.max_length
        for task in self.tasks.values():
            task.set_fewshot_seed(self.config.seed)
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)  # for a task that samples its answers
            try:
                found: Any = evaluate(lm, {"tasks": self.tasks}, samples=self.samples, bootstrap_iters=0)
            except AssertionError as error:
                raise ValueError(f"tasks = {self.config.tasks!r} cannot be asked ({error}): give others") from error
        values: dict[Metric, list] = defaultdict(list)
        for name, examples in found["samples"].items():
            for example in examples:
                suffix = "" if example["filter"] == "none" else f",{example['filter']}"
                for metric in example["metrics"]:
                    values[name, metric + suffix].append(example[metric])
        return {
            (name, metric): score_of(self.tasks[name].aggregation().get(metric.partition(",")[0], mean), each)
            for (name, metric), each in values.items()
        }

    def rows(self, setup: Setup) -> list[dict[str, Any]]:
        """Return a network's and a repair's rows, one for each metric, as the record has them."""
        from lossytp.parallel.convert import parallelize

        settings = self.config.network(setup)
        network = settings.build()
        how: dict[str, Any] = {"tensor_parallel_size": self.ranks, "comm": settings.comm(), "share_memory": True}
        model = parallelize(self.dense, network, **how)
        draws: list[dict[Metric, Score]] = []
        for number in range(self.config.draws if setup.loss_rate else 1):
            with network.evaluation(number):
                draws.append(self.score(model))
        return [
            {"task": metric[0], "metric": metric[1], **setup._asdict()}
            | estimates([scores[metric] for scores in draws], lossless)
            for metric, lossless in self.lossless.items()
        ]

    def inputs(self) -> dict[str, Any]:
        """Return what rows depend on, as the record has it: they can be compared if it is the same."""
        config = {name: each for name, each in self.config.as_dict().items() if name not in CHOOSE_ROWS}
        trace = trace_sha256(self.config.network(self.config.setups()[0]))
        scores = {f"{task} {metric}": round(score.value, 4) for (task, metric), score in self.lossless.items()}
        return {"config": config, "trace_sha256": trace, "requests_sha256": self.sha256, "lossless": scores}


def estimates(draws: list[Score], lossless: Score) -> dict[str, Any]:
    """Return the score's and the change's estimates, the score of each draw (S,) and the pseudo-values (S, N)."""
    values_SN = np.stack([draw.values_N for draw in draws])
    scores = [draw.value for draw in draws]
    widths = [crossed_interval(each).half_width for each in (values_SN, values_SN - lossless.values_N)]
    centres = [float(np.mean(scores)), float(np.mean(scores)) - lossless.value]
    score, change = (Estimate(at, at - width, at + width) for at, width in zip(centres, widths, strict=True))
    values = [[float(f"{each:.9g}") if math.isfinite(each) else None for each in draw] for draw in values_SN]
    return {"score": score.as_json(), "change": change.as_json(), "scores": scores, "values": values}


def main() -> None:
    """Measure as the command line says."""
    measure_and_print(parse(HarnessConfig, __doc__))


def measure_and_print(config: HarnessConfig) -> None:
    """Measure, and print each row of the table as it is finished. Rows of an earlier measurement are not made again."""
    if rank_and_world_size()[1] > 1:
        raise ValueError("lossytp.harness runs in one process, with virtual ranks: start it without torchrun")
    if find_spec(PACKAGE) is None:
        raise ValueError(f"lossytp.harness needs the package {PACKAGE}: pip install 'lossytp[harness]'")
    check_there(config.model_name)
    with waiting("importing torch"):
        from lossytp.training.folder import exclusive_run  # it takes seconds: check arguments first

    with exclusive_run(config.output_dir):
        _measure_and_print(config)


def _measure_and_print(config: HarnessConfig) -> None:
    measurement = Measurement(config)
    inputs, file = measurement.inputs(), Path(config.output_dir) / RECORD
    done = load_rows(file, inputs)
    sizes = {name: len({each.doc_id for each in task.instances}) for name, task in measurement.tasks.items()}
    listed = ", ".join(f"{size} examples of {name}" for name, size in sizes.items())
    print(f"{config.model_name} on {listed}; {measurement.ranks} tensor-parallel ranks, {config.draws} draws of losses")
    if measurement.cut:
        print(f"{measurement.cut} requests lose their beginning: the model has too few positions")
    names = [["dense", *(setup.repair for setup in config.setups())]]
    names += zip(TITLES[:2], *measurement.lossless, strict=True)
    repair, task, metric = (max(map(len, each)) for each in names)
    layout = f"{{:{task}}} {{:{metric}}} {{:9}} {{:6}} {{:{repair}}} {{:>9}} {{:>19}} {{:>19}}"
    print("", layout.format(*TITLES), sep="\n")
    for key, score in measurement.lossless.items():
        print(layout.format(*key, "", "", "dense", "", _shown(estimates([score], score)["score"]), ""), flush=True)
    for setup in config.setups():
        with waiting(f"{setup.algorithm}, {setup.phase}, {setup.repair} at {setup.loss_rate:.3g}: scoring"):
            found = done[setup] = done.get(setup) or measurement.rows(setup)
        record = {**inputs, "tensor_parallel_size": measurement.ranks, "examples": sizes, "cut": measurement.cut}
        record |= {"rows": [*chain(*done.values())], "commit": commit(), "environment": environment()}
        write_atomically(file, json.dumps(record, indent=1) + "\n")
        for row in found:
            shown = [row["task"], row["metric"], *setup[:3], f"{setup.loss_rate:.3g}"]
            print(layout.format(*shown, _shown(row["score"]), _shown(row["change"], "+")), flush=True)
    print(f"\nsee {file}")


def load_rows(file: Path, inputs: dict[str, Any]) -> dict[Setup, list[dict[str, Any]]]:
    """Return the rows of an earlier measurement. It may have had other loss rates, algorithms, phases and repairs.

    Raises:
        ValueError: if the file is no record, or of other `inputs`.
    """

    def read(record: Any) -> tuple[dict[Setup, list[dict[str, Any]]], list[str]]:
        rows: dict[Setup, list[dict[str, Any]]] = defaultdict(list)
        for row in record["rows"]:
            rows[Setup.of(row)].append(row)
        return dict(rows), [name for name, value in inputs.items() if record[name] != value]

    rows, differ = read_record(file, "record of scores", read) or ({}, [])
    if differ:
        raise ValueError(f"{file} was measured with another {', '.join(differ)}: {OTHER_FOLDER}")
    return rows


def _shown(estimate: dict[str, float | None], sign: str = "") -> str:
    value, low, high = (math.nan if each is None else each for each in estimate.values())
    return f"{round(value, 4) + 0.0:{sign}.4f} ± {(high - low) / 2:.4f}"  # no -0.0000


if __name__ == "__main__":
    run_as_command(main)

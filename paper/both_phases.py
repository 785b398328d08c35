"""Why does pretraining over losses in both phases fail? One change an arm, and what happens to tokens in each step.

The arms differ from the study's pretraining in one setting, or in one change to the model that `change_` makes. Some
changes need the exact gradient of a lossy forward pass, which no real system can know. `LossySum` computes it.

What was predicted before each of them, and what was found, stands beside their records, in
`results/paper/both_phases/README.md`.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lossytp.network.checks import check_known
from lossytp.network.routes import Wire
from lossytp.parallel.group import rank_and_world_size
from lossytp.parallel.layers import ColumnParallelLinear, RowParallelLinear
from lossytp.parallel.plans import blocks_of
from lossytp.study.style import COLUMN, marker_of
from lossytp.study.tables import LOSSLESS
from lossytp.training.config import PretrainConfig
from lossytp.training.files import write_atomically
from lossytp.training.loop import Run
from lossytp.training.progress import Progress
from lossytp.training.record import commit
from paper.study import Claim, Results, Study, claim, json_rows, row_of, rows_of

BASE: dict[str, Any] = {  # the study's pretraining, but for smaller batches, which fail as well
    "dataset": "wikimedia/wikipedia",
    "model_name": "gpt2-nano",
    "tokenizer_path": "models/gpt2-nano",
    "tensor_parallel_size": 4,
    "total_steps": 1250,
    "block_size": 128,
    "batch_size": 16,
    "microbatch_size": 8,
    "num_proc": 1,
    "threads": 1,
    "eval_samples": 64,
    "save_model": False,
}


class Arm(NamedTuple):
    """Settings that differ from the base, and a change to the model."""

    settings: Mapping[str, Any]
    change: str | None = None
    value: float | None = None


SMALL = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
SMALL |= {"intermediate_size": 344, "vocab_size": 4096, "max_position_embeddings": 128, "pad_token_id": 0}
SHAPES: dict[str, dict[str, Any]] = {  # of llama-nano's size, with weights drawn by the arm's seed
    "qwen3": {**SMALL, "head_dim": 16},  # normalises queries and keys
    "olmo2": SMALL,  # normalises them too, and sums before they are added, in place of the inputs
    "gemma3_text": {**SMALL, "head_dim": 16, "query_pre_attn_scalar": 16},  # normalises inputs and sums
}
BOTH = {"loss_rate": 0.1, "reliable_gather": False}
MASKED = {**BOTH, "masked_backward": True}
OF_SHAPES = {"no loss": {"loss_rate": 0.0}, "both phases": BOTH, "gradients masked by what arrived": MASKED}
REDUCE = {**BOTH, "lossy_phase": "reduce"}  # each rank has its own stream, and all streams are equal
ARMS = {
    "no loss": Arm({"loss_rate": 0.0}),
    "reduce phase": Arm({"loss_rate": 0.1}),
    "both phases": Arm(BOTH),
    # where
    "forward": Arm({**BOTH, "lossy_direction": "forward"}),
    "backward": Arm({**BOTH, "lossy_direction": "backward"}),
    "gather phase": Arm({**BOTH, "lossy_phase": "gather"}),
    "gather phase, forward": Arm({**BOTH, "lossy_phase": "gather", "lossy_direction": "forward"}),
    "gather phase, backward": Arm({**BOTH, "lossy_phase": "gather", "lossy_direction": "backward"}),
    "sequence parallelism": Arm({**BOTH, "sequence_parallel": True}),
    # optimisation
    "learning rate / 4": Arm({**BOTH, "learning_rate": 0.00075}),
    "warm-up x 4": Arm({**BOTH, "warmup_steps": 400}),
    "clipping at 0.1": Arm({**BOTH, "gradient_clipping": 0.1}),
    # normalisation
    "epsilon 1e-2": Arm(BOTH, "epsilon", 1e-2),
    "epsilon 1e-1": Arm(BOTH, "epsilon", 1e-1),
    "scale detached": Arm(BOTH, "scale detached"),
    "gradients of tokens capped": Arm(BOTH, "gradients of tokens capped", 4.0),
    "embeddings x 11": Arm(BOTH, "embeddings scaled", 11.3),
    "no clipping": Arm({**BOTH, "gradient_clipping": 0}),
    # drift
    "mean after every block": Arm(BOTH, "mean of streams", 1),
    "mean after every second block": Arm(BOTH, "mean of streams", 2),
    "mean before the head": Arm(BOTH, "mean of streams", 0),
    # gradients
    "summed where outputs are": Arm(BOTH, "gradients summed at g"),
    "summed where outputs are, forward": Arm({**BOTH, "lossy_direction": "forward"}, "gradients summed at g"),
    "exact gradient": Arm(BOTH, "exact gradient"),
    "gradients masked by what arrived": Arm(MASKED),
    "gradients masked at random": Arm(BOTH, "gradients masked at random", 0.1),
    "forward, gradients masked": Arm({**MASKED, "lossy_direction": "forward"}),
    # another shape, another algorithm
    **{
        f"{shape}, {name}": Arm({"model_name": model, **settings})
        for shape, model in {"llama": "llama-nano", **{family: family for family in SHAPES}}.items()
        for name, settings in OF_SHAPES.items()
    },
    "ring": Arm({**BOTH, "algorithm": "ring"}),
    "ring, gradients masked by what arrived": Arm({**MASKED, "algorithm": "ring"}),
    # order of norm and loss
    "loss after the norm": Arm(REDUCE, "inputs lose packets"),
    "loss before the norm": Arm(REDUCE, "norms lose packets"),
    # position
    "first block reliable": Arm({**BOTH, "lossy_layers": "1:4"}),
    "last block reliable": Arm({**BOTH, "lossy_layers": "0:3"}),
    # repairs
    "local": Arm({**BOTH, "repair": "local"}),
    "stale": Arm({**BOTH, "repair": "stale"}),
    "rescale": Arm({**BOTH, "repair": "rescale"}),
    **{
        f"gather phase, {repair}": Arm({**BOTH, "lossy_phase": "gather", "repair": repair})
        for repair in ("local", "stale", "rescale")
    },
    "protect_first(1)": Arm({**BOTH, "repair": "protect_first(1)"}),
    "protect(0.1) + retransmit(1)": Arm({**BOTH, "repair": "protect(0.1) + retransmit(1)"}),
    "retransmit(2)": Arm({**BOTH, "repair": "retransmit(2)"}),
    "packets of 216 bytes": Arm({**BOTH, "mtu_bytes": 216}),
}
CONTROLS = {
    "epsilon 1e-1",
    "epsilon 1e-2",
    "scale detached",
    "gradients masked at random",
    "gradients of tokens capped",
}
CONTROLS |= {"embeddings x 11", "learning rate / 4", "warm-up x 4", "clipping at 0.1", "no clipping"}
ARMS |= {  # what these changes cost without losses
    f"no loss, {name}": arm._replace(settings={**arm.settings, "loss_rate": 0.0})
    for name, arm in ARMS.items()
    if name in CONTROLS
}


@dataclass
class LossySum:
    """An all-reduce among virtual ranks that loses packets in both phases, differentiated as it was computed."""

    loss_rate: float
    elements_per_packet: int
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def arrived(self, ranks: int, elements: int) -> Tensor:
        """Return which elements of a message arrive, (R, elements); the chunk that a rank owns always does."""
        chunk = -(-elements // ranks)
        packets = -(-chunk // self.elements_per_packet)
        drawn = torch.rand(ranks, ranks, packets, generator=self.generator) >= self.loss_rate  # rank, chunk, packet
        drawn |= torch.eye(ranks, dtype=torch.bool).unsqueeze(-1)
        each = drawn.repeat_interleave(self.elements_per_packet, -1)[..., :chunk]
        return each.flatten(1)[:, :elements]

    def __call__(self, parts_LTD: Tensor) -> Tensor:
        """Return each rank's result, (L, T, D)."""
        ranks, elements = len(parts_LTD), parts_LTD[0].numel()
        reduced = (self.arrived(ranks, elements).view_as(parts_LTD) * parts_LTD).sum(0)
        return self.arrived(ranks, elements).view_as(parts_LTD) * reduced


class _SumWithReliableGradient(torch.autograd.Function):
    """What `lossy` computes; backward sums the gradients of all ranks, as if nothing had been lost."""

    @staticmethod
    def forward(ctx: Any, parts_LTD: Tensor, lossy: LossySum, lossy_backward: LossySum | None) -> Tensor:
        ctx.lossy = lossy_backward
        return lossy(parts_LTD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        dy_LTD = gradients[0]
        return dy_LTD.sum(0).expand_as(dy_LTD) if ctx.lossy is None else ctx.lossy(dy_LTD), None, None


def _plain_layers_(model: nn.Module, summed: Callable[[Tensor], Tensor]) -> None:
    """Let the layers compute with autograd's own gradients, and `summed` in place of the collective."""

    def column(layer: ColumnParallelLinear) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            ranks = len(layer.collective.group.local)
            weight = layer.weight.unflatten(1, (len(layer.widths), ranks, -1))  # (D, P, L, F)
            bias = cast(Tensor, layer.bias).view(len(layer.widths), ranks, -1)  # (P, L, F)
            x_LTD = x.reshape(ranks, -1, x.shape[-1])
            y = torch.einsum("ltd,dplf->ltpf", x_LTD, weight) + bias.transpose(0, 1).unsqueeze(1)
            return y.reshape(*x.shape[:-1], -1)

        return forward

    def row(layer: RowParallelLinear) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            x_LTK = x.reshape(len(layer.weight), -1, x.shape[-1])
            y = summed(torch.bmm(x_LTK, layer.weight)) + cast(Tensor, layer.bias)
            return y.reshape(*x.shape[:-1], -1)

        return forward

    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            module.forward = column(module)  # type: ignore[method-assign]
        elif isinstance(module, RowParallelLinear):
            module.forward = row(module)  # type: ignore[method-assign]


def _norms(model: nn.Module) -> Iterator[nn.LayerNorm]:
    return (module for module in model.modules() if isinstance(module, nn.LayerNorm))


class _MaskGradient(torch.autograd.Function):
    """The identity; backward keeps the gradient of the elements in `arrived` alone."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, arrived: Tensor) -> Tensor:
        ctx.save_for_backward(arrived)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.saved_tensors[0], None


class _CapTokens(torch.autograd.Function):
    """The identity; backward caps each token's gradient at `times` the median token's norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: float) -> Tensor:
        ctx.times = times
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        size = gradients[0].norm(dim=-1, keepdim=True)
        return gradients[0] * (ctx.times * size.median() / size.clamp_min(1e-30)).clamp(max=1.0), None


def _detach_scale_(model: nn.Module) -> None:
    def forward(norm: nn.LayerNorm) -> Callable[[Tensor], Tensor]:
        def detached(x: Tensor) -> Tensor:
            centred = x - x.mean(-1, keepdim=True)
            scale = (centred.detach().square().mean(-1, keepdim=True) + norm.eps).rsqrt()
            return centred * scale * norm.weight + norm.bias

        return detached

    for norm in _norms(model):
        norm.forward = forward(norm)  # type: ignore[assignment, method-assign]


def change_(model: Any, arm: Arm, config: PretrainConfig) -> None:
    """Apply an arm's change to a model whose ranks have their own streams."""
    if arm.change is None:
        return
    ranks = config.network.tensor_parallel_size
    rate = arm.value if arm.change == "gradients masked at random" else config.network.loss_rate
    lossy = LossySum(cast(float, rate), Wire(mtu_bytes=config.network.mtu_bytes).elements_per_packet(4))
    both_ways = config.network.lossy_direction is None
    blocks: Any = blocks_of(model)

    def lose(x: Tensor) -> Tensor:
        each = x.view(ranks, -1, x.shape[-1])
        return (lossy.arrived(ranks, each[0].numel()).view_as(each) * each).view_as(x)

    def mean(hidden: Tensor) -> Tensor:
        each = hidden.view(ranks, -1, *hidden.shape[1:])
        return each.mean(0, keepdim=True).expand_as(each).reshape(hidden.shape)

    if arm.change == "epsilon":
        for norm in _norms(model):
            norm.eps = arm.value  # type: ignore[assignment]
    elif arm.change == "scale detached":
        _detach_scale_(model)
    elif arm.change == "gradients of tokens capped":
        for norm in _norms(model):
            norm.register_forward_pre_hook(lambda _, inputs: (_CapTokens.apply(inputs[0], arm.value),))
    elif arm.change == "embeddings scaled":
        model.transformer.drop.register_forward_hook(lambda _, __, out: arm.value * out)
    elif arm.change == "mean of streams":
        for number, block in enumerate(blocks, 1):
            if number == len(blocks) or (arm.value and number % arm.value == 0):
                block.register_forward_hook(
                    lambda _, __, out: (mean(out[0]), *out[1:]) if isinstance(out, tuple) else mean(out)
                )
    elif arm.change == "gradients masked at random":
        for module in model.modules():
            if isinstance(module, RowParallelLinear):
                module.register_forward_hook(
                    lambda _, __, y: _MaskGradient.apply(y, lossy.arrived(ranks, y.numel() // ranks).view_as(y))
                )
    elif arm.change == "exact gradient":
        _plain_layers_(model, lossy)
    elif arm.change == "gradients summed at g":
        backward = lossy if both_ways else None
        _plain_layers_(model, lambda parts: _SumWithReliableGradient.apply(parts, lossy, backward))
    elif arm.change in ("inputs lose packets", "norms lose packets"):
        for block in blocks:
            for norm in (block.ln_1, block.ln_2):
                if arm.change == "inputs lose packets":
                    norm.register_forward_hook(lambda _, __, y: lose(y))
                else:
                    norm.register_forward_pre_hook(lambda _, inputs: (lose(inputs[0]),))
    else:
        raise ValueError(f"{arm.change!r} is no change")


class TokensOfStep:
    """Norms and gradients of the residual streams in the first microbatch of a step, by layer.

    A token of a rank lost something in a block if an element of the block's sums is exactly zero before the bias.
    """

    def __init__(self, model: nn.Module, streams: int) -> None:
        self.streams, self.on = streams, False
        self.seen: dict[tuple[str, int], Tensor] = {}
        self.last = len(blocks_of(model)) - 1
        for layer, block in enumerate(blocks_of(model)):
            block.register_forward_hook(lambda _, inputs, out, layer=layer: self._block(layer, out))
            for module in block.modules():
                if isinstance(module, RowParallelLinear):
                    module.register_forward_hook(lambda row, _, y, layer=layer: self._sum(layer, row, y))

    def start(self) -> None:
        """Look at the next microbatch."""
        self.on, self.seen = True, {}

    def _sum(self, layer: int, row: RowParallelLinear, y: Tensor) -> None:
        if self.on:
            lost = (y.detach() == (0 if row.bias is None else row.bias.detach())).any(-1)
            before = self.seen.setdefault(("lost", layer), torch.zeros_like(lost))
            before |= lost

    def _block(self, layer: int, out: Any) -> None:
        if not self.on:
            return
        hidden = out[0] if isinstance(out, tuple) else out
        self.seen["hidden", layer] = hidden.detach().clone()
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.seen.setdefault(("gradient", layer), gradient.detach().clone()))
        self.on = layer < self.last

    def numbers(self) -> list[dict[str, float]]:
        """Return one row a layer."""
        rows = []
        for layer in sorted({layer for _, layer in self.seen}):
            hidden, lost = self.seen["hidden", layer], self.seen["lost", layer]
            gradient = self.seen.get(("gradient", layer))
            norms = hidden.norm(dim=-1).flatten()
            row = {"layer": layer, "least_norm": float(norms.min()), "median_norm": float(norms.median())}
            if hidden.shape[0] % self.streams == 0 and hidden.shape[0] > self.streams:
                each = hidden.view(self.streams, -1, *hidden.shape[1:])
                mean = each.mean(0)
                row["distance"] = float(((each - mean).square().sum() / self.streams / mean.square().sum()).sqrt())
            if gradient is not None:
                size = gradient.norm(dim=-1)
                row["gradient_kept"] = float(size[~lost].square().mean().sqrt())
                row["gradient_most"] = float(size.max())
                if lost.any():
                    row["gradient_lost"] = float(size[lost].square().mean().sqrt())
            rows.append({name: value for name, value in row.items() if math.isfinite(value)})
        return rows


def drawn_weights(family: str, seed: int) -> str:
    """Return the folder of a model of `SHAPES`, whose weights are drawn if there are none."""
    folder = Path("output") / "shapes" / f"{family}-{seed}"
    if not (folder / "model.safetensors").exists():  # which is written last
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPES[family])).save_pretrained(folder)
    return str(folder)


def train_arm(name: str, base: Mapping[str, Any], *, seed: int, steps: int, show: Callable) -> dict[str, Any]:
    """Train `steps` steps of the arm `name` on the schedule of `base`, and return its record.

    `base` has the settings that all arms share. `show` is called with each step and its training loss.
    """
    arm = ARMS[name]
    settings = {**base, **arm.settings, "seed": seed}
    if settings["model_name"] in SHAPES:
        settings["model_name"] = drawn_weights(settings["model_name"], seed)
    config = PretrainConfig.from_dict(settings)
    layout, network = config.layout(*rank_and_world_size()), config.network.build()
    run = Run(config, layout, network, None)  # type: ignore[arg-type]
    change_(run.engine.module, arm, config)
    one = config.network.reliable_gather or config.network.sequence_parallel
    streams = 1 if one else config.network.tensor_parallel_size
    tokens = TokensOfStep(run.engine.module, streams)
    torch.manual_seed(seed)
    rows: list[dict[str, Any]] = []
    try:
        for step in range(1, steps + 1):
            tokens.start()
            loss = run.train_step(step, run.objective.batch())
            row = {"step": step, "loss": loss, "gradient_norm": run.numbers.get("train/gradient_norm")}
            rows.append({**row, "layers": tokens.numbers() if step % 10 == 0 or step == 1 else None})
            show(step, loss)
            if not math.isfinite(loss):
                break
        point = run._evaluate(config.steps) if math.isfinite(loss) else {}
    finally:
        run.engine.close()
    known = {"arm": name, "seed": seed, "commit": commit(), "config": config.as_dict()}
    return known | {"steps": rows, "evaluation": point}


def train_arms(
    names: Sequence[str], base: Mapping[str, Any], *, seeds: int, steps: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """Yield the record of each arm and seed; train where there is none."""
    for seed in range(seeds):
        for name in names:
            check_known("arm", name, sorted(ARMS))
            file = folder / f"{name.replace(' ', '_').replace('/', 'over')}_{steps}_seed{seed}.json"
            if not file.exists():
                with closing(Progress(steps, name=f"{name}, seed {seed}")) as progress:
                    record = train_arm(name, base, seed=seed, steps=steps, show=progress.show)
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(file, json.dumps(record))
            yield json.loads(file.read_text())


def summary(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Tabulate how each run stood at its end, one row a record: the means of its last steps, and its evaluation."""
    rows = []
    for record in records:
        steps, point = record["steps"], record["evaluation"]
        seen: dict[str, float] = next((step["layers"][0] for step in reversed(steps) if step["layers"]), {})
        row = {"arm": record["arm"], "seed": record["seed"], "steps": len(steps)}
        row["loss"] = float(np.mean([step["loss"] for step in steps[-20:]]))
        norms = [step["gradient_norm"] for step in steps[-50:]]  # None without clipping
        row["gradient_norm"] = float(np.median(np.array(norms, dtype=float)))
        row |= {way: point.get(f"cross_entropy_{way}") for way in ("clean", "lossy")}
        rows.append(row | {name: seen.get(name) for name in ("least_norm", "median_norm")})
    return pd.DataFrame(rows)


SHOWN = {
    "both phases": "both phases",
    "ring": "both phases, ring",
    "llama, both phases": "both phases, Llama",
    "forward": "forward alone",
    "backward": "backward alone",
    "epsilon 1e-2": "larger epsilon of the norms",
    "warm-up x 4": "longer warm-up",
    "summed where outputs are": "gradients summed elsewhere",
    "gradients masked at random": "gradients masked at random",
    "gradients of tokens capped": "each token's gradient capped",
    "first block reliable": "first block reliable",
    "mean after every block": "streams averaged every block",
    "packets of 216 bytes": "packets of a third of a token",
    "local": "own part for a lost sum",
    "sequence parallelism": "sequence parallelism",
    "protect(0.1) + retransmit(1)": "priority resend",
    "exact gradient": "exact gradient",
    "gradients masked by what arrived": "masked by what arrived",
    "ring, gradients masked by what arrived": "masked by what arrived, ring",
    "llama, gradients masked by what arrived": "masked by what arrived, Llama",
}
"""Arms as the figure names them, from top to bottom."""
BOTH_WAYS = "losses on both ways"
FULL_LENGTH = {BOTH_WAYS: "both", f"{BOTH_WAYS} of a sharded stream": "sharded"}
FULL_LENGTH |= {f"{BOTH_WAYS} with a masked backward pass": "masked"}
FULL_RUNS = ("11_pretraining", "11_pretraining_masked")


def rises(records: Iterable[Mapping[str, Any]], steps: int = 200) -> pd.DataFrame:
    """Tabulate how many nats of clean cross-entropy each arm ends above the run without losses of its seed and shape.

    Columns: `arm`, `seed`, `rise`, and the `least_norm` of a token at the end; only runs of this many steps, or that
    stopped earlier because the loss was no longer finite. Those have an infinite rise. A run without losses that has
    the arm's change of the model is what the arm is compared with.
    """
    rows = summary(record for record in records if len(record["steps"]) == steps or not record["evaluation"])
    clean = rows["clean"].astype(float).fillna(math.inf)  # of a run that stopped there is none
    norms = dict(zip(zip(rows["arm"], rows["seed"], strict=True), rows["least_norm"], strict=True))
    ends = dict(zip(zip(rows["arm"], rows["seed"], strict=True), clean, strict=True))
    found = []
    for (arm, seed), nats in ends.items():
        shape = arm.partition(", ")[0]
        lossless = f"{shape}, no loss" if shape in ("llama", *SHAPES) else "no loss"
        lossless = changed if (changed := f"no loss, {arm}", seed) in ends else lossless
        if arm != lossless and (lossless, seed) in ends:
            rise = nats - ends[lossless, seed]
            found.append({"arm": arm, "seed": seed, "rise": rise, "least_norm": norms[arm, seed]})
    return pd.DataFrame(found)


def arms_figure(rows: pd.DataFrame) -> Figure:
    """Draw the rise of each arm, one mark a seed: those that train in one colour, those that fail in another."""
    names = [arm for arm in SHOWN if arm in set(rows["arm"])]
    figure, ax = plt.subplots(figsize=(COLUMN, 0.15 * len(names) + 0.7), layout="constrained")
    half = rows.loc[rows["arm"] == "both phases", "rise"].mean() / 2
    for place, arm in enumerate(names):
        seeds = rows.loc[rows["arm"] == arm, "rise"]
        failed = seeds.mean() > half
        number = 3 if failed else 0
        ax.plot(seeds, [-place] * len(seeds), marker_of(number), color=f"C{number}", markersize=3.5)
        ax.plot([0, seeds.mean()], [-place, -place], color=f"C{number}", linewidth=0.8)
    ax.axvline(0, color="0.5", linewidth=0.8)
    ax.set_yticks(-np.arange(len(names)), [SHOWN[arm] for arm in names])
    ax.set(xlabel="nats above no loss after 200 steps")
    ax.set_title("A backward pass that knows what arrived trains", loc="right")
    return figure


def answer(study: Study) -> dict[str, Any]:
    """Return how many nats each arm ends above the run without losses, and draw the figure."""
    files = sorted((study.results / "both_phases").glob("*.json"))
    rows = rises(json.loads(file.read_text(encoding="utf-8")) for file in files)
    study.draw(arms_figure(rows), "both_phases")
    means = rows.groupby("arm", sort=False)["rise"].agg(["mean", "min", "max", "count"]).reset_index()
    _, tuned, _ = study.runs("05_masked_backward")
    tuned = tuned.pivot_table(index=["loss_rate", "seed"], columns="arm", values="accuracy_lossy")
    gains = (tuned["masked backward pass"] - tuned["both phases"]).dropna().rename("gain").reset_index()
    fine_tuning = json_rows(gains.groupby("loss_rate")["gain"].agg(["mean", "min", "count"]).reset_index())
    runs = pd.concat([study.runs(name)[1] for name in FULL_RUNS])
    lossless = runs[runs["arm"] == LOSSLESS].drop_duplicates("seed").set_index("seed")["cross_entropy_clean"]
    full = runs[runs["arm"].isin(FULL_LENGTH)].replace({"arm": FULL_LENGTH})
    full["rise"] = full["cross_entropy_clean"] - full["seed"].map(lossless)
    kept = full.pivot(index=["loss_rate", "seed"], columns="arm", values="rise").dropna(subset="masked").reset_index()
    shown = {"steps": 200, "arms": json_rows(means), "rises": json_rows(rows)}
    return shown | {"fine_tuning": fine_tuning, "full_length": json_rows(kept)}


def ends(results: Results, arm: str) -> dict[str, float]:
    """Return the mean, least and largest rise of an arm over its seeds."""
    return row_of(results["arms"], arm=arm)


RESENT = ("protect(0.1) + retransmit(1)", "retransmit(2)")
FAILS, TRAINS = 0.5, 0.1  # nats above no loss after 200 steps


@claim
def training_over_both_phases_fails(results: Results) -> Claim:
    """Require that every seed fails in GPT-2's shape, in four others and over rings."""
    others = [f"{shape}, both phases" for shape in ("llama", *SHAPES)]
    arms = [ends(results, arm) for arm in ("both phases", "ring", *others)]
    return Claim(all(arm["min"] > FAILS for arm in arms), {"rise": arms[0]["mean"], "seeds": arms[0]["count"]})


@claim
def a_masked_backward_pass_trains(results: Results) -> Claim:
    """Require that three seeds train with the mask, and that sequence parallelism and resends train as well."""
    names = ("gradients masked by what arrived", "sequence parallelism", *RESENT)
    arms = [ends(results, name) for name in names]
    holds = max(arm["max"] for arm in arms) < TRAINS and arms[0]["count"] >= 3
    return Claim(holds, {"rise": arms[0]["mean"], "at most": arms[0]["max"]})


@claim
def the_mask_trains_to_the_end(results: Results) -> Claim:
    """Require that the mask leaves three full runs under 0.3 of the rise, and over twice a sharded stream's."""
    rows = rows_of(results["full_length"], loss_rate=0.1)
    holds = len(rows) >= 3 and all(0.3 * row["both"] > row["masked"] > 2 * row["sharded"] for row in rows)
    return Claim(holds, {"rise": float(np.mean([row["masked"] for row in rows])), "runs": len(rows)})


@claim
def what_the_mask_leaves_falls_slowly(results: Results) -> Claim:
    """Require that three masked runs at 3 % keep over half of what 10 % leaves, and three at 1 % over a quarter.

    Both must cost over 2.5 times the prediction, and each run under 0.3 of what its seed costs without the mask.
    """
    rows = {rate: rows_of(results["full_length"], loss_rate=rate) for rate in (0.1, 0.03, 0.01)}
    many, few, fewest = (float(np.mean([row["masked"] for row in each])) for each in rows.values())
    holds = all(len(each) >= 3 for each in rows.values()) and few > max(0.5 * many, 2.5 * 0.12)
    holds &= fewest > max(0.25 * many, 2.5 * 0.05)
    holds &= all(0.3 * row["both"] > row["masked"] for each in rows.values() for row in each)
    return Claim(holds, {"rise": few, "rise at a tenth": fewest})


@claim
def own_parts_and_small_packets_soften_the_failure(results: Results) -> Claim:
    """Require that either takes away seven tenths of the rise of the same seed without a mask."""
    names = ("both phases", "local", "packets of 216 bytes")
    both, *others = (row_of(results["rises"], arm=arm, seed=0)["rise"] for arm in names)
    return Claim(max(others) < 0.3 * both, {"most": max(others)})


@claim
def the_mask_helps_fine_tuning(results: Results) -> Claim:
    """Require that accuracy is higher with the mask at every rate and seed, three of each at least."""
    rows = results["fine_tuning"]
    holds = len(rows) >= 3 and min(row["count"] for row in rows) >= 3 and min(row["min"] for row in rows) > 0
    gains = [100 * row["mean"] for row in rows]
    return Claim(holds, {"least": min(gains), "most": max(gains)})


@claim
def a_random_mask_does_not_train(results: Results) -> Claim:
    """Require that a mask which knows nothing of the losses fails over losses, and costs nothing without them."""
    arm, alone = (ends(results, f"{before}gradients masked at random") for before in ("", "no loss, "))
    return Claim(arm["min"] > FAILS and alone["max"] < TRAINS, {"rise": arm["mean"], "alone": alone["mean"]})


@claim
def an_exact_gradient_trains(results: Results) -> Claim:
    """Require that the exact gradient of the lossy forward pass trains, with tokens as small as in both phases."""
    arm = ends(results, "exact gradient")
    exact, both = (
        row_of(results["rises"], arm=name, seed=0)["least_norm"] for name in ("exact gradient", "both phases")
    )
    return Claim(arm["max"] < TRAINS and exact < 1.5 * both, {"rise": arm["mean"], "least norm": exact})


@claim
def other_explanations_fail(results: Results) -> Claim:
    """Require failures beside own runs without losses, and that a detached scale costs as much in its own alone."""
    names = ("summed where outputs are", "epsilon 1e-2", "clipping at 0.1")
    rises = {name: ends(results, name)["min"] for name in names}
    alone = [ends(results, f"no loss, {name}")["max"] for name in names[1:]]
    detached = ends(results, "no loss, scale detached")["min"]
    return Claim(min(*rises.values(), detached) > FAILS and max(alone) < 0.25 * FAILS, {**rises, "detached": detached})


@claim
def losses_in_backward_cost_nothing(results: Results) -> Claim:
    """Require that losses in backward alone train, and losses in forward alone fail."""
    backward, forward = ends(results, "backward"), ends(results, "forward")
    return Claim(backward["max"] < TRAINS and forward["min"] > FAILS, {"rise": backward["mean"]})


@claim
def the_mask_helps_elsewhere(results: Results) -> Claim:
    """Require that the mask takes away three quarters of the rise in four other shapes and over rings."""
    kept = {}
    for name, bare in (("ring", "ring"), *((shape, f"{shape}, both phases") for shape in ("llama", *SHAPES))):
        masked = ends(results, f"{name}, gradients masked by what arrived")["max"]
        kept[name], kept[f"{name}, share"] = masked, masked / ends(results, bare)["min"]
    return Claim(max(share for name, share in kept.items() if name.endswith("share")) < 0.25, kept)

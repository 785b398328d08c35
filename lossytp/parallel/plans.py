"""Tensor-parallel plans: which linear layers of a decoder are split by outputs, and which by inputs.

transformers' configurations carry such plans (`base_model_tp_plan`). A plan maps patterns of module names, relative to
the base model, to styles; `*` stands for the number of the block. The styles are those of transformers:

- "colwise": split by outputs (Shoeybi et al., "Megatron-LM", 2019, section 3);
- "rowwise": split by inputs, and summed;
- "colwise_gather_output": "colwise", and every rank gathers all outputs;
- "rowwise_split_input": "rowwise", where every rank holds all inputs;
- "replicated_with_grad_allreduce": replicated between the two; ranks sum the gradients of its parameters;
- "moe_tp_experts": a mixture of experts, of which each rank holds slices (`lossytp.parallel.experts`).

"colwise:3" is this project's own style: one layer holds three projections side by side, as GPT-2's does.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2PreTrainedModel, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lossytp.network.checks import check_is, refuse_if, shown
from lossytp.parallel.group import check_divides

# Deferred models: no process ever holds the whole model. It has the shapes on the meta device, and a record of how each
# weight is drawn. `parallelize`, `FlatFSDP` and FSDP2 draw a layer, keep this process's shard and drop the rest. So the
# shards are, to the last bit, parts of the dense model of the same seed.


Model = TypeVar("Model", bound=nn.Module)


class _Change(NamedTuple):
    operation: Any
    part: tuple[Any, ...]  # size, stride and offset of what it writes to
    random_state: Tensor | None  # of torch's generator before it; None if it draws nothing
    arguments: tuple
    named: dict[str, Any]


class _Record(TorchDispatchMode):
    """Write down what changes tensors on the meta device, and draw their random numbers as for real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: dict[int, list[_Change]] = {}  # by the address of the storage
        self._written: list[Tensor] = []  # kept, so that no other storage comes to an address in `changes`

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        named = kwargs or {}
        target = args[0] if args else None
        if not (isinstance(target, Tensor) and target.is_meta and func._schema.is_mutable):
            return func(*args, **named)
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = torch.get_rng_state()
            func(torch.empty(target.shape, dtype=target.dtype, device="cpu"), *args[1:], **named)
        part = (target.size(), target.stride(), target.storage_offset())
        change = _Change(func, part, state, args[1:], named)
        self._written.append(target)
        self.changes.setdefault(target.untyped_storage()._cdata, []).append(change)
        return target


def deferred(build: Callable[[], Model]) -> Model:
    """Return the model that `build` returns, with its parameters on the meta device and its buffers as they are.

    torch's generator advances as in building the model itself.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", register_on_meta), _Record() as record:
        model = build()
    for parameter in model.parameters():
        parameter.changes = record.changes.get(parameter.untyped_storage()._cdata, [])  # type: ignore[attr-defined]
    return model


def draw_(module: nn.Module) -> None:
    """Draw the deferred parameters of a module, on torch's default device."""
    drawn: dict[Any, nn.Parameter] = {}
    for old in [parameter for parameter in module.parameters() if parameter.is_meta]:
        drawn[old] = nn.Parameter(values_of(old).detach().to(torch.get_default_device()), old.requires_grad)
    for owner in module.modules():  # several may share a parameter
        for name, parameter in owner._parameters.items():
            owner._parameters[name] = drawn.get(parameter, parameter)


def values_of(parameter: Tensor) -> Tensor:
    """Return the values of a parameter, drawn now if it is deferred; torch's generator does not advance.

    Raises:
        ValueError: if it is on the meta device and `deferred` did not put it there.
    """
    if not parameter.is_meta:
        return parameter
    if not hasattr(parameter, "changes"):
        raise ValueError("a parameter is on the meta device, and how to draw it is not known: build with deferred()")
    values = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")  # whose generator the record is of
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for change in parameter.changes:
            if change.random_state is not None:
                torch.set_rng_state(change.random_state)
            change.operation(values.as_strided(*change.part), *change.arguments, **change.named)
    return values.requires_grad_(parameter.requires_grad)


Plan = Mapping[str, str]
GPT2_PLAN: Plan = {
    "h.*.attn.c_attn": "colwise:3",
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}
COLUMN = {"colwise": False, "colwise_gather_output": True}  # whether every rank needs all outputs
ROW = {"rowwise": False, "rowwise_split_input": True}  # whether every rank holds all inputs
SUMMED = "replicated_with_grad_allreduce"
EXPERTS = "moe_tp_experts"
LINEAR = (nn.Linear, Conv1D)
KEYS_AND_VALUES = ("k_proj", "v_proj")  # names of the layers whose heads several queries may share
EXAMPLE = '{"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}'


@dataclass(frozen=True)
class LayerSplit:
    """Dense linear layers that become one tensor-parallel layer.

    Attributes:
        linears: the layers; several if they read the same input, such as q, k and v.
        row: whether they are split by inputs, and not by outputs.
        whole: whether every rank needs all outputs of a column-parallel layer, or holds all inputs of a row-parallel
            one.
        projections: number of projections that each layer holds side by side.
        layer: number of the block.
        module: "attention" or "mlp".
        shared_heads: number of key-value heads that a linear layer computes for more query heads; 0 for other layers.
    """

    linears: tuple[nn.Module, ...]
    row: bool
    whole: bool
    projections: int
    layer: int
    module: str
    shared_heads: tuple[int, ...] = (0,)

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the number of outputs of each projection."""
        outputs = (weight_and_bias(linear)[0].shape[1] for linear in self.linears)
        return tuple(width // self.projections for width in outputs for _ in range(self.projections))

    def copies(self, size: int) -> tuple[int, ...]:
        """Return how many of `size` ranks hold a copy of each output, by projection."""
        return tuple(
            max(1, size // heads) if heads else 1 for heads in self.shared_heads for _ in range(self.projections)
        )

    def drawn_weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """Return weight (inputs, outputs) and bias of all linear layers, side by side; deferred ones are drawn."""
        if len(self.linears) == 1:
            return weight_and_bias(self.linears[0], values_of)
        weights, biases = zip(*(weight_and_bias(linear, values_of) for linear in self.linears), strict=True)
        train = weights[0].requires_grad, biases[0] is not None and biases[0].requires_grad
        with torch.no_grad():
            weight = torch.cat(weights, -1).requires_grad_(train[0])
            return weight, None if biases[0] is None else torch.cat(biases, -1).requires_grad_(train[1])


def weight_and_bias(
    linear: nn.Module, of: Callable[[Tensor], Tensor] = lambda parameter: parameter
) -> tuple[Tensor, Tensor | None]:
    """Return the weight, (inputs, outputs), and the bias of a Conv1D or nn.Linear, or what `of` returns for them."""
    parameters: Any = linear
    weight, bias = of(parameters.weight), None if parameters.bias is None else of(parameters.bias)
    return weight if isinstance(linear, Conv1D) else weight.t(), bias


def plan_of(model: PreTrainedModel, given: Plan | None = None) -> Plan:
    """Return the plan that is given for a model, or the model's own, of which patterns may name no module.

    Raises:
        TypeError: if there is none, or it does not map texts to texts.
        ValueError: if a given pattern names no module.
    """
    if given is None:
        is_gpt2 = isinstance(model, GPT2PreTrainedModel)
        plan = GPT2_PLAN if is_gpt2 else getattr(model.config, "base_model_tp_plan", None)
        if not plan:
            raise TypeError(f"{type(model).__name__} has no tensor-parallel plan: give plan, such as {EXAMPLE}")
        return dict(plan)
    weights = [name for name, _ in model.base_model.named_parameters()]  # a plan names those of experts, too
    check_is("plan", given, Mapping, f"patterns and the names of their styles, such as {EXAMPLE}")
    for pattern, style in given.items():
        check_is("plan's pattern", pattern, str, f"one, such as in {EXAMPLE}")
        check_is(f"plan[{pattern!r}]", style, str, "the name of a style, such as 'colwise'")
        if "*" in pattern and not any(map(_regex(pattern).fullmatch, weights)):
            named_by({pattern: style}, model)
    return given


def splits_of(model: PreTrainedModel, plan: Plan) -> list[LayerSplit]:
    """Return the layers of a dense model that `plan` shards.

    Raises:
        TypeError: if a layer is not an nn.Linear or a Conv1D.
        ValueError: if a style is unknown, no pattern names a module, or a part of a block has no layer of one kind.
    """
    columns: dict[tuple, list[tuple[nn.Module, int]]] = {}
    rows, mixtures = [], 0
    for name, layer, style, module in named_by(plan, model):
        kind, _, projections = style.partition(":")
        if kind in (SUMMED, EXPERTS):
            mixtures += kind == EXPERTS
            continue
        known = kind in COLUMN | ROW and re.fullmatch(r"([1-9]\d*)?", projections)
        fault = f"of {name} is not supported: give plan with {', '.join([*COLUMN, *ROW, SUMMED, EXPERTS])}"
        refuse_if(not known, "style", style, fault)
        parent = name.rpartition(".")[0]
        if own := [name for name, _ in model.base_model.get_submodule(parent).named_parameters(recurse=False)]:
            what = f"{parent} of {type(model).__name__} has parameters of its own ({', '.join(own)})"
            raise ValueError(f"{what}, which no style splits: give a plan without its layers, or another model")
        if type(module) not in LINEAR:
            what = f"{name} is of type {type(module).__name__}, not a dense linear layer"
            raise TypeError(f"{what}: give the dense model, or gather() it first")
        block = "attention" if "att" in parent else "mlp"
        if kind in ROW:
            rows.append(LayerSplit((module,), True, ROW[kind], 1, layer, block))
            continue
        weight, bias = weight_and_bias(module)
        shared = block == "attention" and not COLUMN[kind] and name.rpartition(".")[2] in KEYS_AND_VALUES
        heads = _shared_heads(model, parent, weight.shape[1]) if shared else 0
        alike = (len(weight), weight.dtype, weight.requires_grad, bias is not None and bias.requires_grad, bias is None)
        split = (COLUMN[kind], int(projections or 1), layer, block)
        columns.setdefault((parent, split, alike), []).append((module, heads))
    splits = [
        LayerSplit(tuple(linears), False, whole, projections, layer, block, heads)
        for (_, (whole, projections, layer, block), _), members in columns.items()
        for linears, heads in [tuple(zip(*members, strict=True))]
    ] + rows
    sites = [{(split.layer, split.module) for split in splits if split.row is row} for row in (False, True)]
    if not (splits or mixtures) or sites[0] != sites[1]:
        layer, block = min(sites[0] ^ sites[1], default=(0, "mlp"))
        fix = 'name its first layers as "colwise" and its last as "rowwise"'
        raise ValueError(f"the plan shards block {layer}'s {block} not both by outputs and by inputs: {fix}")
    return splits


def _shared_heads(model: PreTrainedModel, attention: str, outputs: int) -> int:
    """Return how many heads a layer of keys or values has, if more query heads share them; else 0."""
    module: Any = model.base_model.get_submodule(attention)
    groups, width = (getattr(module, name, None) for name in ("num_key_value_groups", "head_dim"))
    if groups is None or width is None:
        return getattr(model.config, "num_key_value_heads", None) or 0
    return int(outputs // width) if groups > 1 else 0


def check_size(model: PreTrainedModel, splits: list[LayerSplit], size: int) -> None:
    """Raise ValueError unless every rank gets the same number of heads and of every sharded layer's units."""
    config: Any = model.config
    inner = next((len(weight_and_bias(each.linears[0])[0]) for each in splits if each.row and each.module == "mlp"), 0)
    by_heads = any(split.module == "attention" and not split.whole for split in splits)
    heads = config.num_attention_heads if by_heads else 0
    for shared in {each for split in splits for each in split.shared_heads if each} or {0}:  # layers may differ
        check_divides(size, heads=heads, key_value_heads=shared, inner=inner)
    for split in splits:
        widths = (len(weight_and_bias(split.linears[0])[0]),) if split.row else split.widths
        for width, copies in zip(widths, split.copies(size), strict=True):
            fault = f"does not divide {width} units of block {split.layer}'s {split.module}: choose a divisor"
            refuse_if(width * copies % size, "tensor_parallel_size", size, fault)


def blocks_of(model: Any) -> list[Any]:
    """Return the transformer blocks of a decoder: the longest list of modules in its base model."""
    lists = [list(module) for module in model.base_model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


def style_of(plan: Plan, name: str) -> str | None:
    """Return the style that a plan gives a module or a weight; None if it has none for it."""
    return next((style for pattern, style in plan.items() if _regex(pattern).fullmatch(name)), None)


def _regex(pattern: str) -> re.Pattern:
    return re.compile(re.escape(pattern).replace(r"\*", r"(\d+)", 1).replace(r"\*", r"\d+"))


def named_by(plan: Plan, model: PreTrainedModel) -> list[tuple[str, int, str, Any]]:
    """Return the name, block number, style and module of every module that the plan names, in the model's order."""
    # modules outside the blocks stay replicated
    patterns = {_regex(pattern): style for pattern, style in plan.items() if "*" in pattern}
    found: Any = [
        (name, int(match[1]), style, module)
        for name, module in model.base_model.named_modules(remove_duplicate=False)
        for pattern, style in patterns.items()
        if (match := pattern.fullmatch(name))
    ]
    if not found:
        prefix = f"{model.base_model_prefix}."
        hint = f", and without {prefix!r}" if any(pattern.startswith(prefix) for pattern in plan) else ""
        fault = f"names no module of {type(model).__name__}: write it as in {EXAMPLE}{hint}"
        raise ValueError(f"the plan's pattern {shown(' or '.join(plan))} {fault}")
    return list(found)

"""From every way of sharing activations back to the dense model, or to its files, which transformers reads."""

import copy
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2DoubleHeadsModel,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

import lossytp as ltp
from lossytp.network.lossy_network import CommConfig
from lossytp.parallel import convert as multiple_choice
from lossytp.parallel.collectives import collective_of
from lossytp.parallel.convert import GPT2ForMultipleChoice, assert_converted, gather, multiple_choice_of
from lossytp.parallel.group import RankGroup
from tests.parallel.conftest import (
    MODELS,
    NUM_LAYERS,
    VOCABULARY,
    WIDTH,
    FakeProcessGroup,
    bernoulli,
    gradient_error,
    gradients,
    relative_error,
    tiny_batch,
    tiny_gpt2,
    training_losses,
)
from tests.parallel.families import tiny
from tests.parallel.sharing_modes import MODES, by_rank, every_kind, every_mode, lossy, parallel, parameters, unchanged


def assert_is_dense(back: PreTrainedModel, dense: PreTrainedModel) -> None:
    assert type(back) is type(dense)
    kinds = [
        [(name, type(module), module.training) for name, module in model.named_modules()] for model in (back, dense)
    ]
    assert kinds[0] == kinds[1]
    assert vars(back).keys() == vars(dense).keys()
    assert back.config.to_dict() == dense.config.to_dict()
    assert list(back.state_dict()) == list(dense.state_dict())
    for (name, parameter), expected in zip(back.named_parameters(), dense.parameters(), strict=True):
        assert parameter.requires_grad == expected.requires_grad, name
        assert parameter.dtype == expected.dtype, name
        assert torch.equal(parameter, expected), name


@every_kind
@every_mode
def test_gather_gives_the_dense_model_back_bitwise(mode, kind):
    for changes in ({}, {"tie_word_embeddings": False}):
        dense, batch = tiny_gpt2(kind, dtype=torch.float32, resid_pdrop=0.1, **changes), tiny_batch(kind)
        for part in (dense.transformer.ln_f.bias, dense.transformer.h[1].mlp.c_fc.weight, dense.transformer.h[0].attn):
            part.requires_grad_(False)
        dense.transformer.h[0].eval()
        model = parallel(dense, 0.1, mode, size=2)
        back = ltp.gather(model)
        assert_is_dense(back, dense)
        assert torch.equal(back.eval()(**batch).logits, dense.eval()(**batch).logits)
        if kind == "language model":
            tied = not changes
            for each in (model, back):
                assert (each.lm_head.weight is each.transformer.wte.weight) == tied
        assert torch.is_tensor(model(**batch).logits), "the parallel model is as it was"


@every_mode
def test_gather_follows_what_happened_to_the_parallel_model(mode):
    dense = tiny_gpt2("classifier")
    model = parallel(dense, 0.1, mode)
    for each in (dense, model):
        each.float().eval()
        each.transformer.wte.weight.requires_grad_(False)
        each.transformer.h[1].attn.c_attn.weight.requires_grad_(False)
        each.transformer.h[1].attn.c_proj.bias.requires_grad_(False)
    assert_is_dense(ltp.gather(model), dense)


@every_kind
def test_gather_after_training_takes_the_first_ranks_copies(kind):
    dense, batch = tiny_gpt2(kind), tiny_batch(kind)
    model = parallel(dense, 0.1, "own copies")
    training_losses(model, batch, steps=2)
    back, first = ltp.gather(model), by_rank(model, dense, parameters(model))[0]
    assert all(torch.equal(parameter, first[name]) for name, parameter in back.named_parameters())
    assert not torch.equal(back.transformer.wte.weight, dense.transformer.wte.weight)
    if kind == "language model":
        assert back.lm_head.weight is back.transformer.wte.weight
    assert model(**batch).rank_logits.shape[0] == 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@every_mode
def test_a_copy_trains_independently(mode, copied):
    """It has a network of its own, which goes on from where the first one was."""
    batch = tiny_batch("classifier")
    model = parallel(tiny_gpt2("classifier"), 0.1, mode, repair="stale")
    training_losses(model, batch, steps=1)
    again, before = copied(model), copy.deepcopy(model.state_dict())
    losses = training_losses(again, batch, steps=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert training_losses(model, batch, steps=2) == losses


@every_kind
def test_the_parallel_model_is_not_changed_by_gather(kind):
    parallel, batch = lossy(tiny_gpt2(kind), 0.1), tiny_batch(kind)
    untouched = lossy(tiny_gpt2(kind), 0.1)
    with unchanged(parallel):
        training_losses(ltp.gather(parallel), batch, steps=2)
    assert training_losses(parallel, batch, steps=3) == training_losses(untouched, batch, steps=3)


WAYS: list[dict[str, Any]] = [{}, {"reliable_gather": False}, {"reliable_gather": False, "own_copies": True}]


def assert_same_weights(loaded: Any, expected: Any) -> None:
    state, wanted = loaded.state_dict(), expected.state_dict()
    assert list(state) == list(wanted)
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("kind", "tied"), [("language model", True), ("language model", False), ("classifier", True)])
@pytest.mark.parametrize("how", WAYS, ids=["one stream", "own streams", "own copies"])
def test_what_is_saved_is_read_back_bitwise(kind, tied, how, tmp_path):
    plain = MODELS[kind]
    model = ltp.parallelize(tiny_gpt2(kind, tie_word_embeddings=tied), bernoulli(0.2), tensor_parallel_size=4, **how)
    training_losses(model, tiny_batch(kind), steps=2)
    other = copy.deepcopy(model)  # a copy saves itself
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.zero_()
    other.save_pretrained(tmp_path, state_dict=None, is_main_process=True)  # as transformers' Trainer does
    auto = AutoModelForCausalLM if kind == "language model" else AutoModelForSequenceClassification
    loaded = auto.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(loaded) is plain
    assert_same_weights(loaded, gather(other))
    assert kind == "classifier" or (loaded.lm_head.weight is loaded.transformer.wte.weight) is tied
    assert loaded.config.architectures == [plain.__name__]
    assert (tmp_path / "model.safetensors").is_file()


def test_a_model_in_half_precision_is_saved_in_it(tmp_path):
    dense = tiny_gpt2(dtype=torch.bfloat16)
    model = ltp.parallelize(dense, bernoulli(0.1), tensor_parallel_size=2)
    model(**tiny_batch()).loss.backward()
    model.save_pretrained(tmp_path)
    assert_same_weights(GPT2LMHeadModel.from_pretrained(tmp_path), dense)


def test_a_class_of_the_callers_own_is_saved_too(tmp_path):
    class Mine(GPT2LMHeadModel):
        pass

    model = lossy(Mine(tiny_gpt2().config), 0.1)
    assert isinstance(model, Mine)
    assert type(model).__name__ == "Mine"
    assert type(gather(model)) is Mine
    model.save_pretrained(tmp_path)
    assert_same_weights(Mine.from_pretrained(tmp_path, dtype=model.dtype), gather(model))


@pytest.mark.parametrize("how", WAYS, ids=["one stream", "own streams", "own copies"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_state_of_the_dense_model_is_loaded_into_shards(family, how):
    models = [tiny_gpt2() if family == "gpt2" else tiny(family) for _ in range(2)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter += 1
    parallel = ltp.parallelize(models[0], bernoulli(0.2), tensor_parallel_size=4, **how)
    state = models[1].state_dict()
    keys = parallel.load_state_dict(state)
    assert not keys.missing_keys
    assert not keys.unexpected_keys
    assert_same_weights(gather(parallel), models[1])
    again = ltp.parallelize(models[0], bernoulli(0.2), tensor_parallel_size=4, **how)
    again.load_state_dict(parallel.state_dict())  # its own state, sharded
    assert_same_weights(gather(again), models[1])
    for own in again.parameters():
        assert any(torch.equal(own, other) for other in parallel.parameters()), "of every rank's copy"
    with pytest.raises(RuntimeError, match="Missing key"):
        parallel.load_state_dict({name: state[name] for name in list(state)[1:]})
    attention = {name: 2 * weight for name, weight in state.items() if ".q_proj." in name or ".c_attn.weight" in name}
    assert not parallel.load_state_dict(attention, strict=False).unexpected_keys
    models[1].load_state_dict(attention, strict=False)
    assert_same_weights(gather(parallel), models[1])


@pytest.mark.slow
def test_transformers_trainer_resumes_its_checkpoint(tmp_path):
    batch = tiny_batch()
    rows = [{name: values[number] for name, values in batch.items()} for number in range(len(batch["labels"]))]

    def losses(checkpoint: str | None) -> list[float]:
        steps = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": len(rows)}
        how = {"lr_scheduler_type": "constant", "learning_rate": 1e-2, "disable_tqdm": True, "report_to": []}
        arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **steps, **how)
        model = lossy(tiny_gpt2(), 0.0)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=checkpoint)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    unbroken = losses(None)
    assert losses(str(tmp_path / "checkpoint-2")) == unbroken
    assert unbroken[3] < unbroken[0]


def save_on_every_process(folder: str) -> list[str]:
    dist.init_process_group("gloo")
    try:
        network = bernoulli(0.2)
        model = ltp.parallelize(tiny_gpt2(), network, tensor_parallel_size=4, reliable_gather=False)
        model.save_pretrained(Path(folder) / f"by rank {dist.get_rank()}")
        dist.barrier()
        loaded = GPT2LMHeadModel.from_pretrained(Path(folder) / "by rank 0", dtype=torch.float64)
        assert_same_weights(loaded, tiny_gpt2())
        assert network.counters.rows() == []
        return sorted(path.name for path in Path(folder).iterdir())
    finally:
        dist.destroy_process_group()


def test_every_process_gathers_and_the_first_one_writes(processes, tmp_path):
    assert processes(2, save_on_every_process, str(tmp_path)) == [["by rank 0"]] * 2


def test_nothing_is_written_by_another_process_or_of_shards(tmp_path):
    model = lossy(tiny_gpt2(), 0.1)
    model.save_pretrained(tmp_path / "folder", is_main_process=False)
    with pytest.raises(ValueError, match=r"^state_dict has "):
        model.save_pretrained(tmp_path / "folder", state_dict=model.state_dict())
    assert not (tmp_path / "folder").exists()


def bert(**_: Any) -> PreTrainedModel:
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=9)
    return BertForSequenceClassification(config)


@pytest.mark.parametrize(
    ("model", "how", "error", "message"),
    [
        (tiny_gpt2, {"tensor_parallel_size": 3}, ValueError, "tensor_parallel_size = 3"),
        (lambda: tiny_gpt2(n_inner=100), {"tensor_parallel_size": 8}, ValueError, "tensor_parallel_size = 8"),
        (tiny_gpt2, {"algorithm": "rings"}, ValueError, "algorithm = 'rings'"),
        (tiny_gpt2, {"repair": "magic"}, ValueError, "repair = 'magic'"),
        (tiny_gpt2, {"own_copies": True}, ValueError, "own_copies = True"),
        (tiny_gpt2, {"comm": CommConfig(), "repair": "zero", "seed": 1}, ValueError, "comm and repair, seed"),
        (bert, {}, TypeError, "BertForSequenceClassification has no tensor-parallel plan: give plan"),
        (lambda: GPT2Model(tiny_gpt2().config), {}, TypeError, "GPT2Model cannot"),
        (lambda: GPT2DoubleHeadsModel(tiny_gpt2().config), {}, TypeError, "GPT2DoubleHeadsModel cannot"),
        (lambda: lossy(tiny_gpt2(), 0.0), {}, TypeError, "the model is tensor-parallel already"),
        (lambda: tiny_gpt2(add_cross_attention=True), {}, ValueError, "add_cross_attention = True"),
        *(
            (tiny_gpt2, {name: value}, TypeError, f"{name} = {value!r} is ")
            for name, value in [
                *(("network", 0.1), ("group", 4), ("own_copies", "no"), ("reliable_gather", "no")),
                *(("tensor_parallel_size", "4"), ("repair", None), ("comm", "ring")),
            ]
        ),
    ],
)
def test_what_cannot_be_parallelized_is_refused(model, how, error, message):
    dense = model()
    with unchanged(dense), pytest.raises(error, match=f"^{re.escape(message)}"):
        ltp.parallelize(dense, **{"network": bernoulli(0.1), "tensor_parallel_size": 4} | how)


@pytest.mark.parametrize(("kind", "name"), [(Conv1D, "attn.c_attn"), (nn.Linear, "mlp.c_proj"), (None, "mlp.c_proj")])
def test_a_model_that_was_not_converted_whole_is_refused(kind, name):
    """An earlier study sharded nothing: it looked for `nn.Linear`, and GPT-2's blocks have `Conv1D`."""
    parallel = lossy(tiny_gpt2(), 0.0)
    assert_converted(parallel)
    block = parallel.transformer.h[1]
    block.set_submodule(name, kind(WIDTH, WIDTH) if kind else block.mlp.c_fc)
    with pytest.raises(AssertionError, match=r"block 1 was not converted"):
        assert_converted(parallel)


@pytest.mark.parametrize("model", [tiny_gpt2, partial(tiny, "llama")])
def test_a_training_step_sends_four_messages_a_layer(model):
    """Attention and MLP, forward and backward: q, k and v share one backward message, and gate and up another."""
    parallel = lossy(model(dtype=torch.float32), 0.0)
    gradients(parallel, tiny_batch())
    table = collective_of(parallel).network.report()
    sites = table.groupby(["layer", "module", "direction"])["packets"].agg(["count", "sum"])
    assert sorted(sites.index) == [
        (layer, module, direction)
        for layer in range(NUM_LAYERS)
        for module in ("attention", "mlp")
        for direction in ("backward", "forward")
    ]
    assert set(sites["count"]) == {4 * 3}  # links of four ranks
    assert set(table["packets"]) == {4}  # a quarter of B * T * D = 5,824 elements, 364 a packet


def test_converting_training_and_gathering_draw_nothing_from_the_global_generators():
    dense = tiny_gpt2()
    before, numpy_before = torch.get_rng_state(), repr(np.random.get_state())  # noqa: NPY002
    parallel = lossy(dense, 0.1)
    training_losses(parallel, tiny_batch(), steps=1)
    ltp.gather(parallel)
    assert torch.equal(torch.get_rng_state(), before)
    assert repr(np.random.get_state()) == numpy_before  # noqa: NPY002
    training_losses(lossy(tiny_gpt2(resid_pdrop=0.1), 0.1), tiny_batch(), steps=1)
    assert not torch.equal(torch.get_rng_state(), before), "control: dropout does"


EXAMPLES, OPTIONS, TOKENS, RANKS = 5, 3, 9, 4


@pytest.fixture
def dense(monkeypatch):
    monkeypatch.setitem(tiny_gpt2.__globals__["MODELS"], "multiple choice", GPT2ForMultipleChoice)
    return tiny_gpt2("multiple choice", num_labels=1)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (EXAMPLES, OPTIONS, TOKENS), generator=generator)
    lengths = torch.randint(2, TOKENS + 1, (EXAMPLES, OPTIONS, 1), generator=generator)
    mask = (torch.arange(TOKENS) < lengths).long()
    mask[-1, -1] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.tensor([0, 1, 2, 1, 0])}


def test_every_option_is_scored_as_if_it_were_alone(dense, batch):
    classifier = GPT2ForSequenceClassification(dense.config).double().eval()
    classifier.load_state_dict(dense.state_dict())
    logits = dense.eval()(**batch).logits
    for example in range(EXAMPLES):
        for option in range(OPTIONS):
            if not batch["attention_mask"][example, option].any():
                continue
            length = int(batch["attention_mask"][example, option].sum())
            alone = classifier(batch["input_ids"][example, option, :length].unsqueeze(0)).logits
            assert logits[example, option].item() == pytest.approx(alone.item(), abs=1e-12)


def test_an_option_that_is_none_is_never_chosen_and_moves_nothing(dense, batch):
    output = dense(**batch)
    assert output.logits[-1, -1] == -torch.inf
    present = torch.log_softmax(output.logits[-1, :2], 0)[0]
    others = torch.log_softmax(output.logits[:-1], 1)[range(EXAMPLES - 1), batch["labels"][:-1]]
    assert output.loss.item() == pytest.approx(-(present + others.sum()).item() / EXAMPLES, rel=1e-12)
    before = gradients(dense, batch)
    batch["input_ids"][-1, -1] = 5
    assert gradient_error(gradients(dense, batch), before) < 1e-12
    assert all(gradient.isfinite().all() for gradient in before.values())


@pytest.mark.parametrize("way", MODES)
def test_without_losses_it_is_the_dense_model(dense, batch, way):
    expected, expected_gradients = dense(**batch).logits, gradients(dense, batch)
    model = ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=RANKS, **MODES[way])
    output = model(**batch)
    finite = expected.isfinite()
    assert torch.equal(output.logits.isfinite(), finite)
    assert relative_error(output.logits[finite], expected[finite]) < 1e-12
    if "own" in way:
        assert output.rank_logits.shape == (RANKS, EXAMPLES, OPTIONS)
        assert relative_error(output.rank_logits[:, finite], expected[finite].expand(RANKS, -1)) < 1e-12
    output.loss.backward()
    dense_again = ltp.gather(model)
    assert type(dense_again) is GPT2ForMultipleChoice
    if "own" not in way:
        norm = dict(model.named_parameters())["transformer.ln_f.weight"].grad
        assert relative_error(norm, expected_gradients["transformer.ln_f.weight"]) < 1e-12


def test_any_family_chooses(batch):
    """Its classifier scores the options; copies, pickles and `gather` know the class."""
    classifier = tiny("qwen2", "classifier", num_labels=1)
    kind = multiple_choice_of(type(classifier))
    assert kind.__name__ == "Qwen2ForMultipleChoice"
    assert kind is multiple_choice.Qwen2ForMultipleChoice
    dense = kind(classifier.config).double()
    dense.load_state_dict(classifier.state_dict())
    expected = classifier(batch["input_ids"][0], attention_mask=batch["attention_mask"][0]).logits.view(-1)
    assert relative_error(dense(**batch).logits[0], expected) < 1e-12
    model = pickle.loads(pickle.dumps(ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=2)))
    assert relative_error(model(**batch).logits[0], expected) < 1e-12
    assert type(copy.deepcopy(ltp.gather(model))) is kind
    with pytest.raises(AttributeError, match="no attribute 'NobodysForMultipleChoice'"):
        multiple_choice.NobodysForMultipleChoice  # noqa: B018


SHARING = ["gpt2", "llama", "qwen2", "phi3", "gpt_neox", "llama, tied"]
PARTLY = ["qwen2, one key-value head", "mixtral"]  # copies of key-value heads, and experts, have their own memory


def memory_of(*models: nn.Module) -> int:
    storages = [each.untyped_storage() for model in models for each in model.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def dense_of(family: str) -> Any:
    return (tiny_gpt2(dtype=torch.float32) if family == "gpt2" else tiny(family, dtype=torch.float32)).eval()


@pytest.mark.parametrize("family", [*SHARING, *PARTLY])
def test_sharing_memory_changes_no_result(family):
    given, batch = dense_of(family), tiny_batch()
    outputs = []
    for share_memory in (False, True, True):  # the second time, the dense weights are views already
        network = bernoulli(0.1, wire=ltp.Wire(mtu_bytes=108))
        model = ltp.parallelize(given, network, tensor_parallel_size=4, share_memory=share_memory)
        outputs.append(model(**batch).logits)
    assert torch.equal(outputs[1], outputs[0])
    assert torch.equal(outputs[2], outputs[0])
    untouched = dense_of(family)
    assert relative_error(given(**batch).logits, untouched(**batch).logits) < 1e-5
    for name, weight in untouched.state_dict().items():
        assert torch.equal(given.state_dict()[name], weight)
        assert torch.equal(ltp.gather(model).state_dict()[name], weight)


@pytest.mark.parametrize("family", SHARING)
def test_both_together_are_hardly_larger_than_one(family):
    dense = dense_of(family)
    alone = memory_of(dense)
    own = ltp.parallelize(dense, bernoulli(0.1), tensor_parallel_size=4)
    assert memory_of(dense, own) == 2 * alone, "control"
    shared = ltp.parallelize(dense, bernoulli(0.1), tensor_parallel_size=4, share_memory=True)
    assert memory_of(dense, shared) < 1.05 * alone


def test_processes_cannot_share_memory():
    group = RankGroup(4, process_group=FakeProcessGroup(2, 0), first_rank=0)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"^share_memory = True does not work where 2 processes hold parts of the model: "
    ):
        ltp.parallelize(tiny_gpt2(), bernoulli(0.1), tensor_parallel_size=4, group=group, share_memory=True)

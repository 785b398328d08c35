"""From every way of sharing activations back to the dense model, or to its files, which transformers reads."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedModel,
)

import lossytp as ltp
from lossytp.parallel.convert import gather
from tests.parallel.conftest import MODELS, bernoulli, tiny_batch, tiny_gpt2, training_losses
from tests.parallel.families import tiny
from tests.parallel.sharing_modes import (
    assert_same_steps,
    by_rank,
    every_kind,
    every_mode,
    lossy,
    parallel,
    parameters,
    two_steps,
    unchanged,
)


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
def test_gather_gives_the_dense_model_back_bitwise(mode: str, kind: str) -> None:
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
def test_gather_follows_what_happened_to_the_parallel_model(mode: str) -> None:
    """Its dtype, what was frozen since, whether it trains."""
    dense = tiny_gpt2("classifier")
    model = parallel(dense, 0.1, mode)
    for each in (dense, model):
        each.float().eval()
        each.transformer.wte.weight.requires_grad_(False)
        each.transformer.h[1].attn.c_attn.weight.requires_grad_(False)
        each.transformer.h[1].attn.c_proj.bias.requires_grad_(False)
    assert_is_dense(ltp.gather(model), dense)


@every_kind
def test_gather_after_training_takes_the_first_ranks_copies(kind: str) -> None:
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
def test_a_copy_trains_independently(mode: str, copied: Any) -> None:
    """It has a network of its own, which goes on from where the first one was."""
    batch = tiny_batch("classifier")
    model = parallel(tiny_gpt2("classifier"), 0.1, mode, repair="stale")
    training_losses(model, batch, steps=1)
    again, before = copied(model), copy.deepcopy(model.state_dict())
    losses = training_losses(again, batch, steps=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert training_losses(model, batch, steps=2) == losses


def test_neither_parallelize_nor_gather_draws_from_the_global_generator() -> None:
    dense, before = tiny_gpt2(), torch.get_rng_state()
    ltp.gather(lossy(dense, 0.1))
    assert torch.equal(torch.get_rng_state(), before)


@every_kind
def test_the_dense_model_is_not_changed(kind: str) -> None:
    dense, batch = tiny_gpt2(kind), tiny_batch(kind)
    with unchanged(dense):
        parallel = lossy(dense, 0.1)
        training_losses(parallel, batch, steps=2)
    assert all(parameter.grad is None for parameter in dense.parameters())


@every_kind
def test_the_parallel_model_is_not_changed_by_gather(kind: str) -> None:
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
def test_what_is_saved_is_read_back_bitwise(kind: str, tied: bool, how: dict[str, Any], tmp_path: Path) -> None:
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


def test_a_model_in_half_precision_is_saved_in_it(tmp_path: Path) -> None:
    dense = tiny_gpt2(dtype=torch.bfloat16)
    model = ltp.parallelize(dense, bernoulli(0.1), tensor_parallel_size=2)
    model(**tiny_batch()).loss.backward()
    model.save_pretrained(tmp_path)
    assert_same_weights(GPT2LMHeadModel.from_pretrained(tmp_path), dense)


def test_saving_changes_nothing_and_sends_nothing(tmp_path: Path) -> None:
    model, plain = (lossy(tiny_gpt2(), 0.2) for _ in range(2))
    model.save_pretrained(tmp_path)
    assert_same_steps(two_steps(model), two_steps(plain))


def test_a_class_of_the_callers_own_is_saved_too(tmp_path: Path) -> None:
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
def test_the_state_of_the_dense_model_is_loaded_into_shards(family: str, how: dict[str, Any]) -> None:
    """As transformers' Trainer does to resume, and to load its best checkpoint."""
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
def test_transformers_trainer_resumes_its_checkpoint(tmp_path: Path) -> None:
    batch = tiny_batch()
    rows = [{name: values[number] for name, values in batch.items()} for number in range(len(batch["labels"]))]

    def losses(checkpoint: str | None) -> list[float]:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=4,
            save_steps=2,
            per_device_train_batch_size=len(rows),
            logging_steps=1,
            lr_scheduler_type="constant",
            learning_rate=1e-2,
            disable_tqdm=True,
            report_to=[],
            use_cpu=True,
        )
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


def test_every_process_gathers_and_the_first_one_writes(processes: Callable, tmp_path: Path) -> None:
    assert processes(2, save_on_every_process, str(tmp_path)) == [["by rank 0"]] * 2


def test_nothing_is_written_by_another_process_or_of_shards(tmp_path: Path) -> None:
    model = lossy(tiny_gpt2(), 0.1)
    model.save_pretrained(tmp_path / "folder", is_main_process=False)
    with pytest.raises(ValueError, match=r"^state_dict has "):
        model.save_pretrained(tmp_path / "folder", state_dict=model.state_dict())
    assert not (tmp_path / "folder").exists()

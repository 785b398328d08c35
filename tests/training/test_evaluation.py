"""Test evaluations of saved models: scores, perplexity and text; and that every kind of task is learnt."""

import json
import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from transformers import GPT2LMHeadModel

from lossytp.training import evaluation, tasks
from lossytp.training.config import EvaluateConfig
from lossytp.training.corpus import corpus
from lossytp.training.models import load_tokenizer
from lossytp.training.text import all_blocks
from tests.training.bos import BOS, with_bos
from tests.training.tasks_of_all_kinds import OWN_STREAMS, TABLE, TASKS, evaluate, losses, rows, train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("comm", [{}, OWN_STREAMS], ids=str)
@pytest.mark.parametrize("kind", TASKS)
def test_evaluating_gives_the_training_runs_own_scores_for_every_kind_of_task(tmp_path, kind, comm):
    record = train(tmp_path, kind, **comm)
    assert record["status"] == "finished"
    assert record["network"]["training"]["lost"] > 0
    assert record["network"]["evaluation"]["lost"] > 0
    result = evaluate(tmp_path)
    assert result == json.loads((tmp_path / "evaluated" / "evaluation.json").read_text())
    assert (result["dataset"], result["metric"], result["test_examples"]) == (kind, TASKS[kind].metrics[0], 6)
    last = record["curves"]["eval"][-1]
    for metric, value in result["clean"].items():
        assert value == pytest.approx(last[f"{metric}_clean"], abs=1e-6), metric
        assert result["lossy"][metric] == value  # without losses
    lossy = evaluate(tmp_path, loss_rate=0.5, **comm, output_dir=str(tmp_path / "lossy"))
    assert lossy["clean"] == pytest.approx(result["clean"], abs=1e-6)
    assert lossy["network"]["lost"] > 0
    if kind in ("classification", "choice"):
        assert lossy["lossy"]["cross_entropy"] != pytest.approx(lossy["clean"]["cross_entropy"], rel=1e-3)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n".join(row["text"] for row in rows(60, 0)))
    return str(file)


def test_the_perplexity_is_that_of_the_dense_model(tmp_path, text):
    train(tmp_path, "generation")
    values = {"dataset": None, "data_glob": text, "max_length": 40, "eval_samples": None}
    result = evaluate(tmp_path, loss_rate=0.4, **values)
    folder = tmp_path / "run" / "last"
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    blocks = all_blocks(corpus(text, split="validation"), load_tokenizer(str(folder)), block_size=40)
    assert len(blocks) > evaluation.BLOCKS_AT_ONCE
    with torch.no_grad():
        expected = math.exp(model(blocks, labels=blocks).loss)
    assert result["perplexity"]["clean"] == pytest.approx(expected, rel=1e-5)
    assert result["perplexity"]["lossy"] != pytest.approx(expected, rel=1e-4)
    few = evaluate(tmp_path, **{**values, "eval_samples": 3}, output_dir=str(tmp_path / "few"))
    assert few["perplexity"]["clean"] != result["perplexity"]["clean"]
    assert few["perplexity"]["lossy"] == few["perplexity"]["clean"]
    assert (result["blocks"], few["blocks"]) == (len(blocks), 3)


def test_texts_stand_behind_the_token_that_the_tokenizer_asks_for(tmp_path, text):
    train(tmp_path, "generation")
    folder = tmp_path / "run" / "last"
    values = {"data_glob": text, "prompt": "the rose", "max_length": 40, "eval_samples": None}
    bare = evaluate(tmp_path, **values)
    with_bos(load_tokenizer(str(folder))).save_pretrained(folder)
    asks = evaluate(tmp_path, **values)
    blocks = all_blocks(corpus(text, split="validation"), load_tokenizer(str(folder)), block_size=40)
    with torch.no_grad():
        expected = math.exp(GPT2LMHeadModel.from_pretrained(folder).eval()(blocks, labels=blocks).loss)
    assert asks["perplexity"]["clean"] == pytest.approx(expected, rel=1e-5)
    assert asks["perplexity"]["clean"] != bare["perplexity"]["clean"]
    assert asks["text"]["clean"].startswith(f"{BOS}the rose")
    assert not asks["text"]["clean"].startswith(f"{BOS}the rose<|endoftext|>"), "the prompt goes on"
    assert asks["first_tokens"] == [BOS]
    assert "first_tokens" not in bare


@pytest.mark.parametrize("cross_entropy", [math.nan, 800.0])
def test_a_perplexity_that_is_not_finite_is_null(tmp_path, text, monkeypatch, cross_entropy):
    train(tmp_path, "generation")
    monkeypatch.setattr(evaluation.Engine, "cross_entropies", lambda self, batches: [cross_entropy])
    result = evaluate(tmp_path, dataset=None, data_glob=text, max_length=40)
    assert result["perplexity"] == {"clean": None, "lossy": None}


def test_examples_are_cut_as_in_training_by_default(tmp_path):
    record = train(tmp_path, "classification", max_length=4)
    assert record["data"]["cut_share"] == 1
    result = evaluate(tmp_path)
    assert result["max_length"] == 4
    assert result["clean"]["cross_entropy"] == record["final"]["cross_entropy_clean"]
    further = evaluate(tmp_path, max_length=48, output_dir=str(tmp_path / "further"))
    assert further["max_length"] == 48
    assert further["clean"]["cross_entropy"] != record["final"]["cross_entropy_clean"]


def test_a_model_that_learnt_other_classes_is_refused(tmp_path):
    train(tmp_path, "classification")
    config = tmp_path / "run" / "last" / "config.json"
    learnt = json.loads(config.read_text())["id2label"]
    config.write_text(config.read_text().replace(next(iter(learnt.values())), "otherwise"))
    with pytest.raises(ValueError, match="dataset"):
        evaluate(tmp_path)


@pytest.mark.parametrize("text", ["my notes", "{}", "[]"])
def test_a_users_file_named_evaluation_json_is_refused_and_stays(tmp_path, text):
    file = tmp_path / "evaluation.json"
    file.write_text(text)
    config = EvaluateConfig(model_name="gpt2-nano", prompt="The", output_dir=str(tmp_path))
    with pytest.raises(ValueError, match=rf"^{file} is in the way"):
        evaluation.run(config)
    assert file.read_text() == text


@pytest.mark.parametrize("comm", [{}, OWN_STREAMS], ids=str)
def test_the_text_is_that_of_greedy_search(tmp_path, comm):
    train(tmp_path, "generation")
    result = evaluate(tmp_path, prompt="the rose", new_tokens=12, loss_rate=0.6, **comm)
    folder = tmp_path / "run" / "last"
    model, tokenizer = GPT2LMHeadModel.from_pretrained(folder).eval(), load_tokenizer(str(folder))
    ids = tokenizer("the rose", return_tensors="pt")["input_ids"]
    ids = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    assert result["text"]["clean"] == tokenizer.decode(ids[0])
    assert result["text"]["lossy"].startswith("the rose")
    assert result["text"]["lossy"] != result["text"]["clean"]


def test_a_model_without_the_needed_head_is_one_line(tmp_path, text):
    train(tmp_path, "classification")
    for values, message in (
        *(({"dataset": kind}, f"dataset = '{kind}' needs") for kind in ("choice", "regression")),
        *((values, "need a language model") for values in ({"data_glob": text}, {"prompt": "the"})),
        ({"model_name": "gpt2-nano-scratch", "prompt": "the"}, "is untrained"),
        *(({name: value}, name) for name, value in (("lossy_direction", "backward"), ("max_length", 129))),
    ):
        with pytest.raises(ValueError, match=f"^[^\n]*{message}[^\n]*$"):
            evaluate(tmp_path, **values)
    with pytest.raises(ValueError, match="layers"):
        evaluate(tmp_path, loss_rate=0.1, lossy_layers="5:6")
    train(tmp_path, "generation", output_dir=str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"new_tokens = 200 is above 127: give fewer than the model's 128 positions"):
        evaluate(tmp_path, model_name=str(tmp_path / "other" / "last"), prompt="the", new_tokens=200)
    config = tmp_path / "other" / "last" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "finetuning_task": None}))
    with pytest.raises(ValueError, match=r"nothing to evaluate .* on: give dataset, data_glob or prompt"):
        evaluate(tmp_path, model_name=str(tmp_path / "other" / "last"))


@pytest.mark.parametrize("kind", ["classification", "regression", "choice"])
def test_an_easy_pattern_is_learnt(tmp_path, kind):
    values = {"max_steps": 60, "loss_rate": 0.02, "eval_samples": 15, "save_model": False}
    record = train(tmp_path, kind, **values)
    assert record["final"]["score_clean"] > 0.9
    assert record["final"]["score_lossy"] > 0.8
    assert record["data"]["chance"] < 0.7


def test_generating_the_answer_is_learnt(tmp_path):
    record = train(tmp_path, "generation", max_steps=80, loss_rate=0.02, save_model=False, learning_rate=1e-2)
    assert record["final"]["score_clean"] > 0.6
    assert record["curves"]["eval"][-1]["f1_clean"] >= record["final"]["score_clean"]


@pytest.mark.parametrize("kind", ["choice", "generation"])
def test_two_processes_train_and_evaluate_as_virtual_ranks_do(processes, tmp_path, kind):
    values = {"tensor_parallel_size": 2, **OWN_STREAMS}
    folders = [tmp_path / "here", tmp_path / "there"]
    here = train(folders[0], kind, **values)
    there = processes(2, _train, folders[1], kind, values)[0]
    assert losses(there) == pytest.approx(losses(here), rel=1e-4)
    assert there["network"] == here["network"]
    mine = evaluate(folders[0], loss_rate=0.3, **values)
    theirs = processes(2, _evaluate, folders[0], {"loss_rate": 0.3, **values})
    assert theirs[0] == theirs[1]
    assert theirs[0]["network"] == mine["network"]
    for network in ("clean", "lossy"):
        assert theirs[0][network] == pytest.approx(mine[network], rel=1e-4, abs=1e-6)


def test_replicas_of_a_generation_task_count_by_tokens(processes, tmp_path):
    """Answers have one word or ten, so replicas predict different numbers of tokens; one process predicts all."""
    values = {"tensor_parallel_size": 1, "loss_rate": 0.0, "save_model": False, "batch_size": 6, "max_steps": 6}
    with patch.dict(TASKS, uneven=_uneven()):
        here = train(tmp_path / "here", "uneven", **values)
    for number in (1, 2):
        there = processes(
            2,
            _train,
            tmp_path / f"there {number}",
            "uneven",
            {**values, "data_parallel_size": 2, "gradient_accumulation_steps": number},
        )[0]
        assert losses(there) == pytest.approx(losses(here), rel=1e-4)


def _uneven():
    def with_answers(row):
        return {**row, "colour": [" ".join(row["colour"] * (1 if row["label"] else 10))]}

    table = tasks.Table(train=[with_answers(row) for row in TABLE.train], test=TABLE.test)
    return replace(TASKS["generation"], source=table)


def _train(folder, kind, values):
    with patch.dict(TASKS, uneven=_uneven()):
        return train(folder, kind, **values)


def _evaluate(folder, values):
    return evaluate(folder, **values)

"""Test what `python -m lossytp.harness` scores, keeps, says and refuses."""

import json

import numpy as np
import pytest

pytest.importorskip("lm_eval")

import lm_eval.evaluator
import torch
from lm_eval.api.metrics import mean, perplexity
from lm_eval.models.huggingface import HFLM

import lossytp as ltp
from lossytp.harness import HarnessConfig, Measurement, load_tasks, measure_and_print, score_of
from lossytp.harness_tasks import last_words, passages, rows_of
from lossytp.tolerance.config import Setup
from lossytp.training.models import load_model, load_tokenizer

WORDS = ["river", "town", "church", "army", "king", "music", "season", "school", "number", "village"]
SCORES = """task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}, train: {rows}}}}}
training_split: train
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
doc_to_target: {target}
{more}
"""
CHOICES = 'doc_to_choice: ["the", "of", "in"]\nmetric_list: [{metric: acc}, {metric: mcc}]'
ANSWERS = "metric_list: [{metric: exact_match}]\ngeneration_kwargs: {until: ['.'], max_gen_toks: 4}"
DENSE = Setup("direct", "reduce", "zero", 0.0)


@pytest.fixture
def task(tmp_path):
    """Return a function that writes a user's own task, of ten examples, and returns its file."""
    rows = [{"text": f"The {word} of the {word}", "word": word, "label": n % 3} for n, word in enumerate(WORDS)]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))

    def write(kind="loglikelihood", target='" {{word}}"', more="metric_list: [{metric: perplexity}, {metric: acc}]"):
        file = tmp_path / "mine.yaml"
        file.write_text(SCORES.format(rows=tmp_path / "rows.json", kind=kind, target=target, more=more))
        return str(file)

    return write


def settings(tasks, **values):
    small = {"tasks": tasks, "repairs": "zero", "draws": 2, "loss_rates": "0.3"}
    return HarnessConfig(**{**small, **values})


def reference(model, tasks):
    """Return the harness's own results, as a user without this project gets them."""
    lm = HFLM(pretrained=model, tokenizer=load_tokenizer("gpt2-nano"), batch_size=1, logits_cache=False)
    return lm_eval.evaluator.evaluate(lm, {"tasks": tasks}, bootstrap_iters=0)["results"]


@pytest.mark.parametrize(
    ("repair", "phase", "algorithm"),
    [
        *(("zero", "reduce", "direct"), ("hadamard(64)", "reduce", "ring")),
        ("protect(0.1) + retransmit(1)", "both", "tree"),
    ],
)
def test_without_losses_the_score_is_the_dense_models(task, repair, phase, algorithm):
    measurement = Measurement(settings(f"{task()},last_word", eval_samples=10))
    found = measurement.rows(Setup(algorithm, phase, repair, 0.0))
    dense = reference(load_model("gpt2-nano"), load_tasks([task()], None))["words"]
    rows = {(row["task"], row["metric"]): row for row in found}
    assert set(rows) == {("words", "perplexity"), ("words", "acc"), ("last_word", "acc"), ("last_word", "nats")}
    for (name, metric), row in rows.items():
        assert len(row["scores"]) == 1, "all draws are alike"
        exactly = metric == "acc"
        assert row["change"]["value"] == (0 if exactly else pytest.approx(0, abs=1e-5 * row["score"]["value"]))
        if exactly:
            assert (np.array(row["values"]) == measurement.lossless[name, metric].values_N.round(9)).all()
        if name == "words":
            assert row["score"]["value"] == pytest.approx(dense[f"{metric},none"], rel=0 if exactly else 1e-5)


def test_each_draw_scores_what_the_harness_scores_over_its_losses(task):
    config = settings(task("multiple_choice", "label", CHOICES))
    setup = config.setups()[0]
    rows = {row["metric"]: row for row in Measurement(config).rows(setup)}
    network = config.network(setup).build()
    model = ltp.parallelize(load_model("gpt2-nano"), network, tensor_parallel_size=4)
    for draw in range(2):
        with network.evaluation(draw):
            expected = reference(model, load_tasks([config.tasks], None))["words"]
        for metric, row in rows.items():
            assert row["scores"][draw] == expected[f"{metric},none"]
    assert rows["mcc"]["score"]["value"] == np.mean(rows["mcc"]["scores"])
    values = np.array(rows["acc"]["values"])
    assert values.shape == (2, 10)
    assert values.mean(1) == pytest.approx(rows["acc"]["scores"])


def test_losses_change_scores_and_draws_differ(task):
    measurement = Measurement(settings(task()))
    (row,) = [row for row in measurement.rows(DENSE._replace(loss_rate=0.3)) if row["metric"] == "perplexity"]
    assert len(set(row["scores"])) == 2
    dense = measurement.lossless["words", "perplexity"].value
    assert row["change"]["value"] == pytest.approx(np.mean(row["scores"]) - dense)
    assert row["change"]["low"] < row["change"]["value"] < row["change"]["high"]


def test_each_choice_passes_the_model_on_its_own(task):
    measurement = Measurement(settings(task("multiple_choice", "label", CHOICES)))
    shapes = []
    hook = measurement.dense.register_forward_hook(lambda module, inputs, output: shapes.append(output.logits.shape))
    measurement.score(measurement.dense)
    hook.remove()
    assert len(shapes) == 30
    assert {shape[0] for shape in shapes} == {1}


def test_every_pass_asks_the_same_few_shot_questions(task):
    measurement = Measurement(settings(task(), num_fewshot=2))
    asked = [request.args for each in measurement.tasks.values() for request in each.instances]
    assert asked[0][0].count("The ") == 3
    again = measurement.score(measurement.dense)
    assert asked == [request.args for each in measurement.tasks.values() for request in each.instances]
    for metric, score in measurement.lossless.items():
        assert again[metric].value == score.value


def test_a_task_that_generates_its_answers(task):
    more = ANSWERS.replace("{until", "{do_sample: true, temperature: 2.0, until")
    measurement = Measurement(settings(task("generate_until", '"{{word}}"', more)))
    requests = measurement.tasks["words"].instances
    answers = [request.resps for request in requests]
    torch.rand(1)  # torch's global generator goes on
    (row,) = measurement.rows(DENSE)
    assert row["change"]["value"] == 0
    assert [request.resps for request in measurement.tasks["words"].instances] == answers, "sampled alike in each pass"


def test_the_sample_of_examples_is_not_the_first_ones(task):
    measurement = Measurement(settings(task(), eval_samples=4))
    texts = [request.args[0] for request in measurement.tasks["words"].instances]
    assert len(texts) == 4
    assert texts != [f"The {word} of the {word}" for word in WORDS[:4]]
    assert len(measurement.lossless["words", "acc"].values_N) == 4


def test_requests_that_the_model_cannot_hold_are_counted(task, tmp_path):
    file = task()
    long = [json.dumps({"text": "of the " * 100, "word": "river"}), json.dumps({"text": "of", "word": "town"})]
    (tmp_path / "rows.json").write_text("\n".join(long))
    assert Measurement(settings(file)).cut == 1


def test_pseudo_values_of_a_mean_are_its_values_and_of_a_perplexity_follow_the_delta_method():
    generator = np.random.default_rng(0)
    hits = generator.integers(0, 2, 50).tolist()
    assert score_of(mean, hits).values_N == pytest.approx(np.array(hits))
    logs = (-generator.gamma(2, 1, 400)).tolist()
    score = score_of(perplexity, logs)
    assert score.value == pytest.approx(np.exp(-np.mean(logs)))
    assert score.values_N.std() == pytest.approx(score.value * np.std(logs), rel=0.05)


def test_passages_end_with_a_word_that_stands_earlier_in_them():
    text = (
        "The king met the queen near a village of fishermen. " + "He had a ship and left the next day for the village."
    )
    assert list(passages(text)) == [text[:-1]]
    assert not list(passages(text.replace("a village", "a hamlet"))), "the word does not stand earlier"
    assert not list(passages(text.replace("queen", "<unk>"))), "too short without the sentence that is incomplete"
    assert not list(passages(text[:-1])), "cut off"
    found = last_words("docstrings")["test"]
    assert len(found) > 1000
    for row in found.select(range(0, len(found), 50)):
        assert row["word"] in row["passage"]
        assert 16 <= len(row["passage"].split()) < 64
    with pytest.raises(ValueError, match="text = 'wikitext' is unknown: choose one of docstrings, wikitext-2"):
        last_words("wikitext")


def test_rows_of_a_task_of_this_project():
    rows = rows_of("docstrings")
    assert len(rows["train"]) == 1000
    assert {"text", "label"} <= set(rows["test"].column_names)


def test_finished_rows_are_kept(task, tmp_path, capsys, monkeypatch):
    config = settings(task(), output_dir=str(tmp_path / "out"), loss_rates="0,0.3")
    measure_and_print(config)
    first, file = capsys.readouterr().out, tmp_path / "out" / "harness.json"
    record = json.loads(file.read_text())
    assert len(record["rows"]) == 4
    assert record["examples"] == {"words": 10}
    assert [line.split()[:5] for line in first.splitlines()[5:7]] == [
        ["words", metric, "direct", "reduce", "zero"] for metric in ("perplexity", "acc")
    ]
    with monkeypatch.context() as patch:
        patch.setattr(Measurement, "rows", lambda *_: pytest.fail("measured again"))
        measure_and_print(config)
    assert capsys.readouterr().out == first
    measure_and_print(config.replace(loss_rates="0.1"))
    assert len(json.loads(file.read_text())["rows"]) == 6
    with pytest.raises(ValueError, match=r"another config: give another output_dir"):
        measure_and_print(config.replace(seed=7))
    rows = (tmp_path / "rows.json").read_text()
    (tmp_path / "rows.json").write_text(rows.replace("The river", "The lake"))
    with pytest.raises(ValueError, match=r"another requests_sha256"):
        measure_and_print(config)
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"is not a record of scores"):
        measure_and_print(config)


def test_a_text_that_is_not_here(monkeypatch):
    monkeypatch.delenv("LOSSYTP_DATA", raising=False)
    fixes = {"last_word_wikitext": "put Salesforce/wikitext under LOSSYTP_DATA", "sst2_prompt": "set LOSSYTP_DATA to"}
    for name, fix in fixes.items():
        with pytest.raises(ValueError, match=rf"^tasks = '{name}' cannot be read: .*: [^:]*{fix}[^:]*$"):
            load_tasks([name], None)


def test_the_model_runs_in_bfloat16_if_asked(task):
    single, half = (Measurement(settings(task(), bf16=bf16)).lossless["words", "perplexity"] for bf16 in (False, True))
    assert half.value != single.value
    assert half.value == pytest.approx(single.value, rel=0.1)
    assert torch.get_default_dtype() == torch.float32

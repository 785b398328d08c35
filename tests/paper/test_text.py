"""The paper's text: no number in it is typed, its paragraphs are short of numbers, and it is typeset from results."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typst

from paper.study import typeset

ROOT = Path(__file__).parents[2]
TEXTS = sorted((ROOT / "paper").glob("*.typ"))

# No number is typed

COMMENT_OR_RAW = r"//[^\n]*|/\*.*?\*/|(?P<ticks>`{3,}).*?(?P=ticks)|`[^`]*`"
NO_PROSE = re.compile(
    r"\\u\{[^}]*\}|\\.|https?://[^\s\]]+|" + COMMENT_OR_RAW + r"|@[\w:.-]*\w(?:\[[^\]]*\])?|<[A-Za-z_][\w:.-]*>"
    r"|(?<=\n)[ \t]*\d+\.(?=\s)",  # an enumeration's number
    re.DOTALL,
)
NO_CODE = re.compile(COMMENT_OR_RAW, re.DOTALL)
STRING = re.compile(r'"(?:\\.|[^"\\])*"', re.DOTALL)
MATH = re.compile(r"\$(?:\\.|[^$\\])*\$", re.DOTALL)
STATEMENT = re.compile(r"(?:let|set|show|import|include)\b")
BRANCH = re.compile(r"(?:if|for|while)\b")
ELSE = re.compile(r"\s*else\b\s*(?:if\b)?")
ATOM = re.compile(r"(?:context\b\s*)?[A-Za-z_][\w-]*|" + STRING.pattern, re.DOTALL)
NUMBER = re.compile(r"[\d.]*\d")
FIELD = re.compile(r"\.[A-Za-z_][\w-]*")
CLOSING = {"[": "]", "(": ")", "{": "}"}


def prose(source: str) -> str:
    """Return the source with a space for every character outside prose, so that lines and columns stay.

    Prose is markup and content blocks at any depth of code, numbers after `#`, and strings in code that have a space.
    Code is an expression after `#` and its content. Raw text, references, labels, links and comments are not prose.
    """
    reader = _Reader(source)
    reader.markup("")
    return "".join(reader.kept)


def swallowed(source: str) -> list[int]:
    """Return the lines of semicolons after code in prose, as in `#fall(row); more`, which Typst does not print."""
    reader = _Reader(source)
    reader.markup("")
    return [source.count("\n", 0, at) + 1 for at in reader.semicolons]


class _Reader:
    def __init__(self, source: str) -> None:
        self.source, self.at = source, 0
        self.semicolons: list[int] = []
        self.kept = [character if character == "\n" else " " for character in source]

    def here(self) -> str:
        return self.source[self.at : self.at + 1]

    def skip(self, pattern: re.Pattern[str], *, keep: bool = False) -> str:
        """Skip the pattern if it matches here, and return the match."""
        match = pattern.match(self.source, self.at)
        found = match.group() if match else ""
        if keep:
            self.kept[self.at : self.at + len(found)] = found
        self.at += len(found)
        return found

    def markup(self, close: str) -> None:
        while self.here() and self.here() != close:
            if self.skip(NO_PROSE) or self.math():
                continue
            character = self.here()
            self.at += 1
            if character == "#":
                self.expression()
            elif character == "[":
                self.markup("]")
            else:
                self.kept[self.at - 1] = character
        self.at += len(close)

    def code(self, stop: str) -> None:
        """Skip to one of the characters `stop` outside all brackets."""
        while self.here() and self.here() not in stop:
            string = STRING.match(self.source, self.at)
            if string:
                self.skip(STRING, keep=" " in string.group())
            elif not (self.skip(NO_CODE) or self.math() or self.group()):
                self.at += 1

    def group(self) -> bool:
        """Skip brackets and their content, if they open here."""
        close = CLOSING.get(self.here(), "")
        self.at += len(close)
        if close == "]":
            self.markup(close)
        elif close:
            self.code(close)
            self.at += 1
        return bool(close)

    def math(self) -> bool:
        """Skip a formula, but keep its decimals; of a formula without letters, keep all numbers."""
        formula = MATH.match(self.source, self.at)
        if not formula:
            return False
        numbers = r"\d+\.\d+" if re.search("[A-Za-z]", STRING.sub("", formula.group())) else NUMBER.pattern
        for number in re.finditer(numbers, formula.group()):
            self.kept[self.at + number.start() : self.at + number.end()] = number.group()
        self.at = formula.end()
        return True

    def expression(self) -> None:
        """Parse what follows a `#` in markup."""
        if self.skip(STATEMENT):
            self.code("\n;])}")
            return
        if self.skip(BRANCH):
            self.code("[{")
            self.group()
            while self.skip(ELSE):
                self.code("[{")
                self.group()
        elif not self.skip(NUMBER, keep=True):
            if not (self.skip(ATOM) or self.math()):
                self.group()
            while self.skip(FIELD) or (self.here() in ("(", "[") and self.group()):
                pass
        if self.here() == ";":
            self.semicolons.append(self.at)


ALLOWED = (  # names, the definition of intervals, and numbers in a drawing: not results
    r"(GPT|SST)-2",
    r"SmolLM2-135M",
    r"\b(SmolLM2|WikiText-2|Qwen3|OLMo2)\b",
    r"\b(fec|hadamard|protect(_first|_layers)?|retransmit)\([^)]*\)",
    r"\bQ4_(1|K_M)\b",
    r"SHA-256",
    r"\b(bf16|fp16|fp32)\b",
    r"95 %(?= interval)",
    r"\bchunk 2\b",
    r"\b(tp|ddp|fsdp|pp) 2\b",  # arms' names
    r"\bOMP_NUM_THREADS=1\b",
    r"\blink 0 2\b",  # an arrow between them
)


def typed_numbers(source):
    """Return line and text of each number in a Typst source's prose that no pattern of ALLOWED covers."""
    text = prose(source)
    for pattern in ALLOWED:
        text = re.sub(pattern.replace(" ", r"[\s~]+"), lambda found: re.sub(r"\d", " ", found.group()), text)
    return [(text.count("\n", 0, found.start()) + 1, found.group()) for found in re.finditer(r"\d(?:[\d.,]*\d)?", text)]


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: file.name)
def test_no_number_in_the_paper_is_typed_and_no_semicolon_is_swallowed(file):
    source = file.read_text(encoding="utf-8")
    typed = [f"{file.name}, line {line}: {number}" for line, number in typed_numbers(source)]
    assert not typed, (
        "typed where a result belongs: read it from results, as #runs.cells does; what is no result, such as a "
        "name, goes into ALLOWED\n" + "\n".join(typed)
    )
    assert swallowed(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "#let x = 1\n*Results.* Accuracy falls by 4.4 points.",
        "#let x = 1\n#if x > 0 { [rose] } else if x < 9 [held] else [fell by 4.4 points]",
        "#figure(image(\"a8.svg\", width: 62%),\n caption: [Falls of [4.4] points. #h(1em)]) <f1>",
        "#let fall(x) = {\n if x > 3 { text(9pt)[by 4.4 points] }\n}",
        "#set text(9pt)\nAccuracy fell from #r.a.first().b(3)[4.4] on",
        "// 5\n#4.4 points",
        "#let told = \"3\"\n#text(\"fell by 4.4 points\")",
        "#raw(\"8\")\n$p = 4.4$",
        "`9` @holm1979 <a1>\nSST-2 falls by 4.4, GPT-2 at 95 % intervals, at https://x.org/3",
    ],
)  # fmt: skip
def test_a_typed_result_is_found_wherever_a_reader_reads_it(source):
    """Control: everything else in these sources is code, layout, a reference or a name."""
    assert typed_numbers(source) == [(2, "4.4")]


@pytest.mark.parametrize("source", ["#fall(row); more", "#if x [a] else [b];\nmore", "[a block #x.at(1).z; more]"])
def test_a_swallowed_semicolon_is_found(source):
    assert swallowed(f"#let x = 1; said; and\n{source}") == [2]


# Paragraphs are short of numbers


SKIPPED = {"figure", "code", "svg", "table", "script", "style", "a", "head"}  # captions and references are not prose
BLOCKS = {"p", "li", "h2", "h3"}
NAMES = r"\b(SST-2|GPT-2|SmolLM2|WikiText-2)\b"
INTERVAL = r" ?\([−-]?[\d.,]+(?: %)? to [−-]?[\d.,]+(?: %)?\)"  # belongs to the number before it
COUNTED = r"(?<![\w-])[\d,]*\d(?:\.\d+)?"


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


def paragraphs(html):
    """Return the paragraphs, items and headings of a page."""
    prose = Prose()
    prose.feed(html)
    texts = (re.sub(r"\s+", " ", block).strip() for block in prose.blocks)
    return [text for text in texts if text]


def numbers(paragraph):
    """Return the numbers of a paragraph. An interval counts with its value, and a name is none."""
    return re.findall(COUNTED, re.sub(INTERVAL, "", re.sub(NAMES, "", paragraph)))


@pytest.fixture(scope="module")
def paper():
    page = typst.compile(
        ROOT / "paper" / "lossytp.typ", root=ROOT, sys_inputs={"results": "/results/paper"}, format="html"
    ).decode()
    found = paragraphs(page)
    return found[: found.index("References")]  # their volumes and pages are no results


def test_a_paragraph_has_at_most_four_numbers(paper):
    assert len(paper) > 20
    crowded = [paragraph for paragraph in paper if len(numbers(paragraph)) > 4]
    assert not crowded, "split these paragraphs, or move numbers to a table:\n" + "\n".join(crowded)


def test_numbers_of_a_paragraph_leave_out_intervals_and_names_and_paragraphs_leave_out_captions():
    assert numbers("In SST-2 2.4 (1.4 to 3.3) points of 4.4 % (3.0 % to 6.6 %) are left.") == ["2.4", "4.4"]
    html = "<p>One 1. Two <code>fec(10, 8)</code> <a>Section 2</a>.</p><figure>3 4 5</figure><p>Three</p>"
    assert paragraphs(html) == ["One 1. Two X X.", "Three"]


# It is typeset from a results folder


def test_numbers_come_from_the_results_folder_and_a_broken_text_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = tmp_path / "results"
    results.mkdir()
    (tmp_path / "text.typ").write_text('#json(sys.inputs.results + "/paper.json").value')
    sizes = []
    for value in (1, "a longer text"):
        (results / "paper.json").write_text(json.dumps({"value": value}))
        typeset(tmp_path / "text.typ", results / "out.pdf", results.relative_to(tmp_path))
        sizes.append(len((results / "out.pdf").read_bytes()))
    assert sizes[0] != sizes[1]
    (tmp_path / "text.typ").write_text("#nonsense")
    with pytest.raises(ValueError, match="unknown variable: nonsense"):
        typeset(tmp_path / "text.typ", results / "other.pdf", results.relative_to(tmp_path))
    assert not list(results.glob("*other*"))
    (tmp_path / "text.typ").write_text("whole")
    for wrong in (results, tmp_path / "nowhere" / "out.pdf"):
        with pytest.raises(ValueError, match=rf"^{wrong} is a folder, or its folder does not exist: give a file in"):
            typeset(tmp_path / "text.typ", wrong, results.relative_to(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} == {"results", "text.typ"}

"""Check that every number in the paper comes from results, and none is typed."""

import re
from pathlib import Path

import pytest

from tests.paper.typst_prose import prose, swallowed

PAPER = Path(__file__).parents[2] / "paper"
ALLOWED = (  # names, the definition of intervals, and numbers in a drawing: not results
    r"(GPT|SST)-2",
    r"SmolLM2-135M",
    r"\b(SmolLM2|WikiText-2)\b",
    r"\b(fec|hadamard|protect|retransmit)\([^)]*\)",
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


@pytest.mark.parametrize("file", sorted(PAPER.glob("*.typ")), ids=lambda file: file.name)
def test_no_number_in_the_paper_is_typed(file):
    typed = [f"{file.name}, line {line}: {number}" for line, number in typed_numbers(file.read_text(encoding="utf-8"))]
    assert not typed, (
        "typed where a result belongs: read it from results, as #r.study.cells does; what is no result, such as a "
        "name, goes into ALLOWED\n" + "\n".join(typed)
    )


@pytest.mark.parametrize(
    "source",
    [
        "#let x = 1\n*Results.* Accuracy falls by 4.4 points.",
        "#let x = 1\n#if x > 0 [fell by 4.4 points]",
        "#let x = 1\n#if x > 0 { [rose] } else if x < 9 [held] else [fell by 4.4 points]",
        "#for (a, b) in pairs(9)\n [by #a and 4.4 points]",
        "#figure(\n table(columns: 2, [a], [*4.4* points]), caption: none)",
        "#figure(image(\"a8.svg\", width: 62%),\n caption: [Falls of [4.4] points. #h(1em)]) <f1>",
        "#let fall(x) = {\n if x > 3 { text(9pt)[by 4.4 points] }\n}",
        "#set text(9pt)\nAccuracy fell from #r.a.first().b(3)[4.4] on",
        "// 5\n#4.4 points",
        "#show heading: it => block(above: 2em,\n[4.4 #it])",
        "#let told = \"3\"\n#text(\"fell by 4.4 points\")",
        "#raw(\"8\")\n$4.4$ points",
        "#raw(\"8\")\n$p = 4.4$",
        "`9` @holm1979 <a1>\nSST-2 falls by 4.4, GPT-2 at 95 % intervals, at https://x.org/3",
        "/* 3\n*/ #context [at 4.4#h(2pt)]",
    ],
)  # fmt: skip
def test_a_typed_result_is_found_wherever_a_reader_reads_it(source):
    assert typed_numbers(source) == [(2, "4.4")]


@pytest.mark.parametrize(
    "source",
    [
        "#let f(x, n: 2) = if x > 3 { 4 } else [#x]\nAfter",
        "#set page(margin: (x: 22mm), columns: 2); after",
        '#align(center)[#text(17pt)[Title] \\ #v(2mm) #image("/fig2.svg", width: 80%)]',
        "Holm @holm1979 and @barlow1972[p. 3], @fig-2. See <sec2> and `x = 3`, ```py y = 4```",
        "$1 / (1 - p)$ and $x_1^2$ // 3\nat #fixed(100 * r.fall.at(0).value, 1)~%, \\u{1F6}",
        '#import "@preview/cetz:0.3.1": canvas\n  1. first\n  2. second',
        "#table(columns: (1fr, 2fr), ..r.rows.map(row => [#row.at(1) (#rate(row.p.slice(0, 12)))]))",
        "#let a = 3 // [4]\nGPT-2 on SST-2 with SHA-256, fp32, in 95~% intervals",
    ],
)
def test_code_layout_references_and_formulas_are_no_results(source):
    assert typed_numbers(source) == []


def test_prose_keeps_its_place():
    source = 'One #let a = 1\n[two #f(3, [four])[five] "six" #if a [seven] else\n{ [eight] } nine]'
    assert prose(source).split() == ["One", "two", "four", "five", '"six"', "seven", "eight", "nine"]
    assert [len(line) for line in prose(source).split("\n")] == [len(line) for line in source.split("\n")]


@pytest.mark.parametrize("file", sorted(PAPER.glob("*.typ")), ids=lambda file: file.name)
def test_no_semicolon_is_swallowed(file):
    assert swallowed(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "#fall(row); more",
        "#listed(rows.map(row => [#fall(row)])); more",
        "#if x [a]; more",
        "#if x [a] else [b];\nmore",
        "#f[z]; more",
        "#x.y; more",
        "#x.at(1).z; more",
        "[in a block #fall(row); more]",
    ],
)
def test_a_swallowed_semicolon_is_found(source):
    assert swallowed(f"#let x = 1; said; and\n{source}") == [2]

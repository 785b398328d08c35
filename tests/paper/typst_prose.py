"""Extract the prose of a Typst source, since Typst's own parser has no Python interface.

Prose is markup and content blocks at any depth of code, numbers after `#`, and strings in code that contain a space.
Code is an expression after `#` and its content. Raw text, references, labels, links and comments are not prose.
"""

import re

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
    """Return the source with a space for every character outside prose, so that lines and columns stay."""
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

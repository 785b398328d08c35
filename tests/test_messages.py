"""The form of error messages: one line, which names the value or the state and, after a colon, the fix."""

import ast
from pathlib import Path

import lossytp

ROOT = Path(lossytp.__file__).parents[1]
READERS = (  # whose messages are the middle of a longer one: "FILE cannot be read (...): give another file"
    "network/bounded_files.py", "network/checks.py", "network/traces.py", "network/routes.py",
    "lossyprobe/importing.py", "training/rows.py", "training/checkpoint.py", "training/config.py",
    "training/command_line.py", "training/shapes.py", "training/task_kinds.py", "training/corpus.py",
)  # fmt: skip


def text_of(node, given):
    """Return a text of the source with {} for each value, but for texts that have a name; None for anything else."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = []
    for part in parts:
        if isinstance(part, ast.FormattedValue):
            texts.append(given.get(getattr(part.value, "id", ""), "{}"))
        elif isinstance(part, ast.Name) and part.id in given:
            texts.append(given[part.id])
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            texts.append(part.value)
        else:
            return None
    return "".join(texts)


def messages():
    """Yield where a ValueError is raised with a text, or by `refuse_if`, and the text, with {} for each value."""
    for file in sorted(file for name in ("lossytp", "lossyprobe") for file in (ROOT / name).rglob("*.py")):
        given: dict[str, str] = {}
        nodes = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if hasattr(node, "lineno")]
        for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                given[node.targets[0].id] = text_of(node.value, given) or "{}"
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("ValueError", "refuse_if") and node.args:
                refused = "{} = {} " * (node.func.id == "refuse_if")
                text = text_of(node.args[-1], given)
                if text is not None:
                    yield f"{str(file.relative_to(ROOT)).removeprefix('lossytp/')}:{node.lineno}", refused + text


def test_every_message_is_one_line_with_a_fix():
    found = dict(messages())
    assert len(found) > 100
    assert not {where: text for where, text in found.items() if "\n" in text}
    without_fix = {where: text for where, text in found.items() if ": " not in text and "give" not in text}
    assert not {where: text for where, text in without_fix.items() if not where.startswith(READERS)}
    assert len(without_fix) < 20

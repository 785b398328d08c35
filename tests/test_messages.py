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


def messages():
    """Yield where a ValueError is raised with a text, and the text, with {} for each value."""
    for file in sorted(file for name in ("lossytp", "lossyprobe") for file in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
                continue
            if getattr(node.exc.func, "id", "") != "ValueError":
                continue
            text = node.exc.args[0]
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            if all(isinstance(part, ast.Constant | ast.FormattedValue) for part in parts):
                shown = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
                yield f"{str(file.relative_to(ROOT)).removeprefix('lossytp/')}:{node.lineno}", shown


def test_every_message_is_one_line_with_a_fix():
    found = dict(messages())
    assert len(found) > 100
    assert not {where: text for where, text in found.items() if "\n" in text}
    without_fix = {where: text for where, text in found.items() if ": " not in text and "give" not in text}
    assert not {where: text for where, text in without_fix.items() if not where.startswith(READERS)}
    assert len(without_fix) < 20

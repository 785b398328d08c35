import json

import pytest

from paper.study import typeset


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

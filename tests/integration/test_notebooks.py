"""The notebooks of the examples: they are what their scripts say, have no outputs, and run from top to bottom."""

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import ROOT

FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_code_of_its_script_and_no_outputs(path: Path) -> None:
    script = (FOLDER.parent / f"{path.stem}.py").read_text(encoding="utf-8")
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert len(code) >= 3
    for item in code:
        compile("".join(item["source"]), str(path), "exec")
        assert (item["outputs"], item["execution_count"]) == ([], None)
    texts = ["".join(item["source"]) for item in code]
    at = script.index("from __future__")
    for text in texts:
        if text in script:  # in the order of the script; the others are of the notebook
            assert script.index(text) >= at
            at = script.index(text)
    both = [ast.parse(script).body[1:-1], ast.parse("\n".join(texts)).body]
    (all_of_it, found) = [[ast.dump(node) for node in body] for body in both]
    assert [node for node in all_of_it if node not in found] == []


def test_notebooks_exist_and_their_cells_differ() -> None:
    assert len(NOTEBOOKS) == 8
    ids = [cell["id"] for path in NOTEBOOKS for cell in cells(path)]
    assert len(ids) == len(set(ids))


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own; its last cells assert what the script's exit code says."""
    reason = "the notebooks need pip install 'kvps[notebooks]'"
    nbclient = pytest.importorskip("nbclient", reason=reason)
    nbformat = pytest.importorskip("nbformat", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    here = tmp_path / "notebooks"  # what they draw is written there
    here.mkdir()
    (tmp_path / "digits.py").symlink_to(ROOT / "examples" / "digits.py")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    kernel = tmp_path / "share" / "kernels" / "kvps"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "kvps", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="kvps", resources={"metadata": {"path": str(here)}}
    ).execute()
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    assert any(out.output_type in ("stream", "display_data") for out in outputs), outputs
    has_picture = any("Image(" in cell.source for cell in notebook.cells)
    assert any("image/png" in out.get("data", {}) for out in outputs) is has_picture

"""The notebooks of the examples run from top to bottom; docs/notebooks.py compares them with their scripts."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.integration.processes import ROOT

FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


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

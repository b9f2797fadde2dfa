"""docs/quickstart.md, followed to the letter: its files, and its commands in their order, in an empty directory.

Only the installation differs from the page: the commands are those of this environment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.processes import BIN, ROOT, Processes

PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
BLOCK = re.compile(
    r"(?:^<!-- ([^\n]*) -->\n)?^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
LIMIT_S = 300.0


def blocks() -> list[tuple[str, str, str]]:
    """Return (comment, language, code) of each block."""
    return BLOCK.findall(PAGE)


def test_there_are_commands_and_one_script() -> None:
    assert [comment for comment, _, _ in blocks() if comment] == ["install", "file: train.py"]
    assert len(blocks()) >= 9
    for comment, language, code in blocks():
        if language == "python":
            compile(code, comment, "exec")


@pytest.mark.thorough
def test_the_page_is_followed(processes: Processes, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    commands = ["set -eu"]
    for comment, language, code in blocks():
        if language == "python":
            (folder / comment.removeprefix("file: ")).write_text(code, encoding="utf-8")
        elif comment != "install":
            commands.append(code)
    processes.env["PATH"] = f"{BIN}{os.pathsep}{processes.env['PATH']}"
    processes.folder = folder
    shell = processes.start("bash", "bash", "-c", "\n".join(commands))
    assert shell.wait(LIMIT_S) == 0, (shell, (folder / "job.log").read_text())
    log = (folder / "job.log").read_text()
    out = shell.out
    assert re.search(r"worker 1 of 3 starts at step [1-9]", out), shell  # the killed worker
    assert re.search(r"a server was lost, and all servers rolled back", out), shell
    assert log.count("step 400") == 1, log
    right = re.findall(r"step 400: (\d+)% of new points right", out)
    assert len(right) == 3, shell  # alone, on the cluster, restored
    assert min(map(int, right)) > 90, shell
    assert re.search(r"worker 0 of 2 starts at step [1-9]\d+", out), shell
    assert "'0.weight': [64, 2]" in out.splitlines()[-1], shell


@pytest.mark.slow
def test_the_page_installs(tmp_path: Path) -> None:
    """The first block, with a checkout at ~/kvps; it needs a package index, from which torch comes here, too."""
    install = next(code for comment, _, code in blocks() if comment == "install")
    install = install.replace("--index-url https://download.pytorch.org/whl/cpu", "")
    (tmp_path / "kvps").symlink_to(ROOT)
    folder = tmp_path / "empty"
    folder.mkdir()
    env = {**os.environ, "HOME": str(tmp_path), "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    env.pop("VIRTUAL_ENV", None)
    python = Path(sys.executable).resolve()
    env["PATH"] = f"{python.parent}{os.pathsep}{env['PATH']}"
    script = f"set -eu\n{install}\nkvps --version\n"
    subprocess.run(["bash", "-c", script], cwd=folder, env=env, check=True, timeout=600)

"""docs/quickstart.md, followed to the letter."""

import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.processes import BIN, ROOT, Processes, until

PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROMPT = "it is your turn> "
LIMIT_S = 90.0
READER_S = 60.0
"""The time that a slow reader takes for a section, while the job runs."""
SEEN = {
    "-n 3 -s 2 --max-restarts": "step 100: ",
    "'worker 1'": r"worker 1 of 3 starts at step [1-9]",
    "'server 0'": "a server was lost, and all servers rolled back",
    "--restore": r"(?s)worker 0 of 2 starts at step [1-9]\d+.*step \d+: ",
}
"""What is in a block -> what the reader then sees in the first terminal, before they go on."""


def blocks() -> list[tuple[str, str, str]]:
    """Return (comment, language, code) of each block."""
    return BLOCK.findall(PAGE)


class Terminal:
    """An interactive bash."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._master, theirs = pty.openpty()
        self._bash = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env={**env, "PS1": PROMPT, "TERM": "dumb", "HISTFILE": "/dev/null"},
            preexec_fn=lambda: os.login_tty(0),
        )
        os.close(theirs)
        self._shown = b""
        self._seen = 0
        """Characters of what was shown before the last thing that was typed."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while got := os.read(self._master, 1 << 16):
                self._shown += got
        except OSError:  # bash has ended
            pass

    @property
    def shown(self) -> str:
        """What it has shown since something was typed."""
        return self._shown.decode(errors="replace").replace("\r", "")[self._seen :]

    def expect(self, pattern: str) -> str:
        """Wait until it shows ``pattern``; return what it has shown until then."""
        try:
            until(lambda: re.search(pattern, self.shown), pattern, LIMIT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.shown}") from None
        return self.shown

    def type(self, text: str) -> None:
        """Type ``text``, when bash waits for it."""
        self.expect(rf"{PROMPT}\Z")
        self._seen += len(self.shown)
        os.write(self._master, text.encode())

    def run(self, block: str) -> str:
        """Type a block, which does not last; return what it shows. Each of its commands must end with 0."""
        lines = block.rstrip("\n").replace("\\\n", "").split("\n")
        shown = ""
        for line in lines:
            self.type(f"{line}\n")
            shown += self.expect(rf"\n{PROMPT}\Z")
            self.type("echo code $?\n")
            assert "\ncode 0\n" in self.expect(rf"\n{PROMPT}\Z"), shown
        return shown

    def last(self, block: str) -> None:
        """Type a block whose last command lasts."""
        first, _, lasting = block.rstrip("\n").replace("\\\n", "").rpartition("\n")
        if first:
            self.run(first)
        self.type(f"{lasting}\n")

    def interrupt(self) -> None:
        """Press Ctrl-C, and wait until the job has ended."""
        os.write(self._master, b"\x03")
        self.expect(rf"\n{PROMPT}\Z")

    def close(self) -> None:
        os.close(self._master)
        self._bash.kill()
        self._bash.wait()
        self._reader.join()


@pytest.fixture
def terminals(processes: Processes, tmp_path: Path) -> Iterator[dict[str, Terminal]]:
    """The first and the second terminal, in a directory with the files of the page."""
    folder = tmp_path / "empty"
    (folder / "venv" / "bin").mkdir(parents=True)
    (folder / "venv" / "bin" / "activate").write_text(f"PATH={BIN}:$PATH\n")
    for comment, language, code in blocks():
        if language == "python":
            (folder / comment.removeprefix("file: ")).write_text(code, encoding="utf-8")
    env = {**processes.env, "PATH": f"{BIN}{os.pathsep}{processes.env['PATH']}"}
    env.pop("PYTHONUNBUFFERED")
    made = {name: Terminal(folder, env) for name in ("first", "second")}
    yield made
    for item in made.values():
        item.close()


def follow(terminals: dict[str, Terminal], pause_s: float, until_block: str = "") -> str:
    """Type the blocks of the page, and pause while a job runs; return what the terminals showed."""
    shown, is_running = "", False
    first = terminals["first"]
    for comment, language, code in blocks():
        if language == "python" or comment == "install":
            continue
        where, _, how = comment.partition(": ")
        if how == "Ctrl-C":
            shown += first.shown
            first.interrupt()
            is_running = False
        terminal = terminals[where.removesuffix(" terminal")]
        if how == "lasts":
            terminal.last(code)
            is_running = True
        else:
            shown += terminal.run(code)
        for pattern in [seen for text, seen in SEEN.items() if text in code]:
            first.expect(pattern)
        if is_running:
            time.sleep(pause_s)  # the reader reads; nothing is waited for
        if until_block and until_block in code:
            break
    return shown


def test_quickstart_has_commands_and_scripts() -> None:
    comments = [comment for comment, _, _ in blocks()]
    assert comments[:2] == ["install", "file: train.py"]
    assert "" not in comments, "a block that is not in a terminal"
    assert len(comments) >= 10
    for comment, language, code in blocks():
        if language == "python":
            compile(code, comment, "exec")
        else:
            assert not re.search(r"&$", code, re.M), "a job in the background, which nobody ends"
            assert not re.search(r"^until ", code, re.M), "a loop that may last for ever"


@pytest.mark.thorough
def test_the_page_is_followed(terminals: dict[str, Terminal]) -> None:
    shown = follow(terminals, 0.0)
    right = re.findall(r"step 400: (\d+)% of new points right", shown)
    assert len(right) >= 2, shown  # alone, and on the cluster
    assert min(map(int, right)) > 90, shown
    assert "job " in shown
    assert "'0.weight': [64, 2]" in shown


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_a_reader_who_is_slow_and_begins_again_after_ctrl_c(terminals: dict[str, Terminal]) -> None:
    """The second time, the second terminal has the variables of the first job."""
    follow(terminals, 0.0, until_block="kvps status")
    terminals["first"].interrupt()
    shown = follow(terminals, READER_S)
    assert "'0.weight': [64, 2]" in shown


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

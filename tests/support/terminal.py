"""A command in a terminal of its own: what it draws, and keys that are typed into it."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time


def _own() -> None:
    """Take the terminal, in the new process; Ctrl-C ends it also if our own shell had us ignore it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *command: object, rows: int = 24, columns: int = 160, **env: str) -> None:
        sizes = ("COLUMNS", "LINES")  # rich believes these, and not the terminal
        plain = {name: value for name, value in os.environ.items() if name not in sizes}
        self._fd, inner = pty.openpty()
        self.resize(rows, columns)
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            preexec_fn=_own,
            env={**plain, "TERM": "xterm-256color", **env},
        )
        os.close(inner)
        self.text = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def expect(self, pattern: str, limit_s: float = 60.0) -> None:
        """Read until the screen has shown ``pattern``; forget what was shown before its end."""
        deadline = time.monotonic() + limit_s
        while (found := re.search(pattern, self.text)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text[-2000:]!r}"
            self._read()
        self.text = self.text[found.end() :]

    def wait(self) -> int:
        while self._read():
            pass
        return self.process.wait(60)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._fd], [], [], 0.1)
        if not ready:
            return True
        try:
            got = os.read(self._fd, 1 << 16)
        except OSError:
            return False
        self.text += got.decode(errors="replace")
        return bool(got)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)

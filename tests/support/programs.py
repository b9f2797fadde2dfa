"""Python programs by their command lines, run in an interpreter that was forked and not started.

:func:`program_of` recognises a script, ``-m`` or ``-c``; :func:`take_on` gives a forked process the arguments and the
environment of a new one, also where ``/proc`` shows them.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import os
import runpy
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which

BIN = Path(sys.executable).parent
AT_IMPORT = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "MKL_", "OPENBLAS_", "TORCH_")
"""Prefixes of variables that act when an interpreter, or torch, starts."""
HARMLESS = (*("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"), *("TORCHINDUCTOR_CACHE_DIR", "MKL_NUM_THREADS"))
"""Those of them that act later, or that :func:`take_on` sees to."""
COMMANDS = ("kvps", "kvps-launch", "kvps-scheduler", "kvps-server", "kvps-worker")
STARTING = ("kvps", "launch", "worker", "main", "bench", "kvps.launchers.agent")
"""The programs that start others, without ``kvps.cli.`` or ``kvps-`` before their names."""
ROOM = "KVPS_TEST_ROOM"
ROOM_BYTES = 1 << 15


@dataclass(frozen=True)
class Program:
    """The program that a Python is told to run."""

    kind: str
    """``script``, ``module`` or ``code``."""
    target: str
    """The file, the module's name or the code."""
    arguments: tuple[str, ...]
    is_safe: bool
    """Whether -P keeps the folder of the program out of the path."""
    folders: tuple[str, ...]
    """Where it looks for modules first: what PYTHONPATH names beyond that of the process that is forked."""
    is_strict: bool = False
    """Whether -W error makes warnings errors, of all that is not imported yet."""

    @property
    def starts_others(self) -> bool:
        """Whether it is a command of kvps, or an agent of its launcher, that starts other processes."""
        name = Path(self.target).name.removeprefix("kvps.cli.").removeprefix("kvps-")
        return self.kind != "code" and name in STARTING

    def run(self) -> None:
        """Run it as ``__main__``, in this process."""
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main
        if self.is_strict:
            warnings.simplefilter("error")
        sys.path[:0] = self.folders
        if any(Path(folder, "sitecustomize.py").exists() for folder in self.folders):
            sys.modules.pop("sitecustomize", None)
            importlib.import_module("sitecustomize")
        if self.kind == "module":
            sys.argv = ["-m", *self.arguments]
            if not self.is_safe:
                sys.path.insert(0, os.getcwd())
            sys.modules.pop(self.target, None)  # it is run anew, not imported
            runpy._run_module_as_main(self.target)  # type: ignore[attr-defined]  # what -m does
        elif self.kind == "code":
            sys.argv = ["-c", *self.arguments]
            if not self.is_safe:
                sys.path.insert(0, "")
            exec(compile(self.target, "<string>", "exec"), main.__dict__)
        else:
            sys.argv = [self.target, *self.arguments]
            if not self.is_safe:
                sys.path.insert(0, str(Path(self.target).resolve().parent))
            main.__dict__["__file__"] = self.target
            code = compile(Path(self.target).read_bytes(), self.target, "exec")
            exec(code, main.__dict__)


def program_of(
    argv: Sequence[str], env: Mapping[str, str], at_import: Mapping[str, str], folder: str
) -> Program | None:
    """Return the program that ``argv`` runs, or None where a fork would not run it as a new process does.

    ``at_import`` is what :func:`variables_at_import` says of the process that is forked.
    """
    if variables_at_import({**env, "PYTHONPATH": ""}) != {**at_import, "PYTHONPATH": ""}:
        return None
    path, known = (item.get("PYTHONPATH", "").split(os.pathsep) for item in (env, at_import))
    if path[-len(known) :] != known:
        return None
    folders = tuple(path[: -len(known)])
    commands = [str(BIN / name) for name in COMMANDS]
    python = which(argv[0], path=env.get("PATH", ""))
    if python in commands:
        return Program("script", python, tuple(argv[1:]), False, folders)
    if python is None or python not in (sys.executable, str(BIN / "python"), str(BIN / "python3")):
        return None
    words = list(argv[1:])
    is_strict = words[:2] == ["-W", "error"]
    if is_strict:
        del words[:2]
    is_safe = words[:1] == ["-P"]
    if is_safe:
        del words[0]
    match words:
        case ["-m", module, *rest] if module.startswith(("kvps.", "tests.")):
            return Program("module", module, tuple(rest), is_safe, folders, is_strict)
        case ["-c", code, *rest]:
            return Program("code", code, tuple(rest), is_safe, folders, is_strict)
        case [script, *rest] if script in commands or (
            script.endswith(".py") and Path(folder, script).exists()
        ):
            return Program("script", script, tuple(rest), is_safe, folders, is_strict)
    return None


def variables_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a fork cannot be given any more."""
    return {name: value for name, value in env.items() if name.startswith(AT_IMPORT) and name not in HARMLESS}


def take_on(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Give this process, which was forked, the command line, the environment and the output of a new one."""
    import torch

    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # the folder that TMPDIR named before
    sys.orig_argv = list(argv)
    show(argv, [f"{name}={value}" for name, value in env.items()])
    is_unbuffered = bool(env.get("PYTHONUNBUFFERED"))
    sys.stdout = sys.__stdout__ = _stream(1, is_unbuffered, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, is_unbuffered, "backslashreplace")  # type: ignore[misc]
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))


def _stream(number: int, is_unbuffered: bool, errors: str) -> io.TextIOWrapper:
    raw = io.FileIO(number, "wb", closefd=False)
    buffer = raw if is_unbuffered else io.BufferedWriter(raw)
    lines = number == 2 or os.isatty(number)
    return io.TextIOWrapper(
        buffer,  # type: ignore[arg-type]  # Python itself does so for -u
        "utf-8",
        errors,
        line_buffering=lines,
        write_through=is_unbuffered,
    )


def show(argv: Sequence[str], env: Sequence[str]) -> None:
    """Let ``/proc/PID/cmdline`` and ``/proc/PID/environ`` show these.

    Both are memory of the process. The first of these processes was started with room in it.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    starts_and_ends = [int(field) for field in fields[45:49]]  # fields 48 to 51 of proc(5)
    for words, start, end in ((argv, *starts_and_ends[:2]), (env, *starts_and_ends[2:])):
        content = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, content, len(content))

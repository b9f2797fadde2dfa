"""The wheel of kvps: built, checked, and installed in a fresh environment of each Python.

    python deploy/release.py                      # make wheel: build dist/*, and check them
    python deploy/release.py --install            # make release: and install it in each Python on PATH,
                                                  # and write its bill of materials (CycloneDX) into build/
    python deploy/release.py --install --python /opt/python3.12/bin/python --no-torch

The wheel is the same for every Python and processor. ``--no-torch`` leaves torch out, which is
large, and runs only the commands that do without it. It uploads nothing.
"""

from __future__ import annotations

import argparse
import configparser
import email
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST, BUILD = ROOT / "dist", ROOT / "build" / "release"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCH_FREE = (
    ("kvps", "--version"),
    *((f"kvps-{name}", "--help") for name in ("scheduler", "worker", "launch")),
    ("kvps", "status", "--help"),
)
"""Commands that need no torch."""
TRAINING = """
import torch, kvps
with kvps.LocalCluster(workers=2, servers=2) as cluster:
    def work(rank):
        kv = kvps.create("dist_sync")
        kv.init("w", torch.zeros(1000))
        return kv.pushpull("w", torch.full((1000,), rank + 1.0)).sum().item()
    assert cluster.run(work) == [3000.0, 3000.0]
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check and install; return the exit code."""
    parser = argparse.ArgumentParser(description="Build the wheel, check it, and install it.")
    parser.add_argument("--install", action="store_true", help="in a fresh environment of each Python")
    parser.add_argument("--python", nargs="*", help=f"these; without it {', '.join(PYTHONS)} on PATH")
    parser.add_argument("--no-torch", action="store_true", help="install all dependencies but torch")
    flags = parser.parse_args(arguments)
    wheel = built()
    faults = list(faults_of(wheel, tracked()))
    for fault in faults:
        print(f"{wheel.name}: {fault}", file=sys.stderr)
    if faults:
        return 1
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size:,} bytes, checked")
    for python in (flags.python or pythons()) if flags.install else ():
        print(f"{python}: {installed(wheel, python, not flags.no_torch)}", flush=True)
    if flags.install:
        print(f"{bill_of_materials().relative_to(ROOT)}: what the last of these environments has")
    shutil.rmtree(BUILD)  # with torch each environment has a gigabyte
    return 0


def built() -> Path:
    """Build the source archive, and the wheel from it; return the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    tools = environment(Path(sys.executable), BUILD / "tools")
    run(tools / "pip", "install", *QUIET, "build", "twine")
    run(tools / "python", "-m", "build", "--outdir", DIST, ROOT, quiet=True)
    run(tools / "twine", "check", "--strict", *DIST.iterdir(), quiet=True)
    (wheel,) = DIST.glob("*.whl")
    return wheel


def tracked() -> set[str]:
    """Return the files of the package that git knows."""
    argv = ["git", "ls-files", "-z", "kvps"]
    listed = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return set(listed.split("\0")) - {""}


def faults_of(wheel: Path, expected: set[str]) -> Iterator[str]:
    """Yield what is wrong with a wheel.

    Args:
        wheel: the file.
        expected: the files that it has to have, besides its metadata, and no others.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        about = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        entries = configparser.ConfigParser(delimiters=("=",))
        entries.read_string(archive.read(f"{info}/entry_points.txt").decode())
    if not wheel.name.endswith("-py3-none-any.whl"):
        yield "is not for every Python and processor"
    package = {name for name in names if not name.startswith(f"{info}/")}
    for missing in sorted(expected - package):
        yield f"{missing} is missing"
    for more in sorted(package - expected):
        yield f"{more} is not in git"
    if about["Version"] != version():
        yield f"has version {about['Version']}, and kvps/__init__.py {version()}"
    if about["Requires-Python"] != PROJECT["requires-python"]:
        yield f"requires Python {about['Requires-Python']}"
    for file in PROJECT["license-files"]:
        if f"{info}/licenses/{file}" not in names:
            yield f"the license {file} is missing"
    for group in entries.sections():
        for name, target in entries.items(group):
            module = target.partition(":")[0].replace(".", "/")
            if not {f"{module}.py", f"{module}/__init__.py"} & package:
                yield f"{name} runs {target}, which is not there"


def version() -> str:
    """Return the version that the source has."""
    for line in (ROOT / "kvps" / "__init__.py").read_text().splitlines():
        if line.startswith("__version__ = "):
            return line.split('"')[1]
    raise SystemExit("kvps/__init__.py has no __version__")


def pythons() -> list[str]:
    """Return the interpreters on PATH that kvps is for, and that start."""
    found = [shutil.which(f"python{one}") for one in PYTHONS]
    works = [
        one
        for one in found
        if one and subprocess.run([one, "-c", ""], capture_output=True, check=False).returncode == 0
    ]
    if not works:
        raise SystemExit(f"no python{', python'.join(PYTHONS)} is on PATH; name some with --python")
    return works


def installed(wheel: Path, python: str, with_torch: bool) -> str:
    """Install a wheel in a fresh environment and use it; return what was done, in words."""
    asked = [python, "-c", "import platform; print(platform.python_version())"]
    number = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    tools = environment(Path(python), BUILD / number)
    constraints = ("-c", ROOT / "constraints.txt")
    if with_torch:
        run(tools / "pip", "install", *QUIET, *constraints, wheel)
    else:
        others = [one for one in PROJECT["dependencies"] if not one.startswith("torch")]
        run(tools / "pip", "install", *QUIET, *constraints, *others)
        run(tools / "pip", "install", *QUIET, "--no-deps", wheel)
    for command, *flags in TORCH_FREE:
        run(tools / command, *flags, quiet=True)
    if not with_torch:
        return f"Python {number}: installed without torch, and its commands start"
    run(tools / "pip", "check", quiet=True)
    run(tools / "python", "-I", "-c", TRAINING, quiet=True)
    script = BUILD / "alone.py"
    script.write_text('import kvps\nwith kvps.create("dist_sync") as kv:\n    kv.barrier()\n')
    run(tools / "kvps-launch", "-n", "2", "-s", "1", "--", tools / "python", script, quiet=True)
    return f"Python {number}: installed, and trained in threads and in processes"


def bill_of_materials() -> Path:
    """Write what the newest environment has, as a CycloneDX file; return the file."""
    environments = [folder for folder in BUILD.iterdir() if (folder / "bin" / "kvps").exists()]
    newest = max(environments, key=lambda folder: folder.stat().st_ctime)
    file = BUILD.parent / f"kvps-{version()}.cdx.json"
    tools = BUILD / "tools" / "bin"
    run(tools / "pip", "install", *QUIET, "cyclonedx-bom")
    run(
        tools / "cyclonedx-py",
        "environment",
        newest / "bin" / "python",
        "--of",
        "JSON",
        "-o",
        file,
        quiet=True,
    )
    return file


QUIET = ("--quiet", "--disable-pip-version-check")


def environment(python: Path, folder: Path) -> Path:
    """Make a fresh virtual environment; return the folder of its commands."""
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    return folder / "bin"


def run(*argv: object, quiet: bool = False) -> None:
    """Run a command outside the source tree; end with what it printed if it fails.

    Raises:
        SystemExit: if it fails.
    """
    words = [str(one) for one in argv]
    BUILD.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(words, cwd=BUILD, capture_output=quiet, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout or ''}{done.stderr or ''}"
        )


if __name__ == "__main__":
    sys.exit(main())

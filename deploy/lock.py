"""The lock files of the image: each package with its version and the SHA-256 of its file.

    python deploy/lock.py       # make lock

asks pip which files it would install for this Python and this processor, by the versions of
constraints.txt, and writes requirements.lock (what kvps, its metrics and its examples need) and
build.lock (what builds the wheel of kvps). The image takes no other file than these. An image for
another Python or processor needs locks that were written there.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
LOCKS = {
    "requirements.lock": [*PROJECT["project"]["dependencies"], "scikit-learn", "prometheus-client"],
    "build.lock": PROJECT["build-system"]["requires"],
}


def files_of(requirements: list[str]) -> list[tuple[str, str, str]]:
    """Return name, version and SHA-256 of each file that pip would install."""
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    argv += ["--dry-run", "--ignore-installed", "--only-binary", ":all:", "--report", "-"]
    argv += ["-c", str(HERE.parent / "constraints.txt"), *requirements]
    told = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    return sorted(
        (
            one["metadata"]["name"].lower(),
            one["metadata"]["version"],
            one["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for one in told["install"]
    )


def main() -> None:
    """Write both."""
    python = ".".join(map(str, sys.version_info[:2]))
    for name, requirements in LOCKS.items():
        lines = [
            f"# Written by deploy/lock.py for Python {python} on {platform.system()} {platform.machine()}."
        ]
        lines += [
            f"{package}=={version} --hash=sha256:{sha256}"
            for package, version, sha256 in files_of(requirements)
        ]
        (HERE / name).write_text("\n".join(lines) + "\n")
        sys.stdout.write(f"{name}: {len(lines) - 1} packages\n")


if __name__ == "__main__":
    main()

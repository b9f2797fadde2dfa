"""``python -m kvps``: where to begin; with arguments, the ``kvps`` command.

kvps {version}: a parameter server for PyTorch

Start a cluster on this machine, and run a script as each of its workers:

  kvps-launch -n 4 -s 2 -- python train.py

Two lines make a PyTorch script one for a cluster; its loop stays as it is:

  import kvps.torch
  optimizer = kvps.torch.DistributedOptimizer(optimizer, model)

Other ways: kvps.Trainer (gluon's), torch.distributed.init_process_group("kvps"), kvps.create("dist_sync").

Commands (each has --help):

  kvps-launch       a whole cluster: on this machine, by ssh, in Slurm; manifests for Kubernetes
  kvps-scheduler, kvps-server, kvps-worker
                    a single process each, on any machine
{commands}
Examples: {examples}
Documentation: {docs}
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvps import __version__
from kvps.cli import main as kvps_command


def main(argv: Sequence[str] | None = None) -> int:
    """Print where to begin, or run the command of the arguments; return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments:
        return kvps_command.main(arguments)
    print(start(Path(__file__).resolve().parents[1]), end="")
    return 0


def start(root: Path) -> str:
    """Return the text.

    Args:
        root: the folder that has the package; a checkout also has docs and examples there.
    """
    commands = "".join(f"  kvps {name:<12} {what}\n" for name, what in kvps_command.COMMANDS.items())
    # In a checkout, examples and pages are files; an installed package names the folders of the source.
    return (
        (__doc__ or "\n\n")
        .split("\n\n", 1)[1]
        .format(
            version=__version__,
            commands=commands,
            examples=_place(root, "examples/README.md"),
            docs=f"{_place(root, 'docs/quickstart.md')}; 'make docs' in the source builds the site",
        )
    )


def _place(root: Path, name: str) -> str:
    path = root / name
    return str(path) if path.exists() else f"{name} in the source"


if __name__ == "__main__":
    sys.exit(main())

"""``kvps checkpoint``: lists and verifies checkpoints, and exports a model.

Reads the checkpoints that servers wrote (kvps-server --checkpoint-dir DIR). No cluster is needed, and a
running cluster is not disturbed: complete checkpoints are only read.

actions:
{actions}
examples:
  kvps checkpoint list /ckpt
  kvps checkpoint verify /ckpt                     all checkpoints; exit code 1 if any is damaged
  kvps checkpoint export /ckpt model.safetensors   the newest complete checkpoint
  kvps checkpoint export --help

{folders}

{environment}"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvps import config
from kvps.cli import flags
from kvps.errors import ConfigError

NAME = "kvps checkpoint"
FOLDERS = """\
DIR is the directory that the servers share. If each server has its own directory, give all of them:
kvps checkpoint {action} a/ckpt b/ckpt{rest}"""
ENVIRONMENT = f"""\
{flags.EXIT_CODES}
environment, where the flag or DIR is not given:
  KVPS_CHECKPOINT_DIR, KVPS_LOG_LEVEL, KVPS_LOG_FORMAT
"""


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    if not argv or argv[0] not in ACTIONS:
        _refuse(argv)
    name = argv[0]
    parsed = _parser(name).parse_args(argv[1:])
    flags.start_log(NAME, parsed)
    if name == "export" and not parsed.folders and config.checkpoint_dir() is None:
        raise ConfigError(
            f"export needs DIR and FILE, and was given {parsed.file} only: name the directory of "
            "checkpoints, and then the file to write"
        )
    folders = _folders(parsed.folders)
    number = None if parsed.cut is None else config.as_whole("--cut", parsed.cut)
    return ACTIONS[name](folders, number, parsed)


# The docstring of an action is its help. An action loads rich and torch, which --help does not wait for.


def _list(folders: list[str], number: int | None, parsed: argparse.Namespace) -> int:
    """List the checkpoints, and show which are complete.

    examples:
      kvps checkpoint list /ckpt
      KVPS_CHECKPOINT_DIR=/ckpt kvps checkpoint list

    An incomplete checkpoint is being written, was abandoned, or has lost a file; see the last column. Servers
    keep the two newest complete checkpoints, and all complete checkpoints with a tag.
    """
    from kvps.checkpoint.reports import list_cuts

    return list_cuts(folders, sys.stdout)


def _verify(folders: list[str], number: int | None, parsed: argparse.Namespace) -> int:
    """Read checkpoints completely and compare every file with its SHA-256.

    examples:
      kvps checkpoint verify /ckpt             all checkpoints
      kvps checkpoint verify /ckpt --cut 12    checkpoint number 12
      kvps checkpoint verify /ckpt --tag best

    The exit code is 0 if all are good, and 1 if any is damaged or if there are none. A checkpoint that is still
    being written is reported, but does not count as damaged unless --cut names it.
    """
    from kvps.checkpoint.reports import verify

    return verify(folders, number, parsed.tag, sys.stdout)


def _export(folders: list[str], number: int | None, parsed: argparse.Namespace) -> int:
    """Write the weights of one store to a safetensors file, for model.load_state_dict.

    examples:
      kvps checkpoint export /ckpt model.safetensors
      kvps checkpoint export /ckpt best.safetensors --tag best --store default
      python -c 'import torch, safetensors.torch as s; model.load_state_dict(s.load_file("best.safetensors"))'

    Tensors have the names and shapes of the keys. If the model has entries that the store does not have (such as
    the running means of BatchNorm, if only parameters were pushed), use load_state_dict(strict=False).
    The file is written under another name and renamed: an existing file is replaced completely, or kept.
    """
    from kvps.checkpoint.reports import export

    return export(folders, parsed.file, number, parsed.tag, parsed.store, sys.stdout)


ACTIONS = {"list": _list, "verify": _verify, "export": _export}


def _page(name: str) -> tuple[str, str]:
    """Return the first line of the help of an action, and the rest."""
    title, _, rest = (inspect.getdoc(ACTIONS[name]) or "").partition("\n\n")
    return title, rest


def _parser(name: str) -> flags.Parser:
    rest = " FILE" if name == "export" else ""
    title, more = _page(name)
    folders = FOLDERS.format(action=name, rest=rest)
    page = f"{name}\n\n{title}\n\n{folders}\n\n{more}\n\n{ENVIRONMENT}"
    parser = flags.Parser(f"{NAME} {name}", page)
    parser.usage = f"%(prog)s [DIR ...]{rest} [flags]"
    add = parser.add_argument
    add("folders", metavar="DIR", nargs="*", help="the directory of checkpoints; KVPS_CHECKPOINT_DIR")
    if name == "export":
        add("file", metavar="FILE", help="the file to write")
        add("--store", metavar="NAME", help="the store, if there are several")
    parser.set_defaults(cut=None, tag=None)
    if name != "list":
        add("--cut", metavar="N", help="the checkpoint with this number")
        add("--tag", metavar="T", help="the newest checkpoint with this tag; verify: all with this tag")
    return parser


def _folders(given: Sequence[str]) -> list[str]:
    """Return the directories that are meant.

    Raises:
        ConfigError: if there is none, or one of them is no directory.
    """
    default = config.checkpoint_dir()
    folders = list(given) or ([default] if default else [])
    if not folders:
        raise ConfigError("no directory: give DIR, or set KVPS_CHECKPOINT_DIR")
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f"{folder} is not an existing directory")
    return folders


def _refuse(argv: Sequence[str]) -> NoReturn:
    """Print the help, or the error of a line that does not begin with an action."""
    titles = {name: _page(name)[0].removesuffix(".") for name in ACTIONS}
    actions = "".join([f"  {name:<7} {title[:1].lower()}{title[1:]}\n" for name, title in titles.items()])
    folders = FOLDERS.format(action="list", rest="")
    parser = flags.Parser(NAME, __doc__, actions=actions, folders=folders, environment=ENVIRONMENT)
    parser.usage = "%(prog)s ACTION [DIR ...] [flags]"
    parser.add_argument("action", metavar="ACTION", choices=ACTIONS, help="the action")
    parsed, _ = parser.parse_known_args(argv)
    parser.error(f"{argv[0]} comes before the action: write {NAME} {parsed.action} {argv[0]} ...")


if __name__ == "__main__":
    sys.exit(main())

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

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvps import config
from kvps.cli import flags
from kvps.errors import ConfigError

NAME = "kvps checkpoint"
ACTIONS = {
    "list": "list the checkpoints, and show which are complete",
    "verify": "read checkpoints completely and compare every file with its SHA-256",
    "export": "write the weights of one store to a safetensors file, for model.load_state_dict",
}
ENVIRONMENT = f"""\
{flags.EXIT_CODES}
environment, where the flag or DIR is not given:
  KVPS_CHECKPOINT_DIR, KVPS_LOG_LEVEL, KVPS_LOG_FORMAT
"""
FOLDERS = """\
DIR is the directory that the servers share. If each server has its own directory, give all of them:
kvps checkpoint {action} a/ckpt b/ckpt{rest}"""
MORE_OF = {
    "list": """\
examples:
  kvps checkpoint list /ckpt
  KVPS_CHECKPOINT_DIR=/ckpt kvps checkpoint list

An incomplete checkpoint is being written, was abandoned, or has lost a file; see the last column. Servers
keep the two newest complete checkpoints, and all complete checkpoints with a tag.
""",
    "verify": """\
examples:
  kvps checkpoint verify /ckpt             all checkpoints
  kvps checkpoint verify /ckpt --cut 12    checkpoint number 12
  kvps checkpoint verify /ckpt --tag best

The exit code is 0 if all are good, and 1 if any is damaged or if there are none. A checkpoint that is still
being written is reported, but does not count as damaged unless --cut names it.
""",
    "export": """\
examples:
  kvps checkpoint export /ckpt model.safetensors
  kvps checkpoint export /ckpt best.safetensors --tag best --store default
  python -c 'import torch, safetensors.torch as s; model.load_state_dict(s.load_file("best.safetensors"))'

Tensors have the names and shapes of the keys. If the model has entries that the store does not have (such as
the running means of BatchNorm, if only parameters were pushed), use load_state_dict(strict=False).
The file is written under another name and renamed: an existing file is replaced completely, or kept.
""",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return flags.run(NAME, argv, _main)


def _main(argv: Sequence[str]) -> int:
    if not argv or argv[0] not in ACTIONS:
        _refuse(argv)
    action = argv[0]
    parsed = _parser(action).parse_args(argv[1:])
    flags.start_log(NAME, parsed)
    if action == "export" and not parsed.folders and config.checkpoint_dir() is None:
        raise ConfigError(
            f"export needs DIR and FILE, and was given {parsed.file} only: name the directory of "
            "checkpoints, and then the file to write"
        )
    folders = _folders(parsed.folders)
    number = None if parsed.cut is None else config.as_whole("--cut", parsed.cut)
    # This loads rich and torch, which --help does not wait for.
    from kvps.checkpoint import reports

    if action == "list":
        return reports.list_cuts(folders, sys.stdout)
    if action == "verify":
        return reports.verify(folders, number, parsed.tag, sys.stdout)
    return reports.export(folders, parsed.file, number, parsed.tag, parsed.store, sys.stdout)


def _parser(action: str) -> flags.Parser:
    rest = " FILE" if action == "export" else ""
    folders = FOLDERS.format(action=action, rest=rest)
    what = f"{ACTIONS[action][0].upper()}{ACTIONS[action][1:]}."
    page = f"{action}\n\n{what}\n\n{folders}\n\n{MORE_OF[action]}\n{ENVIRONMENT}"
    parser = flags.Parser(f"{NAME} {action}", page)
    parser.usage = f"%(prog)s [DIR ...]{rest} [flags]"
    add = parser.add_argument
    add("folders", metavar="DIR", nargs="*", help="the directory of checkpoints; KVPS_CHECKPOINT_DIR")
    if action == "export":
        add("file", metavar="FILE", help="the file to write")
        add("--store", metavar="NAME", help="the store, if there are several")
    parser.set_defaults(cut=None, tag=None)
    if action != "list":
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
    actions = "".join([f"  {name:<7} {what}\n" for name, what in ACTIONS.items()])
    folders = FOLDERS.format(action="list", rest="")
    parser = flags.Parser(NAME, __doc__, actions=actions, folders=folders, environment=ENVIRONMENT)
    parser.usage = "%(prog)s ACTION [DIR ...] [flags]"
    parser.add_argument("action", metavar="ACTION", choices=ACTIONS, help="the action")
    parsed, _ = parser.parse_known_args(argv)
    parser.error(f"{argv[0]} comes before the action: write {NAME} {parsed.action} {argv[0]} ...")


if __name__ == "__main__":
    sys.exit(main())

"""The ladder of time limits: those that a training script gives to kvps, torch, Lightning, Accelerate and
Ray, and which of them must be above which.

A limit that is too short ends a job that another one would have kept: the process group gives up while kvps
waits for the replacement of a worker, or a call ends before that replacement may come. The script is read,
and not run: numbers, ``timedelta(...)``, and names to which these are assigned.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from kvps.config import silence_max_s
from kvps.observe.findings import Finding, Level

STORE_S, GRACE_S, MERGE_S = 300.0, 240.0, 3600.0
"""The usual timeout and worker_grace of stores, and the timeout of local steps."""
GROUP_S, NCCL_S = 1800.0, 600.0
"""The limit of a process group where the script gives none (torch.distributed)."""
STORES = ("create", "Trainer", "DistributedOptimizer", "KvpsStrategy")
LOCAL = ("DiLoCo", "LocalSGD")
GROUPS = {
    "init_process_group": ("torch", "timeout"),
    "new_group": ("torch", "timeout"),
    "DDPStrategy": ("Lightning", "timeout"),
    "FSDPStrategy": ("Lightning", "timeout"),
    "KvpsStrategy": ("Lightning", "timeout"),
    "InitProcessGroupKwargs": ("Accelerate", "timeout"),
    "TorchConfig": ("Ray", "timeout_s"),
    "KvpsConfig": ("Ray", "timeout_s"),
}
"""A call -> the library whose process group it describes, and its argument of seconds."""
UNITS = {"weeks": 604800, "days": 86400, "hours": 3600, "minutes": 60, "seconds": 1, "milliseconds": 1e-3}
POSITIONS = ("days", "seconds", "microseconds", "milliseconds", "minutes", "hours", "weeks")
"""The positional arguments of timedelta."""


class Limit(NamedTuple):
    """A time limit of the job."""

    what: str
    """Its owner and its name, as in the script."""
    seconds: float
    line: int
    """The line of the script; 0 for a default or the environment."""

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line else ""
        return f"{self.what} {self.seconds:g} s{where}"


def findings_of(script: str, env: Mapping[str, str], step_s: float | None = None) -> list[Finding]:
    """Return the steps of the ladder that a script breaks, and those that hold.

    Args:
        script: its text.
        env: the environment of the job; what the script sets there counts more.
        step_s: seconds of a local step, if known.

    Raises:
        SyntaxError: if it is no Python.
        ConfigError: if a limit in the environment is no number.

    Example:
        >>> findings_of("kvps.create('dist_sync', timeout=60)", {})[1].text
        'worker_grace of create() 240 s must be below timeout of create() 60 s (line 1)'
    """
    tree = ast.parse(script)
    reader = _Reader(tree)
    silence = Limit(
        "the silence that counts as a loss", silence_max_s(env={**env, **reader.environment()}), 0
    )
    found: list[Finding] = []
    stores: list[Limit] = []
    for call, name in reader.calls((*STORES, *LOCAL)):
        timeout, grace = reader.store_limits(call, name)
        stores.append(timeout)
        found += _below(
            silence, grace, "a worker whose host vanished would not be noticed before its grace is over"
        )
        found += _below(
            grace,
            timeout,
            "calls end with Timeout before a replacement has had its time: WorkerLost never comes",
        )
        if name in LOCAL and step_s is not None:
            steps = reader.number(reader.given(call, "sync_every")) or 100.0
            turn = Limit(f"{steps:g} local steps of {step_s:g} s:", steps * step_s, call.lineno)
            found += _below(turn, timeout, "a merge waits that long for the slowest worker: raise timeout=")
    for call, name in reader.calls(GROUPS):
        library, argument = GROUPS[name]
        if name == "KvpsStrategy" and reader.given(call, argument) is None:
            continue
        group = reader.group_limit(call, name, library, argument)
        found += _below(silence, group, "a lost worker is noticed only after the group has given up")
        for timeout in stores:
            found += _below(
                timeout,
                group,
                f"while a rank waits in kvps, others wait in a collective of {library}, which gives up first",
            )
    if not found:
        found.append(Finding(Level.SKIP, "limits", "the script makes no store and no process group", ""))
    return found


def _below(low: Limit, high: Limit, why: str) -> Iterator[Finding]:
    if low.seconds < high.seconds:
        yield Finding(Level.OK, "limits", f"{low} < {high}", "")
    else:
        yield Finding(Level.FAIL, "limits", f"{low} must be below {high}", why)


class _Reader:
    """A script's calls, and the values of their arguments.

    Args:
        tree: the script.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self._names: dict[str, ast.expr] = {}
        self._set: dict[str, str] = {}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self._names[target.id] = node.value
                elif ast.unparse(target).partition("[")[0].endswith("environ"):
                    with suppress(AttributeError):  # only constants have values
                        self._set[target.slice.value] = str(node.value.value)  # type: ignore[attr-defined]

    def environment(self) -> dict[str, str]:
        """Return what the script sets in its environment."""
        return self._set

    def calls(self, names: object) -> list[tuple[ast.Call, str]]:
        """Return the calls of these names, by any path to them."""
        found = [(call, ast.unparse(call.func).rpartition(".")[2]) for call in self._calls]
        return [(call, name) for call, name in found if name in names]  # type: ignore[operator]  # a collection

    def given(self, call: ast.Call, name: str) -> ast.expr | None:
        """Return an argument of a call, by its keyword."""
        return next((word.value for word in call.keywords if word.arg == name), None)

    def number(self, node: ast.expr | None) -> float | None:
        """Return the seconds that an expression gives; None if they cannot be read."""
        if isinstance(node, ast.Name) and node.id in self._names:
            value = self._names[node.id]
            return None if isinstance(value, ast.Name) else self.number(value)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return float(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            left, right = self.number(node.left), self.number(node.right)
            return None if left is None or right is None else left * right
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("timedelta"):
            words = [
                *zip(POSITIONS, node.args, strict=False),
                *[(word.arg, word.value) for word in node.keywords],
            ]
            counts = [(UNITS.get(str(unit), 0.0), self.number(value)) for unit, value in words]
            known = [unit * count for unit, count in counts if count is not None]
            return sum(known) if len(known) == len(counts) else None
        return None

    def store_limits(self, call: ast.Call, name: str) -> tuple[Limit, Limit]:
        """Return the timeout and the grace of a call that makes stores."""
        options = self.given(call, "kvstore_options")
        if isinstance(options, ast.Name):
            options = self._names.get(options.id)
        inner: dict[str, ast.expr] = {}
        if isinstance(options, ast.Dict):
            pairs = zip(options.keys, options.values, strict=True)
            inner = {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
        limits = []
        for argument, usual in (
            ("timeout", MERGE_S if name in LOCAL else STORE_S),
            ("worker_grace", GRACE_S),
        ):
            node = inner.get(argument)
            if node is None and name != "KvpsStrategy":  # whose timeout is that of Lightning's group
                node = self.given(call, argument)
            seconds = self.number(node)
            line = 0 if seconds is None or node is None else node.lineno
            limits.append(Limit(f"{argument} of {name}()", usual if seconds is None else seconds, line))
        return limits[0], limits[1]

    def group_limit(self, call: ast.Call, name: str, library: str, argument: str) -> Limit:
        """Return the limit of a process group."""
        node = self.given(call, argument)
        seconds = self.number(node)
        if seconds is not None and node is not None:
            return Limit(f"{library}'s {argument} of {name}()", seconds, node.lineno)
        first = self.given(call, "backend") or (call.args[0] if call.args else None)
        is_nccl = isinstance(first, ast.Constant) and "nccl" in str(first.value)
        return Limit(f"{library}'s usual {argument} of {name}()", NCCL_S if is_nccl else GROUP_S, 0)

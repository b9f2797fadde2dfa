"""docs/migrating/mxnet-names.md: the names of MXNet 1.9.1, each of which does what its row says."""

import inspect
import re
from pathlib import Path

import pytest

import kvps
import kvps.compat.mx as mx

ROOT = Path(kvps.__file__).parents[1]
PAGE = (ROOT / "docs" / "migrating" / "mxnet-names.md").read_text(encoding="utf-8")
METHODS, OPTIMIZERS, ARRAYS, VARIABLES = (
    PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    for title in ("Methods of KVStore", "Optimizers", "Arrays and devices", "Environment variables")
)
KVSTORE = (
    *("init", "push", "pull", "pushpull", "broadcast", "row_sparse_pull", "set_optimizer"),
    *("set_gradient_compression", "is_capable", "type", "rank", "num_workers", "_set_updater"),
    *("save_optimizer_states", "load_optimizer_states", "_barrier", "_send_command_to_servers"),
)
"""The methods of MXNet 1.9.1's KVStore."""
OF_PS_LITE = (
    *("DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"),
    *("DMLC_NODE_HOST", "DMLC_INTERFACE", "PORT", "DMLC_LOCAL", "DMLC_USE_KUBERNETES"),
    *("DMLC_PS_VAN_TYPE", "DMLC_PS_WATER_MARK", "DMLC_RANK", "PS_VERBOSE", "PS_HEARTBEAT_INTERVAL"),
    *("PS_HEARTBEAT_TIMEOUT", "PS_RESEND", "PS_RESEND_TIMEOUT", "PS_DROP_MSG"),
)
"""The variables that ps-lite reads."""
OF_MXNET = (
    *("BIGARRAY_BOUND", "REDUCTION_NTHREADS", "SERIAL_PUSH", "USETREE", "LOGTREE"),
    *("TREE_ARRAY_BOUND", "TREE_BACKTRACK", "TREE_LINK_USAGE_PENALTY", "SLICE_THRESHOLD"),
    "DIST_ROW_SPARSE_VERBOSE",
)
"""The variables that MXNet's stores read, behind ``MXNET_KVSTORE_``."""


def named(section: str) -> dict[str, str]:
    """Return what the first column of a table names, and the rest of its row."""
    rows = [line.strip("| ").split(" | ", 1) for line in section.splitlines() if line.startswith("| `")]
    return {name: rest for first, rest in rows for name in re.findall(r"`([^`]+)`", first)}


def test_every_method_has_a_row_with_its_arguments() -> None:
    rows = named(METHODS)
    for method in KVSTORE:
        found = [name for name in rows if name.partition("(")[0] == method]
        assert len(found) == 1, method
        ours = getattr(mx.kv.KVStore, method)
        if isinstance(ours, property):
            assert "(" not in found[0]
            continue
        given = [item.strip() for item in found[0].partition("(")[2].rstrip(")").split(",") if item]
        arguments = [param for param in inspect.signature(ours).parameters.values() if param.name != "self"]
        shown = [
            argument.name if argument.default is argument.empty else f"{argument.name}={argument.default!r}"
            for argument in arguments
        ]
        assert shown == given, method


def test_every_optimizer_has_a_row() -> None:
    rows = named(OPTIMIZERS)
    there = {name for name, rest in rows.items() if "not available" not in rest}
    assert {name.lower() for name in there} == set(mx.optimizer.BY_NAME)
    for name in rows.keys() - there:
        with pytest.raises(AttributeError, match=r"is not in kvps\.compat\.mx: "):
            getattr(mx.optimizer, name)


def test_arrays_have_what_the_page_says() -> None:
    first, second, *_ = [line for line in ARRAYS.splitlines() if line.startswith("| `")]
    functions = re.findall(r"`(?:mx\.nd\.)?(\w+)`", first)
    methods = re.findall(r"`(\w+)`", second.partition(" | ")[0])
    assert len(functions) == 9 <= len(methods) + 1
    assert all(callable(getattr(mx.nd, name)) for name in functions)
    assert all(hasattr(mx.nd.NDArray, name) for name in methods)


@pytest.mark.parametrize(
    "name", [*OF_PS_LITE, *(f"MXNET_KVSTORE_{item}" for item in OF_MXNET), "MXNET_UPDATE_ON_KVSTORE"]
)
def test_every_variable_has_a_row_that_is_true(name: str) -> None:
    """What is said to have no effect stands nowhere in the code, and what counts does."""
    row = named(VARIABLES)[name]
    code = "".join([path.read_text("utf-8") for path in (ROOT / "kvps").rglob("*.py")])
    counts = row.startswith("the same")
    assert counts or row.startswith(("no effect", "not set")), row
    assert (f'"{name}"' in code) is counts
    for ours in re.findall(r"`(KVPS_\w+)", row):
        assert f'"{ours}"' in code, ours

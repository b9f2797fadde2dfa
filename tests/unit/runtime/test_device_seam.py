"""The seam to accelerators is the only file of kvps that knows streams, events and page-locked memory."""

import ast

import pytest
import torch
import torch.distributed as dist

from tests.support.sources import ROOT, trees

SEAM = ROOT / "runtime/device.py"
NAMES = {"is_cuda", "record_stream", "record_event", "wait_stream", "wait_event", "current_stream", "cudart"}
OF_TORCH = {"cuda", "xpu", "Stream", "Event"}
FLAGS = {"pin_memory", "non_blocking"}


def faults(tree: ast.AST) -> list[str]:
    """Return the lines in which a module does by itself what is the seam's."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in OF_TORCH:
                found.append(f"{node.lineno}: torch.{name}")
            case ast.Attribute(attr=name) if name in NAMES:
                found.append(f"{node.lineno}: {name}")
            case ast.Import(names=names) if any(field.name.startswith("torch.cuda") for field in names):
                found.append(f"{node.lineno}: torch.cuda")
            case ast.ImportFrom(module=str(module)) if module.startswith("torch.cuda"):
                found.append(f"{node.lineno}: torch.cuda")
            case ast.ImportFrom(module="torch", names=names) if OF_TORCH & {field.name for field in names}:
                found.append(f"{node.lineno}: torch.cuda")
            case ast.Call(keywords=keywords):
                given = {keyword.arg for keyword in keywords} & FLAGS
                found += [f"{node.lineno}: {name}=" for name in given]
    return found


def test_no_other_file_queues_waits_or_pins() -> None:
    found = {name: faults(tree) for name, tree in trees(NAMES | OF_TORCH | FLAGS)}
    assert {name for name, lines in found.items() if lines} == {"runtime/device.py"}, found


@pytest.mark.parametrize(
    "line",
    [
        *(
            "torch.cuda.synchronize()",
            "import torch.cuda",
            "from torch import cuda",
            "torch.Event()",
            "x.is_cuda",
        ),
        *("torch.empty(pin_memory=True)", "a.copy_(non_blocking=True)", "from torch.cuda import Event"),
    ],
)
def test_each_way_around_the_seam_is_found(line: str) -> None:
    assert faults(ast.parse(line))


def test_lines_of_cuda_alone_are_at_the_end_of_the_seam() -> None:
    """The lines that no machine without CUDA can run are few, and all of them are there."""
    _, own = SEAM.read_text().split("# --- CUDA's own")
    assert "torch.cuda" not in SEAM.read_text().removesuffix(own)
    assert len([line for line in own.splitlines() if line]) <= 40


def test_process_group_is_registered_for_the_accelerator_too() -> None:
    found = torch.accelerator.current_accelerator()
    import kvps.torch  # noqa: F401

    assert {"cpu", "cuda", found.type if found else "cpu"} == set(dist.Backend.backend_capability["kvps"])

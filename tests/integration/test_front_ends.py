"""The sweep: every front end by every feature of torch gives what one process gives on all batches, or refuses it by name.

``tests/integration/front_end_worker.py`` has the features, ``front_ends.py`` the front ends. A job runs all features by one
front end. ``OTHERWISE`` has the verdicts that differ from ``equal``, each with its reason.
"""

import re
import sys

import pytest

from tests.integration.front_end_worker import FEATURES
from tests.integration.front_ends import FRONT_ENDS
from tests.integration.processes import Processes

LIMIT_S = 150.0

PASSES = "refused .*(backward_passes_per_step=|overlap=False|call step\\(\\) after each backward)"
DISCARDED = "refused .*(discarded before step|call step\\(\\) after each backward|overlap=False)"
UNUSED = "refused .*(find_unused=True|ignore_stale_grad=True|requires_grad_)"
NOT_HERE = "refused servers cannot run .*SparseAdam"
NO_CLIPPING = "refused .*(clip_global_norm=|update_on_kvstore=False)"
CLIPPINGS = tuple(f"clip_global_norm_with_{name}" for name in ("sgd", "adamw"))
CLIP_THERE = dict.fromkeys(CLIPPINGS, "refused .*call torch.nn.utils.clip_grad_norm_")
"""Gradients are on the workers, where torch clips them: ``clipped_by_norm`` does as the refusal says."""
CLIP_NOT = dict.fromkeys(CLIPPINGS, "refused no clip_global_norm=")
NO_JOIN = "refused .*join"
NO_SCALER = "refused a GradScaler takes a torch optimizer"
NO_COPIES = "refused .*cannot be pickled or copied"
HOROVODS = "failed .*(AssertionError|gradient_reduction)"
"""Horovod raises an AssertionError here, and so do its names over kvps."""
NOT_KNOWN = "refused .*not in params"
NOT_MERGED = "refused .*not merged"
DOCUMENTED = "differs"
LATE = ("trained_on_the_way", "group_added_on_the_way", "unknown_parameter_added")

SEVERAL_PASSES = dict.fromkeys(("accumulation_without_a_word", "sparse_passes_without_a_word"), PASSES)
"""Gradients leave in backward, so a second pass has to be announced."""
DISCARDS = (
    *("discarded_by_zero_grad", "discarded_by_zeros", "discarded_by_the_model"),
    *("bad_batches_skipped", "two_players"),
)
ON_SERVERS = {
    "sparse_adam_steps": NOT_HERE,
    "sparse_rows_whose_gradients_cancel": NOT_HERE,
    "clipped_by_norm": NO_CLIPPING,
}
OF_TRAINERS = {
    "grad_scaler": NO_SCALER,
    "clipped_by_norm": "close",  # the limit is of the sum, so it is rounded otherwise
    "uneven_batches": DOCUMENTED,  # step() divides by the batch size that it is given
    "unused_in_some_steps": UNUSED,
}
OVERLAPS = {
    **SEVERAL_PASSES,
    "accumulation": PASSES,
    "accumulation_in_a_block": PASSES,
    "discarded_by_zeros": PASSES,
}
OF_HOROVOD = {
    **CLIP_NOT,
    **dict.fromkeys(LATE, DOCUMENTED),  # Horovod's hooks are on parameters that were trained at the beginning
    **dict.fromkeys(DISCARDS, HOROVODS),
    "accumulation_without_a_word": HOROVODS,
    "accumulation_in_a_block": HOROVODS,
    "grad_scaler": HOROVODS,
    "sparse_passes_without_a_word": HOROVODS,
    "sparse_sgd": "close",
    "uneven_batches": NO_JOIN,
}

OTHERWISE: dict[str, dict[str, str]] = {
    "optimizer": {**CLIP_THERE, **SEVERAL_PASSES, "unused_in_some_steps": UNUSED},
    "optimizer-on-servers": {**ON_SERVERS, "unused_in_some_steps": UNUSED},
    "optimizer-overlap-forward": {**CLIP_THERE, **SEVERAL_PASSES, "unused_in_some_steps": UNUSED},
    "optimizer-find-unused": {**CLIP_THERE, **SEVERAL_PASSES, "uneven_batches": NO_JOIN},
    "optimizer-allreduce": {
        **CLIP_THERE,
        **SEVERAL_PASSES,
        "unused_in_some_steps": UNUSED,
        "uneven_batches": NO_JOIN,
    },
    "trainer": {**CLIP_THERE, **OF_TRAINERS},
    "trainer-overlap": {**CLIP_THERE, **OF_TRAINERS, **OVERLAPS},
    "trainer-on-servers": {**OF_TRAINERS, **ON_SERVERS},
    "trainer-on-servers-overlap": {
        **OF_TRAINERS,
        **dict.fromkeys(DISCARDS, DISCARDED),
        **OVERLAPS,
        **ON_SERVERS,
        **dict.fromkeys(CLIPPINGS, "refused .*leave out overlap=True"),
    },
    "shard": {
        **dict.fromkeys(CLIPPINGS, "refused .*clip elements with clip_gradient="),
        **SEVERAL_PASSES,
        **dict.fromkeys(DISCARDS, DISCARDED),
        **ON_SERVERS,
        "accumulation_in_a_block": PASSES,
        "unused_in_some_steps": UNUSED,
        "uneven_batches": NO_JOIN,
        "clipped_by_norm": DOCUMENTED,  # gradients are on the servers, and .grad is None
        "grad_scaler": "failed .*No inf checks",  # torch's own words
        "moving_averages": NO_COPIES,
        "copies_after_each_step": NO_COPIES,
    },
    "ddp": {
        **CLIP_NOT,
        **dict.fromkeys(LATE, DOCUMENTED),  # as with any backend
        "accumulation": "close",
        "accumulation_without_a_word": "close",
        "frozen_on_the_way": "failed .*finished reduction",  # as with any backend
        "unused_in_some_steps": "failed .*finished reduction",
        "uneven_batches": NO_JOIN,
    },
    "horovod": OF_HOROVOD,
    "byteps": OF_HOROVOD,
    "diloco": {
        **CLIP_NOT,
        **dict.fromkeys(LATE, NOT_MERGED),
        "adam_default": DOCUMENTED,  # the mean of Adam's steps is not Adam's step of the mean
        "sparse_adam_steps": DOCUMENTED,
        "sparse_rows_whose_gradients_cancel": DOCUMENTED,
        "clipped_by_norm": DOCUMENTED,  # each rank clips its own gradient
        "grad_scaler": "refused each rank skips steps",
        "uneven_batches": NO_JOIN,
    },
}
for _verdicts in OTHERWISE.values():
    _verdicts.setdefault("unknown_parameter_added", NOT_KNOWN)


def verdicts(
    processes: Processes, front_end: str, *features: str, device: str = "cpu"
) -> dict[str, set[str]]:
    """Run features by a front end on two ranks; return what each rank said of each."""
    flags = (
        "-n",
        2,
        "-s",
        2,
        "--env",
        f"SWEEP_DEVICE={device}",
        "--",
        sys.executable,
        "-m",
        "tests.integration.front_end_worker",
    )
    launched = processes.kvps("launch", *flags, front_end, *features)
    assert launched.wait(LIMIT_S) == 0, launched
    said: dict[str, set[str]] = {}
    for name, verdict in re.findall(r"^\[worker \d\] (\w+) (.+)$", launched.out, re.MULTILINE):
        said.setdefault(name, set()).add(verdict)
    return said


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=(pytest.mark.cuda, pytest.mark.thorough))]
)
@pytest.mark.in_turn
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_results_are_those_of_one_process(processes: Processes, front_end: str, device: str) -> None:
    # A device may add the same numbers in another order.
    may_round = FRONT_ENDS[front_end].on_servers or device != "cpu"
    usual = "equal|close" if may_round else "equal"
    said = verdicts(processes, front_end, device=device)
    assert set(said) == set(FEATURES)
    otherwise = OTHERWISE[front_end]
    wrong = {
        name: found
        for name, found in said.items()
        if not all(re.match(otherwise.get(name, usual), verdict) for verdict in found)
    }
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())

"""``kvps-launch --dry-run=sbatch``: flags in, a batch script out."""

import shutil
import subprocess

import pytest

from kvps.cli import launch
from kvps.platforms import sbatch
from tests.unit.platforms.test_dry_run import printed, refused

FLAGS = ("-n", "4", "-s", "2", "--dry-run=sbatch")
COMMAND = ("--", "python", "train.py", "--name", "a b; $HOME")
WHOLE = """\
#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=5
#SBATCH --mem=10240M
#SBATCH --gpus-per-node=2
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@75
#
# Submit it with sbatch. Options of sbatch replace those above, as in:
#
#   sbatch --time=8:00:00 --partition=PARTITION job.sh
#
# 75 seconds before the time limit, the servers write a last
# checkpoint, and the job goes into the queue again.

kvps-launch --launcher slurm -n 4 -s 2 --max-restarts 3 --checkpoint-every 60 --keys /keys \
--checkpoint-dir '/my cuts' --grace 45 --env 'A=b c' \\
    -- python train.py --name 'a b; $HOME' &
"""
PLAIN = """\
#!/bin/bash
#SBATCH --job-name=kvps
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --no-requeue
#
# Submit it with sbatch. Options of sbatch replace those above, as in:
#
#   sbatch --time=8:00:00 --partition=PARTITION job.sh
#
# Without --checkpoint-dir the job is not put into the queue again.

exec kvps-launch --launcher slurm -n 4 -s 2 \\
    -- python train.py --name 'a b; $HOME'
"""


def test_every_flag_reaches_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    more = [
        *("--nodes", "2", "--name", "digits", "--cpu", "3", "--memory", "4Gi", "--gpu", "1"),
        *("--server-cpu", "4", "--server-memory", "2G", "--checkpoint-dir", "/my cuts"),
        *("--checkpoint-every", "60", "--max-restarts", "3", "--grace", "45", "--env", "A=b c"),
        *("--keys", "/keys"),
    ]
    text = printed(capsys, *FLAGS, *more, *COMMAND)
    head, again = text.split("launch=$!\n")
    assert head == WHOLE
    assert 'scontrol requeue "$SLURM_JOB_ID"' in again


def test_without_checkpoints_it_is_not_queued_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, *FLAGS, *COMMAND) == PLAIN


def test_a_grace_for_the_last_checkpoint_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *FLAGS, "--checkpoint-dir", "cuts", *COMMAND)
    assert "#SBATCH --signal=B:TERM@90\n" in text
    assert " --checkpoint-dir cuts --grace 60 " in text


def test_other_flags_are_those_of_the_launch(capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--rsh", "srun --mem=4G", "--python", "/opt/python", "--log-level", "info")
    text = printed(capsys, *FLAGS, *more, "--env-server", "A=1", "--insecure", *COMMAND)
    words = "--log-level info --rsh 'srun --mem=4G' --python /opt/python --env-server A=1 --insecure"
    assert f" {words} " in text


def test_workers_that_do_not_divide_take_whole_nodes() -> None:
    job = sbatch.BatchJob("a", 3, 7, 2, ("true",))
    assert (job.tasks, job.servers_of_node) == (3, 1)
    assert "--cpus-per-task=2\n" in sbatch.script(job)
    assert "--cpus-per-task=1\n" in sbatch.script(sbatch.BatchJob("a", 3, 7, 0, ("true",)))


@pytest.mark.parametrize("more", [(), ("--checkpoint-dir", "a'b")])
def test_bash_can_read_it(capsys: pytest.CaptureFixture[str], more: tuple[str, ...]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    text = printed(capsys, *FLAGS, "--env", "A=it's", *more, *COMMAND)
    subprocess.run([bash, "-n"], input=text.encode(), check=True)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--image", "a"), "--image is for Kubernetes"),
        (("--namespace", "a"), "--namespace is for Kubernetes"),
        (("--checkpoint-claim", "a"), "--checkpoint-claim is for Kubernetes"),
        (("-H", "a:2"), "Slurm chooses the nodes"),
        (("--nodes", "5"), "--nodes 5: use 1 to 4 nodes"),
        (("--nodes", "0"), "--nodes 0: use 1 to 4 nodes"),
        (("--cpu", "500m"), "--cpu='500m' is not a number"),
        (("--server-cpu", "0"), "--server-cpu 0: use 1 or more processors"),
        (("--memory", "4G"), "give both"),
        (("--memory", "x", "--server-memory", "1G"), "--memory='x' is not a number of bytes"),
        (("--name", "a\nb"), "printable characters"),
        (("--env", "A"), "write it as NAME=VALUE"),
        (("--grace", "0"), "--grace"),
        (("--checkpoint-every", "-1"), "--checkpoint-every"),
        (("-n", "0"), "-n 0: use 1 or more workers"),
    ],
)
def test_a_wrong_flag_is_refused(
    capsys: pytest.CaptureFixture[str], more: tuple[str, ...], told: str
) -> None:
    assert told in refused(capsys, *FLAGS, *more, *COMMAND)


def test_nodes_are_for_slurm_alone(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("-n", "4", "--image", "a", "--nodes", "2", "--dry-run=jobset")
    assert "--nodes is for --dry-run=sbatch" in refused(capsys, *flags, *COMMAND)
    assert launch.main(["-n", "4", "--nodes", "2", *COMMAND]) == 78

"""One worker of a row of ``local_steps.py losses`` in which the last worker is away for some steps.

    python benchmarks/local_steps_away.py FOLDER FROM TO [flags of examples/gpt_local_steps.py]

The last worker is killed after FROM steps, and kvps-launch starts it again. Its second life begins
when worker 0 has made TO steps, or as soon as it has started after that; if TO is 0, it ends at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import gpt_local_steps


def main(folder: Path, killed_after: int, back_at: int, words: list[str]) -> int:
    """Train, and be away; return the exit code."""
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    killed, back = folder / "killed", folder / "back"
    if rank == workers - 1 and killed.exists():
        if not back_at:
            return 0
        while not back.exists():
            time.sleep(0.1)
        print(f"worker {rank} is back at step {back.read_text()}", flush=True)
        return gpt_local_steps.main([*words, "--first-step", back.read_text()])
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if rank == 0 and 0 < back_at <= steps:
            now = folder / "now"
            now.write_text(str(steps))
            now.replace(back)
        if rank == workers - 1 and steps == killed_after:
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)
    return gpt_local_steps.main(words)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))

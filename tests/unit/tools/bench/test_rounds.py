"""What one round is: values, their truth, and how the rounds of a worker go."""

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvps.compression.codecs import decode, encode
from kvps.compression.spec import CODECS, CodecSpec
from kvps.tools.bench import rounds
from kvps.tools.bench.rounds import PERIOD, WARM_UP, Row, Truth, demand, measure, noise, spread


def rows_of(*sizes: int) -> list[Row]:
    return [np.zeros(size, np.float32) for size in sizes]


class Alone:
    """A system of one worker that sums, or is wrong in one place."""

    def __init__(self, rows: list[Row], wrong_round: int | None = None) -> None:
        self.rank, self.workers = 0, 1
        self.said: list[str] = []
        self._rows = rows
        self._wrong_round = wrong_round

    def gradients(self) -> Sequence[Row]:
        return self._rows

    def ready(self) -> None:
        self.said.append("ready")

    def step(self) -> None:
        if self.said.count("step") == self._wrong_round:
            self._rows[-1][-1] += 1
        self.said.append("step")

    def results(self) -> Sequence[Row]:
        return self._rows

    def close(self) -> None:
        self.said.append("close")


def test_values_are_new_in_each_round_and_rank() -> None:
    periods = [noise(number, rank) for number in range(2) for rank in range(2)]
    assert all(not np.any(period == 0) for period in periods)
    assert len({float(period[0]) for period in periods}) == 4
    assert np.array_equal(noise(1, 1), periods[3])


def test_a_period_lies_along_all_rows() -> None:
    rows = rows_of(3, PERIOD + 5, 2)
    period = noise(0, 0)
    spread(period, rows)
    whole = np.concatenate(rows)
    assert np.array_equal(whole, np.resize(period, whole.size))


@pytest.mark.parametrize("place", [(0, 0), (1, PERIOD), (2, 1)])
def test_every_number_is_compared(place: tuple[int, int]) -> None:
    rows = rows_of(3, PERIOD + 5, 2)
    period = noise(0, 0)
    spread(period, rows)
    demand(period, rows, "here")
    rows[place[0]][place[1]] += 0.01
    with pytest.raises(ValueError, match=r"here: a result is 0\.0\d+ off; the limit is 0\.001"):
        demand(period, rows, "here")


@pytest.mark.parametrize("how", ["2bit", "1bit", "fp16"])
def test_the_truth_of_a_codec_is_what_the_codec_says(how: str) -> None:
    """Two implementations that know nothing of each other."""
    code = CodecSpec(CODECS[how], 0.5 if how.endswith("bit") else 0.0)
    truth = Truth(2, "sum", how)
    rests = [torch.zeros(PERIOD) for _ in range(3)]

    def sent(whose: int, gradient: torch.Tensor) -> torch.Tensor:
        octets = encode(code, rests[whose], gradient)
        return decode(code, octets, torch.empty(PERIOD))

    for number in range(3):
        total = sent(0, torch.from_numpy(noise(number, 0)))
        total += sent(1, torch.from_numpy(noise(number, 1)))
        assert np.array_equal(truth.after(number), sent(2, total).numpy())


def test_the_truth_of_sgd() -> None:
    import torch

    weights = torch.nn.Parameter(torch.from_numpy(rounds.first_weights()))
    sgd = torch.optim.SGD([weights], lr=rounds.LR, momentum=rounds.MOMENTUM)
    truth = Truth(2, "sgd")
    for number in range(3):
        weights.grad = torch.from_numpy(noise(number, 0) + noise(number, 1))
        sgd.step()
        assert np.allclose(truth.after(number), weights.detach().numpy(), atol=1e-6)


def test_only_rounds_after_the_warm_up_count() -> None:
    alone = Alone(rows_of(5))
    assert len(measure(alone, "sum", 4)) == 4
    assert alone.said.count("step") == WARM_UP + 4


def test_a_wrong_result_ends_the_measurement() -> None:
    with pytest.raises(ValueError, match="round 2 of rank 0: a result is 1 off"):
        measure(Alone(rows_of(5), wrong_round=2), "sum", 4)


def test_somebody_may_look_before_the_first_round_and_after_the_last() -> None:
    asked, ask = os.pipe()
    passed, let_pass = os.pipe()
    os.write(let_pass, b"..")  # nobody looks, so nobody keeps it waiting
    alone = Alone(rows_of(5))
    try:
        measure(alone, "sum", 2, (passed, ask))
        assert os.read(asked, 10) == b".."
    finally:
        for fd in (asked, ask, passed, let_pass):
            os.close(fd)
    warm_up = ["ready", "step"] * WARM_UP
    assert alone.said == [*warm_up, "ready", *["ready", "step"] * 2, "ready", "ready"]

"""Which settings are tried next, and which win, from times with and without noise."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvps.core.autotune import GAIN, Knob, Search, Settings, Trial, sample

DEFAULTS = Settings(8 << 20, 3 << 20, 0, True)
KNOBS = (
    Knob("chunk_bytes", (16 << 20, 4 << 20, 1 << 20)),
    Knob("uplink_bytes", (12 << 20, 1 << 20)),
    Knob("threads", (1, 2)),
    Knob("priorities", (False,)),
)


def search_of(
    seconds_of: Callable[[Settings], float],
    knobs: tuple[Knob, ...] = KNOBS,
    limit_s: float = 1e9,
    turn_s: float = 0.0,
) -> Search:
    """A search that is over, in which turns take so many seconds."""
    search = Search(DEFAULTS, knobs, limit_s)
    now = 0.0
    while search.turn is not None:
        now += turn_s
        search.add(seconds_of(search.turn), now)
    return search


class Noisy:
    """Seconds of rounds that vary, and of some rounds that were disturbed."""

    def __init__(
        self, seed: int, sigma: float, disturbed: float, factors: dict[int, float]
    ) -> None:
        self._random = random.Random(seed)
        self._sigma, self._disturbed, self._factors = sigma, disturbed, factors

    def __call__(self, settings: Settings) -> float:
        seconds = self._factors.get(settings.chunk_bytes, 1.0)
        seconds *= self._random.lognormvariate(0.0, self._sigma)
        if self._random.random() < self._disturbed:
            seconds *= self._random.uniform(1.5, 4.0)
        return seconds


def test_without_noise_each_knob_ends_at_its_best_value() -> None:
    def seconds_of(settings: Settings) -> float:
        seconds = 1.0
        seconds *= {16 << 20: 0.9, 4 << 20: 0.7}.get(settings.chunk_bytes, 1.0)
        seconds *= {12 << 20: 0.8}.get(settings.uplink_bytes, 1.0)
        seconds *= 1.2 if settings.threads else 1.0
        return seconds * (1.0 if settings.priorities else 0.9)

    search = search_of(seconds_of)
    assert search.best == Settings(4 << 20, 12 << 20, 0, False)
    assert [trial.is_better for trial in search.trials] == [
        *(True, True, False),
        *(True, False),
        *(False, False),
        True,
    ]
    assert search.trials[1].ratio == pytest.approx(0.7 / 0.9), "beside the best so far"
    assert not search.is_cut_short


def test_a_gain_below_the_least_is_none() -> None:
    def seconds_of(settings: Settings) -> float:
        return 1.0 if settings == DEFAULTS else 1.0 - GAIN + 0.001

    search = search_of(seconds_of)
    assert search.best == DEFAULTS
    assert all(len(trial.ratios) > 10 for trial in search.trials), "it was close"


def test_a_slower_value_is_given_up_soon() -> None:
    search = search_of(lambda settings: 1.0 if settings == DEFAULTS else 1.1)
    assert search.best == DEFAULTS
    assert {len(trial.ratios) for trial in search.trials} == {5}
    assert search.turns == 10 * len(search.trials)


def test_the_two_of_a_pair_begin_in_turns() -> None:
    search = Search(DEFAULTS, (Knob("threads", (1,)),), 1e9)
    turns = []
    while search.turn is not None:
        turns.append(search.turn.threads)
        search.add(1.0, 0.0)
    assert turns == [0, 1, 1, 0, 0, 1, 1, 0, 0, 1]


def test_a_machine_that_slows_down_changes_nothing() -> None:
    turn = 0

    def seconds_of(settings: Settings) -> float:
        nonlocal turn
        turn += 1
        return 1.03**turn * (0.8 if settings.chunk_bytes == 4 << 20 else 1.0)

    assert search_of(seconds_of).best == Settings(4 << 20, 3 << 20, 0, True)


def test_when_the_time_is_over_the_best_so_far_stays() -> None:
    def seconds_of(settings: Settings) -> float:
        return 0.5 if settings.chunk_bytes == 16 << 20 else 1.0

    search = search_of(seconds_of, limit_s=25.0, turn_s=1.0)
    assert search.best.chunk_bytes == 16 << 20, "20 turns were enough for it"
    assert search.is_cut_short
    assert search.turns == 25
    assert len(search.trials) == 2
    half = search_of(seconds_of, limit_s=6.0, turn_s=1.0)
    assert (half.best, half.turns) == (DEFAULTS, 6)
    assert len(half.trials[0].ratios) == 2, "half a pair counts for nothing"


def test_nothing_to_try() -> None:
    search = Search(DEFAULTS, (), 1.0)
    assert search.turn is None
    assert search.best == DEFAULTS


@pytest.mark.parametrize("sigma", [0.02, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("disturbed", [0.0, 0.05, 0.2])
def test_noise_alone_keeps_the_defaults(sigma: float, disturbed: float) -> None:
    seeds = 500
    kept = sum(
        search_of(Noisy(seed, sigma, disturbed, {})).best == DEFAULTS for seed in range(seeds)
    )
    assert kept >= 0.99 * seeds


@pytest.mark.parametrize(
    ("sigma", "disturbed", "share"),
    [(0.02, 0.0, 1.0), (0.05, 0.0, 0.99), (0.05, 0.05, 0.9), (0.1, 0.0, 0.85)],
)
def test_what_takes_15_percent_less_is_found_in_noise(
    sigma: float, disturbed: float, share: float
) -> None:
    seeds, found = 300, 0
    for seed in range(seeds):
        noisy = Noisy(seed, sigma, disturbed, {4 << 20: 0.85})
        found += search_of(noisy).best.chunk_bytes == 4 << 20
    assert found >= share * seeds


def test_what_takes_more_is_never_chosen_in_noise() -> None:
    for seed in range(300):
        noisy = Noisy(seed, 0.1, 0.05, {16 << 20: 1.03, 4 << 20: 1.03, 1 << 20: 1.03})
        assert search_of(noisy, KNOBS[:1]).best == DEFAULTS


def test_a_trial_without_pairs_says_nothing() -> None:
    trial = Trial("threads", 1)
    assert (trial.ratio, trial.evidence, trial.verdict()) == (1.0, 0.0, None)


def test_settings_are_numbers_in_a_key() -> None:
    for settings in (DEFAULTS, Settings(192 << 10, 1, 4, False)):
        assert Settings.from_numbers(settings.to_numbers()) == settings


@pytest.mark.parametrize(
    ("sizes", "most", "taken"),
    [
        ([5, 5], 100, [5, 5]),
        ([100], 10, [10]),
        ([2, 100, 2, 100], 100, [2, 0, 0, 98]),
        ([10] * 6, 20, [10, 0, 0, 10, 0, 0]),
        ([50, 1, 1], 20, [20, 0, 0]),
        ([], 10, []),
        ([3], 0, [0]),
    ],
)
def test_a_sample_has_arrays_from_all_over_the_model(
    sizes: list[int], most: int, taken: list[int]
) -> None:
    assert sample(sizes, most) == taken

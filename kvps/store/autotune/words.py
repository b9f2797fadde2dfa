"""The line of log about the trials: what was tried, what was chosen, and the figures."""

from __future__ import annotations

from kvps.core.autotune import Search, Settings, Trial
from kvps.phrases import bytes_in_words
from kvps.store.autotune.bench import Bench

TITLES = {
    "chunk_bytes": "chunk size",
    "uplink_bytes": "bytes under way",
    "threads": "threads that copy",
    "priorities": "priorities",
}


def told(search: Search, defaults: Settings, bench: Bench, elapsed_s: float) -> str:
    """Return what was tried, and what was chosen."""
    fields = dict.fromkeys(trial.knob for trial in search.trials)
    parts = []
    for name in fields:
        old, new = getattr(defaults, name), getattr(search.best, name)
        tried = ", ".join(_tried(trial) for trial in search.trials if trial.knob == name)
        change = "" if old == new else f" instead of {_shown(name, old)}"
        parts.append(f"{TITLES[name]} {_shown(name, new)}{change} (tried {tried})")
    verdict = "the defaults are kept" if search.best == defaults else "chosen"
    part = bytes_in_words(bench.sample_bytes)
    model = (
        "the whole model" if bench.is_whole else f"a model of {bytes_in_words(bench.whole_bytes)}"
    )
    cut = ", which was all the time for it" if search.is_cut_short else ""
    what = "; ".join(parts) or "nothing to try"
    return f"{verdict}: {what}. {search.turns} turns with {part} of {model}, {elapsed_s:.1f} s{cut}"


def _tried(trial: Trial) -> str:
    times = f"{trial.ratio:.2f} of the time" if trial.ratios else "not timed"
    return f"{_shown(trial.knob, trial.value)}: {times}"


def chosen(text: str, settings: Settings) -> str:
    """Return what was chosen before, and by whom."""
    shown = [f"{title} {_shown(name, getattr(settings, name))}" for name, title in TITLES.items()]
    return f"{text}: {', '.join(shown)}"


def _shown(name: str, value: int | bool) -> str:
    """Return the value of one of the settings in words."""
    if name.endswith("_bytes"):
        return bytes_in_words(value)
    if name == "priorities":
        return "on" if value else "off"
    return "as the script" if value == 0 else str(value)

"""What the whole suite shares: the spec check, the `--rewrite` option, the tiers off by default.

The spec check ties the tests to ``docs/protocol.md``.  A requirement there starts a line with
its number, ``[R12]``; a test that checks it carries ``@pytest.mark.spec("R12")``.  When the
whole suite is collected, the run fails if no test of the tier checks a requirement, or a test cites a
requirement that does not exist; also if a claim of the docs is not shown every day (``tests.support.claims``).
A run of some tests only is not judged.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Set
from pathlib import Path

import hypothesis
import pytest

from tests.support import claims, covering, pairwise, summary, tiers

TESTS = Path(__file__).resolve().parent
OTHERS_VARIABLES = (
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
)
"""Variables that pytest sets for each test, torch when it imports its compiler, and scikit-learn when it is imported."""
PROTOCOL = TESTS.parent / "docs" / "protocol.md"

# "[R12]" or "**[R12]**" at the start of a line or list item; "[R12]: …" and "[R12](…)" are links.
REQUIREMENT = re.compile(r"^ *(?:[-*] +)?(?:\*\*\[(R\d+)\]\*\*|\[(R\d+)\](?![:(\[]))", re.MULTILINE)

ON_REQUEST = ("slow", "docker")
COVERING = [TESTS / folder for folder in ("unit", "scenarios")]
"""The tests that have to reach every branch of the rules: coverage is off in all others."""

tiers.share_processors()
tiers.go_around_proxies()
tiers.hear_signals()

# How long one example takes says how busy the machine is.
hypothesis.settings.register_profile("kvps", deadline=None)
hypothesis.settings.load_profile("kvps")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what the scenarios now produce into tests/scenarios; then read the diff",
    )
    parser.addoption(
        "--all",
        action="store_true",
        help="run what the everyday tier leaves out, too: all seeds, all that is marked thorough",
    )
    parser.addoption(
        "--record",
        action="store_true",
        help="write how many seconds the tests of each file take, and use of a processor, into tests/durations.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    tiers.configure(config)
    covering.configure(config, COVERING)


def pytest_sessionstart(session: pytest.Session) -> None:
    tiers.pin_terminal(session.config)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[tiers.FAILED] = session.testsfailed > 0


def pytest_report_header(config: pytest.Config) -> list[str]:
    if tiers.plays_all():
        tier = ["kvps: all tests, all seeds: half an hour or more"]
    else:
        tier = [
            f"kvps: the everyday tests, and the seeds and cases of KVPS_DAY={tiers.day()}",
            "kvps: left out: what is marked thorough (make test-all), slow (-m slow) or docker (make test-docker), "
            "and in_turn on other days",
        ]
        if is_whole_suite(config):
            tier[0] += f": {summary.expected(os.cpu_count() or 1)}"
    return tier


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the tests, and all that they import, from the collector of garbage: they stay, and are half a second's work."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not of this tier; skip what is run on request only, or cannot run here."""
    if not tiers.plays_all() and not names_single_tests(config):
        thorough = [item for item in items if item.get_closest_marker("thorough")]
        everyday = [item for item in items if not item.get_closest_marker("thorough")]
        rest = {*thorough, *pairwise.repeats(everyday), *tiers.of_other_days(everyday)}
        config.hook.pytest_deselected(items=list(rest))
        items[:] = [item for item in items if item not in rest]
    if worker := getattr(config, "workerinput", None):
        tiers.spread(items, worker["workercount"])
    wanted = config.getoption("markexpr")
    for item in items:
        for marker in ON_REQUEST:
            if item.get_closest_marker(marker) and marker not in wanted:
                item.add_marker(pytest.mark.skip(reason=f"run with -m {marker}"))
        if item.get_closest_marker("cuda") and not has_cuda():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Run the spec check."""
    if session.testsfailed or not is_whole_suite(session.config) or not PROTOCOL.exists():
        return
    run = [
        item for item in session.items if not is_on_request(item) and not item.get_closest_marker("in_turn")
    ]
    faults = spec_faults(
        PROTOCOL.read_text(encoding="utf-8"),
        cited_requirements(session.items),
        checked=cited_requirements(run).keys(),
    )
    faults += claims.faults(item.nodeid for item in run)
    if faults:
        raise pytest.UsageError(*faults)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Fail a test that leaves variables for others: ``monkeypatch.delenv`` notes none that is not there."""
    before = dict(os.environ)
    yield
    changed = {name for name, _ in before.items() ^ os.environ.items()} - {*OTHERS_VARIABLES}
    assert not changed, f"this test has changed {', '.join(sorted(changed))} in the environment of others"


@pytest.fixture(autouse=True)
def no_session() -> Iterator[None]:
    """End the session that a test leaves to this process: the next test's first store would join it."""
    yield
    process = sys.modules.get("kvps.runtime.process")
    if process is not None and process._process.session is not None:
        process.shutdown()


def is_whole_suite(config: pytest.Config) -> bool:
    """Whether nothing on the command line selects some of the tests."""
    started_in = config.invocation_params.dir
    paths = {Path(started_in, argument).resolve() for argument in config.args}
    selections = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise")
    return paths <= {TESTS, TESTS.parent} and not any(
        config.getoption(name, default=None) for name in selections
    )


def names_single_tests(config: pytest.Config) -> bool:
    """Whether the command line names tests, and not only folders and files."""
    return any("::" in argument for argument in config.args)


def is_on_request(item: pytest.Item) -> bool:
    """Whether a test runs only if ``-m`` names its mark."""
    return any(item.get_closest_marker(marker) for marker in ON_REQUEST)


def cited_requirements(items: list[pytest.Item]) -> dict[str, list[str]]:
    """The requirements that tests name, each with the tests that name it."""
    cited: dict[str, list[str]] = {}
    for item in items:
        for mark in item.iter_markers("spec"):
            for requirement in mark.args:
                cited.setdefault(requirement, []).append(item.nodeid)
    return cited


def spec_faults(protocol: str, cited: dict[str, list[str]], checked: Set[str]) -> list[str]:
    """Say where the protocol's requirements and the tests disagree.

    Args:
        protocol: the text of docs/protocol.md.
        cited: the requirements that tests name, each with these tests.
        checked: those of them that a test checks that runs.
    """
    stated = Counter(bold or plain for bold, plain in REQUIREMENT.findall(protocol))
    faults = []
    if twice := sorted((r for r, count in stated.items() if count > 1), key=number):
        faults.append(f"requirements stated twice in docs/protocol.md: {', '.join(twice)}")
    if untested := sorted(stated.keys() - checked, key=number):
        faults.append(f"requirements without a test: {', '.join(untested)}")
    faults += [
        f"{cited[requirement][0]} cites {requirement}, which docs/protocol.md does not state"
        for requirement in sorted(cited.keys() - stated.keys())
    ]
    return faults


def number(requirement: str) -> int:
    return int(requirement[1:])


def has_cuda() -> bool:
    import torch  # here, so that a run without CUDA tests need not load it

    return torch.cuda.is_available()

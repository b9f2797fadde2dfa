"""What measurements mean: the level of each finding, its figure, and the advice."""

from dataclasses import replace

import pytest

from kvps.observe.findings import Finding, Level
from kvps.protocol.membership import Figures, Seen, Sight
from kvps.tools.doctor.diagnosis import FileLimits, Measurements, bits_s, diagnose, exit_code

NUMBERS = Figures("1.0", 0, 0, 0, 0, 0, 0.0)
WORKER = Sight(2, 0, 3, "held", "gpu", 41, "", 0.5, "alive")
SERVER = Sight(1, 0, 1, "held", "cpu", 7, "", 0.1, "alive")
SEEN = Seen(1, "running", "all are here", (WORKER, SERVER), (), "1.0", 0, 0, (NUMBERS, NUMBERS))
WELL = Measurements(
    "tcp://head:9091",
    addresses=("10.0.0.1",),
    connect_s=0.0005,
    mechanism="NULL",
    seen=SEEN,
    round_trips_s=(0.0004, 0.0005, 0.0009),
    transfers=((4096, 0.0006), (262144, 0.0045)),
    clock_ahead_s=0.002,
    limits=FileLimits(5, 1024, 4096),
    software="1.0",
)


def found(name: str, **changes: object) -> list[Finding]:
    """The findings of one name, if some measurements were others."""
    return [item for item in diagnose(replace(WELL, **changes)) if item.topic == name]  # type: ignore[arg-type]


def test_all_is_well() -> None:
    findings = diagnose(WELL)
    assert {finding.level for finding in findings} == {Level.OK}
    assert not [finding for finding in findings if finding.advice]
    assert exit_code(findings) == 0
    assert [finding.topic for finding in findings] == [
        *("address", "connection", "keys", "answer", "versions", "members", "progress", "round trip"),
        *("bandwidth", "clock", "shared memory", "file descriptors"),
    ]


def test_nothing_behind_a_failure_is_said_to_be_well() -> None:
    findings = diagnose(Measurements("tcp://head:9091", resolve_error="unknown", software="1.0"))
    levels = {finding.topic: finding.level for finding in findings}
    assert levels["address"] is Level.FAIL
    skipped = ("connection", "keys", "answer", "versions", "members", "progress", "round trip", "bandwidth")
    assert {levels[name] for name in (*skipped, "clock")} == {Level.SKIP}
    assert exit_code(findings) == 1


@pytest.mark.parametrize(
    ("name", "changes", "level", "figure", "advice"),
    [
        ("address", {"resolve_error": "not known"}, "fail", "head:9091: not known", "DNS"),
        ("connection", {"connect_error": "refused"}, "fail", "refuses", "start kvps-scheduler"),
        ("connection", {"connect_error": "no answer for 3 s"}, "fail", "no answer", "firewall"),
        ("connection", {"mechanism": ""}, "fail", "does not greet", "another service"),
        ("connection", {"mechanism": "PLAIN"}, "fail", "announces 'PLAIN'", "another service"),
        ("keys", {"mechanism": "CURVE"}, "fail", "this command none", "--keys DIR"),
        ("keys", {"has_keys": True}, "fail", "the scheduler none", "leave --keys"),
        ("keys", {"keys_error": "no such file"}, "fail", "no such file", "correct --keys"),
        (
            *("keys", {"mechanism": "CURVE", "has_keys": True, "refusal": "not known"}, "fail"),
            *("not known", "the keys of this job"),
        ),
        ("keys", {"mechanism": "CURVE", "has_keys": True}, "ok", "accepts the key", ""),
        ("answer", {"seen": None, "look_error": "no answer"}, "fail", "no answer", "kvps --version"),
        (
            *("answer", {"seen": None, "look_error": "expected version 1, got version 2"}, "fail"),
            *("version 2", "one version"),
        ),
        ("versions", {"software": "2.0"}, "warn", "the scheduler has 1.0, worker 0 has 1.0", "one"),
        ("versions", {"seen": replace(SEEN, software="")}, "warn", "an older version", "one"),
        ("round trip", {"round_trips_s": (0.02, 0.02)}, "warn", "20 ms", "nearer"),
        ("bandwidth", {"transfers": ((4096, 0.5),)}, "warn", "slow link: 131 kbit/s", "compression"),
        ("clock", {"clock_ahead_s": 90.0}, "warn", "90.000 s ahead", "chrony"),
        ("clock", {"clock_ahead_s": -2.0}, "warn", "2.000 s behind", "chrony"),
        ("shared memory", {"shared_memory_error": "no memfd"}, "warn", "no memfd", "ulimit -f"),
        (
            *("shared memory", {"shared_memory_error": "no memfd", "transport": "shm"}, "fail"),
            *("no memfd", "ulimit -f"),
        ),
        ("shared memory", {"transport": "tcp"}, "warn", "KVPS_TRANSPORT=tcp", "unset"),
        ("file descriptors", {"limits": FileLimits(5, 20, 30)}, "fail", "limit 30", "ulimit -n 42"),
        ("file descriptors", {"limits": FileLimits(5, -1, -1)}, "ok", "no limit", ""),
        ("port", {"bind": "tcp://0.0.0.0:1"}, "ok", "is free", ""),
        (
            *("port", {"bind": "tcp://a:1", "bind_error": "Address already in use"}, "fail"),
            *("in use", "port 0"),
        ),
        (
            *("port", {"bind": "tcp://a:1", "bind_error": "Cannot assign"}, "fail"),
            *("Cannot assign", "ip address"),
        ),
    ],
)
def test_a_measurement_and_its_finding(
    name: str, changes: dict[str, object], level: str, figure: str, advice: str
) -> None:
    (item,) = found(name, **changes)
    assert item.level.value == level
    assert figure in item.text
    assert advice in item.advice
    assert bool(advice) == bool(item.advice)


def test_each_kind_of_trouble_with_members_has_its_own_advice() -> None:
    lost = Sight(1, 1, 4, "lost", "cpu", 8, "", 9.0, "lost for 9 s: its connection broke")
    gone = Sight(2, 1, 5, "gone", "gpu", 42, "", 9.0, "gone for 9 s: exit code 1")
    mute = Sight(1, 2, 6, "held", "cpu", 9, "", 5.0, "silent for 5 s")
    none = Sight(2, 2, 0, "empty", "", 0, "", 0.0, "not joined yet")
    members = (WORKER, gone, none, SERVER, lost, mute)
    seen = Seen(1, "running", "", members, (), "1.0", 0, 0, (NUMBERS,) * 6)
    told = [(item.level.value, item.text, item.advice) for item in found("members", seen=seen)]
    assert [level for level, _, _ in told] == ["fail", "fail", "warn", "warn"]
    for (_, figure, advice), (shown, step) in zip(
        told,
        [
            ("server 1 (cpu) is lost for 9 s", "kvps-server again"),
            ("worker 1 (gpu) is gone for 9 s", "kvps-worker again"),
            ("server 2 (cpu:9) is silent for 5 s", "stopped"),
            ("not joined yet: worker 2", "start them"),
        ],
        strict=True,
    ):
        assert shown in figure
        assert step in advice


def test_bandwidth_counts_both_ways_and_not_the_round_trip() -> None:
    assert bits_s(replace(WELL, transfers=())) is None
    item = replace(WELL, round_trips_s=(0.01,), transfers=((1000, 0.5), (100_000, 0.21)))
    assert bits_s(item) == pytest.approx(8e6)
    # One that is over at once is taken for a hundredth of its time, not for infinity.
    assert bits_s(replace(item, transfers=((1000, 0.01),))) == pytest.approx(160e6)

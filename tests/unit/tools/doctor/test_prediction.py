"""Predictions of steps: theory's limits, the advice, and what is known of scripts and running jobs."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvps.errors import ConfigError
from kvps.inquiry import Inquirer
from kvps.protocol.envelope import Answer
from kvps.protocol.membership import Figures, Pong, Seen, Sight
from kvps.tools.doctor import forecast
from kvps.tools.doctor.prediction import FILL, FRAME, WAYS, Job, advise, computed_s, predict, report, step_s

JOB = Job(model_bytes=100_000_000, arrays=161, step_s=0.5, link_bytes_s=12.5e6)
BY_NAME = {way.name: way for way in WAYS}
EXACT, RING = BY_NAME["float32"], BY_NAME["float32, gloo"]


@pytest.mark.parametrize(
    ("is_apart", "servers", "models"),
    [(True, 4, 1.0), (True, 2, 2.0), (True, 1, 4.0), (False, 4, 1.5), (False, 1, 3.0)],
)
def test_slow_link_bounds_a_step_by_what_it_carries(is_apart: bool, servers: int, models: float) -> None:
    seconds = step_s(replace(JOB, is_apart=is_apart), EXACT, 4, servers)
    assert seconds == pytest.approx(models * 8.0 * FRAME / FILL, rel=0.06)


def test_ring_carries_the_model_twice_but_for_a_part() -> None:
    assert step_s(JOB, RING, 4, 0) == pytest.approx(1.5 * 8.0 * FRAME / FILL, rel=0.06)


def test_fast_link_hides_the_exchange_behind_the_backward_pass() -> None:
    quick = replace(JOB, model_bytes=20_000_000, link_bytes_s=1.25e9)
    assert step_s(quick, EXACT, 4, 4) < 1.1 * quick.step_s
    assert step_s(replace(quick, backward=0.0), EXACT, 4, 4) > step_s(quick, EXACT, 4, 4)


def test_local_steps_share_an_exchange() -> None:
    whole = step_s(JOB, BY_NAME["10 local steps"], 4, 4) - JOB.step_s
    assert step_s(JOB, BY_NAME["100 local steps"], 4, 4) - JOB.step_s == pytest.approx(whole / 10)


def test_processors_that_are_shared_bound_a_step() -> None:
    fast = replace(JOB, link_bytes_s=1e12)
    assert step_s(replace(fast, shared_cores=2), EXACT, 4, 4) > 2 * step_s(fast, EXACT, 4, 4)


def test_no_more_servers_are_advised_than_are_needed() -> None:
    assert predict(replace(JOB, is_apart=True), EXACT, 4).servers == 4
    assert predict(replace(JOB, model_bytes=1000), EXACT, 4).servers == 1
    assert predict(JOB, EXACT, 3).servers == 3
    assert predict(JOB, RING, 4).servers == 0


def test_exact_way_is_advised_where_it_is_fast_enough_and_none_where_machines_do_not_pay() -> None:
    assert (found := advise(replace(JOB, link_bytes_s=1.25e10, model_bytes=10_000_000), 4)) is not None
    assert found.way == EXACT
    assert (slow := advise(JOB, 4)) is not None
    assert slow.way.every > 1
    assert advise(replace(JOB, link_bytes_s=1e3), 2) is None
    text = report(replace(JOB, link_bytes_s=1e3, is_apart=True), [2])
    assert "2 machines do not pay" in text
    assert "machines of their own" in text
    assert "4 machines: 3." in report(JOB, [2, 4])


@pytest.mark.parametrize("link_bytes_s", [12.5e6, 125e6, 1.25e9])
def test_computation_of_a_running_job_is_found_from_its_steps(link_bytes_s: float) -> None:
    job = replace(JOB, link_bytes_s=link_bytes_s, step_s=20.0)
    seen_s = step_s(job, EXACT, 4, 2)
    assert computed_s(replace(job, step_s=seen_s), 4, 2) == pytest.approx(20.0)


def flags(**given: object) -> argparse.Namespace:
    names = ("link", "model", "step", "scheduler", "machines", "apart", "json", "keys")
    return argparse.Namespace(**{**dict.fromkeys(names), "script": [], **given})


def test_flags_alone_describe_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    given = flags(link="1gbit", model="10M", step="0.5", machines=["4"], json=True)
    assert forecast.main(given, 1.0) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["job"]["link_bytes_s"] == 125e6
    assert said["advice"] == {"4": "float32"}
    assert {row["way"] for row in said["ways"]} == set(BY_NAME)
    assert forecast.main(flags(link="1gbit", model="10M", step="0.5"), 1.0) == 0
    assert "-> 8 machines" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "--model 100M"),
        ({"model": "1M"}, "--step 0.25"),
        ({"model": "1M", "step": "1"}, "--link 100mbit"),
        ({"model": "1M", "step": "1", "link": "fast"}, "is not a rate"),
        ({"model": "1M", "step": "1", "link": "1gbit", "machines": ["1"]}, "from 2 to 1000"),
    ],
)
def test_flags_that_say_too_little_are_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        forecast.main(flags(**given), 1.0)


@pytest.mark.in_turn
def test_first_steps_of_a_script_are_timed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "model = torch.nn.Linear(int(sys.argv[1]), 10)\n"
        "optimizer, other = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]\n"
        "for _ in range(int(sys.argv[2])):\n"
        "    model(torch.randn(8, 30)).sum().backward(); optimizer.step(); other.step()\n"
    )
    assert forecast.main(flags(link="1gbit", script=[str(script), "30", "1000"], json=True), 1.0) == 0
    job = json.loads(capfd.readouterr().out)["job"]
    assert (job["model_bytes"], job["arrays"]) == (4 * 310, 2)
    assert 0 < job["backward"] < 1
    with pytest.raises(ConfigError, match=r"train.py ended with 1"):
        forecast.main(flags(link="1gbit", script=[str(script), "30", "2"]), 1.0)
    assert "2 steps of a torch optimizer; 4 are needed" in capfd.readouterr().err


class Job3:
    """A scheduler whose first worker makes three rounds of 4,000 bytes between two looks."""

    def __init__(self, hosts: tuple[str, str], rounds: int) -> None:
        members = (
            Sight(2, 0, 3, "held", hosts[0], 41, "", 0.5, "alive"),
            Sight(1, 0, 1, "held", hosts[1], 7, "", 0.1, "alive"),
        )
        self._rounds = rounds

        def seen(looks: int) -> Seen:
            worker = Figures("1.0", rounds * looks, 0, 4000 * rounds * looks, 0, 0, 0.0)
            return Seen(1, "running", "", members, (), "1.0", 0, 0, (worker, worker._replace(rounds=0)))

        self._seen = map(seen, range(1000))

    def ask(self, request: object, answer: type[Answer], limit_s: float, payload: object = ()) -> object:
        message = next(self._seen) if answer is Seen else Pong(seq=0, clock_s=0.0)
        return argparse.Namespace(message=message)

    def __enter__(self) -> "Job3":
        return self

    def __exit__(self, *error: object) -> None: ...


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOOK_S", 0.0), ("LOOK_EVERY_S", 0.001), ("LOOK_MAX_S", 30.0)):
        monkeypatch.setattr(forecast, name, value)


@pytest.mark.usefixtures("quick_looks")
@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_running_job_shows_its_gradients_and_steps(
    monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forecast, "Inquirer", lambda *_: Job3(hosts, 3))
    monkeypatch.setattr(forecast.flags, "keys_of", lambda *_: None)
    forecast.main(flags(scheduler="tcp://10.0.0.1:9091", json=True), 1.0)
    job = json.loads(capsys.readouterr().out)["job"]
    assert job["model_bytes"] == 4000
    assert 0 <= job["step_s"] < 1
    monkeypatch.setattr(forecast, "Inquirer", lambda *_: Job3(hosts, 0))
    monkeypatch.setattr(forecast, "LOOK_MAX_S", 0.02)
    with pytest.raises(ConfigError, match="--model"):
        forecast.main(flags(scheduler="tcp://10.0.0.1:9091"), 1.0)


def test_scheduler_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inquirer, "ask", lambda *_: pytest.fail("it is not asked"))
    monkeypatch.setattr(forecast.examination, "of_scheduler", lambda found, *_: found)
    monkeypatch.setattr(forecast.flags, "keys_of", lambda *_: None)
    with pytest.raises(ConfigError, match=r"tcp://127.0.0.1:9 does not answer"):
        forecast.main(flags(scheduler="tcp://127.0.0.1:9"), 1.0)

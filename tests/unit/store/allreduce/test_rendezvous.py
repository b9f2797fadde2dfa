"""How the ranks of an allreduce store meet, and who is told if they do not."""

import socket

import pytest
from torch.distributed import HashStore, PrefixStore

from kvps import config
from kvps.errors import ConfigError, Timeout
from kvps.store.allreduce import rendezvous as module
from kvps.store.allreduce.rendezvous import Ranks, Rendezvous


@pytest.fixture(autouse=True)
def no_world(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "KVPS_SCHEDULER", "KVPS_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def boards(monkeypatch):
    """Return what was asked of the rendezvous; it gives a board of this process."""
    asked = []

    def meet(world, timeout_s):
        asked.append((world, timeout_s))
        return HashStore()

    monkeypatch.setattr(module, "_rendezvous", meet)
    return asked


def meet_two(places, name=None, taken=()):
    return places.meet(name, "allreduce", taken, 5.0)


def test_a_process_that_nobody_told_anything_is_a_world_of_one(caplog):
    places = Ranks()
    first, second = meet_two(places), meet_two(places)
    assert first == Rendezvous("allreduce-0", 0, 1, None, "")
    assert second.name == "allreduce-1"
    first.gather(0.01)
    assert caplog.text.count("world of one worker") == 1


def test_stores_share_a_rendezvous_and_nothing_else(monkeypatch, boards):
    monkeypatch.setattr(config, "world", lambda: config.World(1, 3, "127.0.0.1", 29500))
    places = Ranks()
    first, two, named = meet_two(places), meet_two(places), meet_two(places, "mine")
    assert [(found.name, found.rank, found.size) for found in (first, two, named)] == [
        ("allreduce-0", 1, 3),
        ("allreduce-1", 1, 3),
        ("mine", 1, 3),
    ]
    assert len(boards) == 1
    first.board.set("key", "of one")
    assert not two.board.check(["key"])
    with pytest.raises(ConfigError, match="store 'mine'; close"):
        meet_two(places, "mine", {"mine"})
    again = meet_two(places, "mine")
    named.board.set("key", "of the first")
    assert not again.board.check(["key"])


@pytest.mark.parametrize(
    ("master", "host"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("10.0.0.1", ""), ("node7", "")],
)
def test_ranks_of_one_machine_listen_on_loopback(monkeypatch, boards, master, host):
    monkeypatch.setattr(config, "world", lambda: config.World(0, 2, master, 29500))
    assert meet_two(Ranks()).host == host


def test_a_job_with_keys_leaves_no_host_without_them(monkeypatch, boards):
    monkeypatch.setenv("KVPS_KEYS", "keys")
    monkeypatch.setattr(config, "world", lambda: config.World(0, 2, "127.0.0.1", 29500))
    assert meet_two(Ranks()).size == 2
    monkeypatch.setattr(config, "world", lambda: config.World(0, 2, "10.0.0.1", 29500))
    with pytest.raises(ConfigError, match=r"'mine': this job has keys .* at 10\.0\.0\.1:29500"):
        meet_two(Ranks(), "mine")
    assert len(boards) == 1
    monkeypatch.setenv("KVPS_INSECURE", "1")
    assert meet_two(Ranks()).size == 2


def test_an_address_that_is_not_this_hosts_is_left_to_torch(caplog):
    assert module._listen(config.World(0, 2, "192.0.2.1", 29500)) is None
    assert "192.0.2.1 (MASTER_ADDR) is not an address of this host: port 29500 is open on all" in caplog.text


def test_a_port_that_torch_listens_at_is_left_to_it(caplog):
    with socket.create_server(("127.0.0.1", 0)) as torchs:
        assert module._listen(config.World(0, 2, *torchs.getsockname())) is None
    assert not caplog.text


def test_ranks_gather_or_say_who_does_not_come():
    board = HashStore()
    board.add("here/0", 1)
    with pytest.raises(Timeout, match=r"'mine': ranks 2, 3 did not create it in 0\.05 s, and rank 1"):
        Rendezvous("mine", 1, 4, board, "").gather(0.05)
    board.add("here/2", 1)
    Rendezvous("mine", 3, 4, board, "").gather(5.0)


def test_a_second_process_of_a_rank_is_refused():
    board = PrefixStore("mine", HashStore())
    Rendezvous("mine", 0, 1, board, "").gather(5.0)
    with pytest.raises(ConfigError, match=r"another process was rank 0 before.*dist_sync"):
        Rendezvous("mine", 0, 1, board, "").gather(5.0)


def test_nobody_at_the_masters_address():
    with pytest.raises(Timeout, match=r"rank 1 cannot meet the others at 127\.0\.0\.1:1 "):
        module._rendezvous(config.World(1, 2, "127.0.0.1", 1), 0.2)

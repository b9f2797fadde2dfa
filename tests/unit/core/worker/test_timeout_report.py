"""What a Timeout says, and what it leaves under way."""

import torch

from kvps.core.worker import calls
from kvps.errors import ConfigError, Mismatch, Timeout
from kvps.protocol.membership import Error, Pending, Probe, Probed, Welcome
from kvps.protocol.values import Pull, Push
from tests.support.worker_harness import Bench, opened, pull, push
from tests.support.worker_with_key import answer, small


class TestTimeout:
    def test_names_what_the_servers_wait_for(self) -> None:
        worker = small()
        ticket = worker.call(pull({"w": torch.zeros(4)}), 5.0)
        (seq,) = worker.seqs(Pull)
        worker.wait(4.75)
        assert worker.sent(Probe)[-1] == Probe((seq,)), "asked once more, just before"
        reason = "key 'w': round 0 waits for a push of rank 1"
        worker.server(0, Probed((), (Pending(seq, reason),)))
        worker.wait(0.25)
        assert isinstance(worker.error(ticket), Timeout)
        assert str(worker.error(ticket)) == (
            f"worker 0: pull() of store 'kv' is not done: {reason}. Nothing was changed. Call it "
            "again, or give a longer timeout="
        )

    def test_of_a_pull_gives_it_up(self) -> None:
        worker = small()
        worker.core.table.links[0].ready = False
        sink = torch.zeros(4)
        unsent = worker.call(pull({"w": sink}), 5.0)
        worker.wait(5.0)
        worker.server(0, Welcome(0, 1, 2, 1))
        assert isinstance(worker.error(unsent), Timeout)
        assert not worker.sent(Pull)
        worker.call(pull({"w": sink}), 5.0)
        worker.wait(5.0)
        answer(worker, worker.seqs(Pull)[0], 3.0)
        assert sink.tolist() == [0, 0, 0, 0]
        probes = len(worker.sent(Probe))
        worker.wait(10.0)
        assert len(worker.sent(Probe)) == probes, "nobody asks after it"

    def test_tells_of_a_server_that_does_not_answer_hello(self) -> None:
        worker = Bench(servers=1, ready=False)
        first = worker.call(calls.OpenStore("kv", opened(), 1.0), 2.0)
        worker.wait(2.0)
        assert "server 0 (tcp://s0:1) has not answered HELLO." in str(worker.error(first))
        worker.server(0, Error(0, Mismatch.code, "another cluster"))
        second = worker.call(calls.OpenStore("kv", opened(), 1.0), 2.0)
        worker.wait(2.0)
        assert "HELLO: another cluster." in str(worker.error(second))

    def test_lists_three_reasons_at_most(self) -> None:
        worker = Bench(servers=5, ready=False)
        ticket = worker.call(calls.OpenStore("kv", opened(), 1.0), 2.0)
        worker.wait(2.0)
        assert str(worker.error(ticket)).count("has not answered HELLO") == 3
        assert "HELLO and 2 more. Nothing" in str(worker.error(ticket))

    def test_a_failure_after_it_is_logged(self) -> None:
        worker = small()
        worker.call(push({"w": torch.ones(4)}, eager=False), 5.0)
        worker.wait(5.0)
        worker.server(0, Error(worker.seqs(Push)[0], ConfigError.code, "no optimizer"))
        assert worker.notes()[-1] == "warning: push() failed after its Timeout: no optimizer"
        worker.call(push({"w": torch.ones(4)}))
        assert worker.sent(Pull), "its number is asked for"

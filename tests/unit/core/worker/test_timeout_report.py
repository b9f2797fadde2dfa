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
        one = small()
        ticket = one.call(pull({"w": torch.zeros(4)}), 5.0)
        (seq,) = one.seqs(Pull)
        one.wait(4.75)
        assert one.sent(Probe)[-1] == Probe((seq,)), "asked once more, just before"
        reason = "key 'w': round 0 waits for a push of rank 1"
        one.server(0, Probed((), (Pending(seq, reason),)))
        one.wait(0.25)
        assert isinstance(one.error(ticket), Timeout)
        assert str(one.error(ticket)) == (
            f"worker 0: pull() of store 'kv' is not done: {reason}. Nothing was changed. Call it "
            "again, or give a longer timeout="
        )

    def test_of_a_pull_gives_it_up(self) -> None:
        one = small()
        one.core.table.links[0].ready = False
        sink = torch.zeros(4)
        unsent = one.call(pull({"w": sink}), 5.0)
        one.wait(5.0)
        one.server(0, Welcome(0, 1, 2, 1))
        assert isinstance(one.error(unsent), Timeout)
        assert not one.sent(Pull)
        one.call(pull({"w": sink}), 5.0)
        one.wait(5.0)
        answer(one, one.seqs(Pull)[0], 3.0)
        assert sink.tolist() == [0, 0, 0, 0]
        probes = len(one.sent(Probe))
        one.wait(10.0)
        assert len(one.sent(Probe)) == probes, "nobody asks after it"

    def test_tells_of_a_server_that_does_not_answer_hello(self) -> None:
        one = Bench(servers=1, ready=False)
        first = one.call(calls.OpenStore("kv", opened(), 1.0), 2.0)
        one.wait(2.0)
        assert "server 0 (tcp://s0:1) has not answered HELLO." in str(one.error(first))
        one.server(0, Error(0, Mismatch.code, "another cluster"))
        second = one.call(calls.OpenStore("kv", opened(), 1.0), 2.0)
        one.wait(2.0)
        assert "HELLO: another cluster." in str(one.error(second))

    def test_lists_three_reasons_at_most(self) -> None:
        one = Bench(servers=5, ready=False)
        ticket = one.call(calls.OpenStore("kv", opened(), 1.0), 2.0)
        one.wait(2.0)
        assert str(one.error(ticket)).count("has not answered HELLO") == 3
        assert "HELLO and 2 more. Nothing" in str(one.error(ticket))

    def test_a_failure_after_it_is_logged(self) -> None:
        one = small()
        one.call(push({"w": torch.ones(4)}, eager=False), 5.0)
        one.wait(5.0)
        one.server(0, Error(one.seqs(Push)[0], ConfigError.code, "no optimizer"))
        assert one.notes()[-1] == "warning: push() failed after its Timeout: no optimizer"
        one.call(push({"w": torch.ones(4)}))
        assert one.sent(Pull), "its number is asked for"

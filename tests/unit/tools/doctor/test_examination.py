"""What ``kvps doctor`` reports of a scheduler that does not answer."""

from typing import NoReturn

from kvps.core.inquiry import Inquiry
from kvps.protocol.membership import Look, Seen
from kvps.tools.doctor import examination


def test_the_doctor_does_not_advise_to_call_the_doctor() -> None:
    """Other commands do, by the same error."""
    error = Inquiry("tcp://127.0.0.1:1", Look(), Seen, now=0.0, limit_s=5.0).error
    assert "kvps doctor" in str(error)

    def ask(*_: object) -> NoReturn:
        raise error

    found = examination.of_scheduler(examination.of_this_process(""), ask, 5.0)
    assert found.look_error.startswith("no answer from the scheduler at tcp://127.0.0.1:1")
    assert found.look_error.endswith("names its --bind address")

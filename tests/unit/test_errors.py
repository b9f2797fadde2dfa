"""The tree of errors, and how an error crosses the network."""

import pytest

from kvps import errors
from kvps.errors import BY_CODE, EpochChanged, KeyNotFound, KvpsError, from_code

CODES = {
    **{1: "KvpsError", 2: "ConfigError", 3: "Timeout", 4: "WorkerLost", 5: "ServerLost"},
    **{6: "SchedulerLost", 7: "Fenced", 8: "EpochChanged", 9: "KeyNotFound", 10: "Mismatch"},
    **{11: "NonFinite", 12: "Unauthorized", 13: "ProtocolError", 14: "Overload"},
    15: "StorageError",
}
"""Written down once more: a code that was given is for ever."""


@pytest.mark.spec("R72")
def test_codes_are_for_ever() -> None:
    assert {code: cls.__name__ for code, cls in BY_CODE.items()} == CODES


def test_every_class_of_the_module_has_a_code_and_is_exported() -> None:
    classes = {var for var in vars(errors).values() if isinstance(var, type)}
    assert {kind for kind in classes if issubclass(kind, KvpsError)} == set(BY_CODE.values())
    assert set(errors.__all__) == {"BY_CODE", "REFUSED", "from_code", *CODES.values()}


@pytest.mark.parametrize(
    ("name", "builtin"), [("Timeout", TimeoutError), ("KeyNotFound", KeyError), ("Mismatch", ValueError)]
)
def test_some_are_built_in_errors_too(name: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), builtin)


@pytest.mark.parametrize("code", CODES)
def test_an_error_crosses_the_network_as_itself(code: int) -> None:
    error = from_code(code, "key 'w': no")
    assert type(error) is BY_CODE[code]
    assert error.code == code
    assert str(error) == "key 'w': no"


@pytest.mark.spec("R38")
@pytest.mark.parametrize("code", [0, 16, 999, 2**63 - 1])
def test_a_code_of_a_later_version_is_read_as_the_root(code: int) -> None:
    error = from_code(code, "something new")
    assert type(error) is KvpsError
    assert str(error) == "something new"


def test_an_error_without_a_text_says_its_name() -> None:
    assert str(KeyNotFound()) == "KeyNotFound"


def test_epoch_changed_tells_the_versions() -> None:
    error = EpochChanged("the servers hold a cut", {"w": 7}, {"w": 5})
    assert (str(error), error.before, error.after) == ("the servers hold a cut", {"w": 7}, {"w": 5})
    assert (EpochChanged().before, EpochChanged().after) == ({}, {})

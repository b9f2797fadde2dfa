"""Which store a name means."""

import pytest

from kvps.errors import ConfigError
from kvps.store.names import KINDS, SPELLINGS, kind_of


def test_every_kind_by_its_own_name():
    for name, kind in KINDS.items():
        assert kind_of(name) is kind
        assert kind_of(name.upper()) is kind
        assert kind.type == name
        assert kind.on_device is (name in ("device", "allreduce") or name.endswith("_device"))
        assert kind.is_distributed is name.startswith("dist")


def test_every_spelling_means_a_kind():
    for spelling, name in SPELLINGS.items():
        assert kind_of(spelling) is KINDS[name]


@pytest.mark.parametrize("name", ["", "dist_synch", "nccl", "distasync", "local "])
def test_any_other_name_is_an_error_that_lists_the_valid_ones(name):
    with pytest.raises(ConfigError, match=r"local, device, dist_sync.*mine"):
        kind_of(name, ("mine",))


def test_a_name_is_text():
    with pytest.raises(ConfigError, match="NoneType"):
        kind_of(None)

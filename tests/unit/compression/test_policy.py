"""What a user may ask of compression, and what that means for each key."""

import math

import pytest

from kvps.compression.policy import MIN_BYTES, OFF, rules_of
from kvps.compression.spec import BIT1, BIT2, FP16, INT8, RANDOMK, TOPK, CodecSpec
from kvps.dtypes import Spec
from kvps.errors import ConfigError
from kvps.tools.replay.digest import digest

LARGE = Spec("float32", (1000, 1000))
SMALL = Spec("float32", (10,))


def code_of(params: object, key: str = "w", spec: Spec = LARGE) -> CodecSpec | None:
    setting = rules_of(params).setting_of(key, spec)  # type: ignore[arg-type]
    return None if setting is None else setting.code


def test_a_type_alone_and_its_defaults() -> None:
    assert code_of("fp16") == code_of({"type": "fp16"}) == CodecSpec(FP16)
    assert code_of("2bit") == CodecSpec(BIT2, 0.5)
    assert code_of("1bit") == CodecSpec(BIT1, 0.5)
    assert code_of("topk") == CodecSpec(TOPK, 0.01)
    assert code_of("randomk") == CodecSpec(RANDOMK, 0.01)


def test_parameters() -> None:
    assert code_of({"type": "2bit", "threshold": 1}) == CodecSpec(BIT2, 1.0)
    assert code_of({"type": "1bit", "threshold": 0}) == CodecSpec(BIT1, 0.0)
    assert code_of({"type": "topk", "ratio": 1}) == CodecSpec(TOPK, 1.0)
    assert code_of({"type": "randomk", "ratio": 0.1, "seed": 9}) == CodecSpec(RANDOMK, 0.1, 1.0, 9)


def test_only_large_float32_is_compressed() -> None:
    assert code_of("int8", spec=SMALL) is None
    assert code_of({"type": "int8", "min_bytes": 0}, spec=SMALL) == CodecSpec(INT8)
    assert code_of("int8", spec=Spec("float32", (MIN_BYTES // 4,))) == CodecSpec(INT8)
    assert code_of("int8", spec=Spec("float32", (MIN_BYTES // 4 - 1,))) is None
    for dtype in ("float64", "float16", "int32"):
        assert code_of("int8", spec=Spec(dtype, (1000, 1000))) is None
    assert code_of({"type": "int8", "min_bytes": 0}, spec=Spec("float32", (0, 3))) is None


def test_none_compresses_nothing() -> None:
    assert code_of("none") is None
    assert OFF.setting_of("w", LARGE) is None


def test_the_way_back() -> None:
    def back(params: dict[str, object]) -> CodecSpec | None:
        setting = rules_of(params).setting_of("w", LARGE)
        assert setting is not None
        return setting.back

    assert back({"type": "2bit"}) is None
    assert back({"type": "2bit", "pull": False}) is None
    assert back({"type": "2bit", "threshold": 0.1, "pull": True}) == CodecSpec(BIT2, 0.1)
    assert back({"type": "2bit", "pull": {"type": "fp16"}}) == CodecSpec(FP16)
    assert back({"type": "2bit", "pull": {"type": "none"}}) is None


def test_the_first_rule_that_matches_decides() -> None:
    rules = rules_of(
        {
            "type": "2bit",
            "pull": True,
            "min_bytes": 0,
            "rules": [
                {"pattern": "*.bias", "type": "none"},
                {"pattern": "embed.*", "type": "topk", "ratio": 0.1, "pull": False},
                {"pattern": "embed.*", "type": "fp16"},
                {"pattern": "head*", "type": "1bit", "min_bytes": 100},
            ],
        }
    )
    found = {key: rules.setting_of(key, SMALL) for key in ("a.bias", "embed.w", "head", "fc")}
    assert found["a.bias"] is None
    assert found["embed.w"] is not None
    assert (found["embed.w"].code, found["embed.w"].back) == (CodecSpec(TOPK, 0.1), None)
    assert found["head"] is None  # it has 40 bytes
    assert found["fc"] is not None
    assert (found["fc"].code, found["fc"].back) == (CodecSpec(BIT2, 0.5), CodecSpec(BIT2, 0.5))
    head = rules.setting_of("head", LARGE)
    assert head is not None
    assert head.back == CodecSpec(BIT1, 0.5)


def test_rules_alone_leave_other_keys_as_they_are() -> None:
    params = {"rules": [{"pattern": "a", "type": "fp16"}]}
    assert code_of(params, "a") == CodecSpec(FP16)
    assert code_of(params, "b") is None


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({}, "type=None: use one of fp16, bf16, 1bit, 2bit, int8, topk, randomk, e3m0, topk2bit, or none"),
        ("3bit", "type='3bit'"),
        (True, "compression True: give a dict, such as {'type': '2bit'}, or the type alone"),
        (None, "compression None: give a dict"),
        ({"type": 2}, "type=2"),
        ({"type": "2bit", "threshhold": 0.1}, "2bit has no parameter 'threshhold'; it has type, thr"),
        ({"type": "fp16", "threshold": 0.1}, "fp16 has no parameter 'threshold'"),
        ({"type": "none", "ratio": 0.1}, "none has no parameter 'ratio'"),
        ({"type": "2bit", "threshold": math.nan}, "threshold=nan: use a finite number"),
        ({"type": "2bit", "threshold": 0}, "threshold=0.0: 2bit needs a number above 0"),
        (
            {"type": "2bit", "threshold": 1e39},
            "threshold=1e.39: 2bit needs a number above 0 that float32 can hold",
        ),
        ({"type": "2bit", "threshold": 1e-40}, "threshold=1e-40"),
        ({"type": "1bit", "threshold": -1e39}, "1bit needs a number that float32 can hold"),
        ({"type": "1bit", "threshold": "0.5"}, "threshold='0.5'"),
        ({"type": "1bit", "threshold": True}, "threshold=True"),
        ({"type": "topk", "ratio": 0}, "ratio=0.0: use a number above 0 and up to 1"),
        ({"type": "topk", "ratio": 1.1}, "ratio=1.1"),
        ({"type": "randomk", "seed": -1}, "seed=-1"),
        ({"type": "randomk", "seed": True}, "seed=True"),
        ({"type": "randomk", "seed": 2**62}, "seed=4611"),
        ({"type": "fp16", "min_bytes": -1}, "min_bytes=-1: use 0 or more"),
        ({"type": "fp16", "min_bytes": True}, "min_bytes=True"),
        ({"type": "fp16", "min_bytes": 1.5}, "min_bytes=1.5"),
        ({"type": "fp16", "decay": 1.5}, "decay=1.5: use a number from 0 to 1"),
        ({"type": "fp16", "decay": -0.1}, "decay=-0.1"),
        ({"type": "fp16", "decay": math.nan}, "decay=nan: use a finite number"),
        ({"type": "topk2bit", "ratio": 0}, "ratio=0.0: use a number above 0 and up to 1"),
        ({"type": "fp16", "pull": 1}, "pull=1: use True, False, or a dict"),
        ({"type": "fp16", "pull": {"type": "4bit"}}, "type='4bit'"),
        ({"type": "fp16", "rules": "a"}, "rules='a': give a list of dicts"),
        ({"type": "fp16", "rules": ["a"]}, "rule 'a': give a dict with a pattern"),
        ({"type": "fp16", "rules": [{"type": "fp16"}]}, "give a dict with a pattern"),
        ({"type": "fp16", "rules": [{"pattern": "a"}]}, "type=None"),
        ({"type": "fp16", "rules": [{"pattern": "a", "type": "fp16", "rules": []}]}, "'rules'"),
    ],
)
def test_senseless_parameters_are_refused(params: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        rules_of(params)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", ["none", {"type": "2bit", "min_bytes": 0}])
def test_to_ask_changes_no_state(params: object) -> None:
    """A front end and the core share a policy, and so do all stores that compress nothing."""
    rules = rules_of(params)  # type: ignore[arg-type]
    before = digest(rules)
    rules.setting_of("w", LARGE)
    assert digest(rules) == before
    OFF.setting_of("w", LARGE)
    assert not OFF._memo

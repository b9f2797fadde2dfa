"""Which hyper-parameters an optimizer takes, and what is refused and how."""

import json
import math
import subprocess
import sys
from fractions import Fraction

import msgpack
import numpy as np
import pytest

from kvps.core.optim import hyperparams
from kvps.core.optim.hyperparams import SCHEMAS, HyperParams, Parameter, Schema, register_schema, resolve
from kvps.errors import ConfigError

NAMES = [
    "sgd",
    "adam",
    "adamw",
    "adagrad",
    "adadelta",
    "rmsprop",
    "nadam",
    "radam",
    "adamax",
    "lars",
    "lamb",
    "ftrl",
    "signum",
    "dcasgd",
    "delayed_nesterov",
    "rowwise_adagrad",
    "test",
    "assign",
]


def test_every_optimizer_of_the_contract_is_declared() -> None:
    assert sorted(SCHEMAS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_complete_valid_and_documented(name: str) -> None:
    resolved = resolve(name, {})
    assert resolved.values.keys() == SCHEMAS[name].by_name().keys()
    assert {
        "lr",
        "weight_decay",
        "rescale_grad",
        "clip_gradient",
        "multi_precision",
    } <= resolved.values.keys()
    assert (resolved.lr_mult, resolved.wd_mult) == ({}, {})
    assert all(parameter.doc for parameter in SCHEMAS[name].parameters)


def test_defaults_follow_mxnet_where_torch_has_none() -> None:
    assert resolve("lars", {}).values.items() >= {"lr": 0.1, "momentum": 0.0, "eta": 1e-3}.items()
    assert resolve("lamb", {}).values.items() >= {"lr": 1e-3, "eps": 1e-6}.items()
    assert resolve("ftrl", {}).values.items() >= {"lr": 0.1, "lamda1": 0.01, "beta": 1.0}.items()
    assert resolve("signum", {}).values.items() >= {"lr": 0.01, "momentum": 0.9}.items()
    assert resolve("dcasgd", {}).values.items() >= {"lr": 0.1, "lamda": 0.04}.items()


def test_the_name_is_taken_in_any_case() -> None:
    assert resolve("AdamW", {}).name == "adamw"


@pytest.mark.parametrize(
    ("name", "given", "parameter", "value"),
    [
        ("sgd", {"learning_rate": 0.5}, "lr", 0.5),
        ("sgd", {"wd": 0.5}, "weight_decay", 0.5),
        ("adam", {"epsilon": 0.5}, "eps", 0.5),
        ("lars", {"trust_coefficient": 0.5}, "eta", 0.5),
        ("adam", {"betas": (0.5, 0.75)}, "beta1", 0.5),
        ("adam", {"betas": [0.5, 0.75]}, "beta2", 0.75),
        ("sgd", {"lr": 1}, "lr", 1.0),
        ("sgd", {"lr": np.float32(0.5)}, "lr", 0.5),
        ("sgd", {"lr": np.int64(2)}, "lr", 2.0),
        ("sgd", {"lr": Fraction(1, 2)}, "lr", 0.5),
        ("sgd", {"multi_precision": np.True_}, "multi_precision", True),
        ("sgd", {"clip_gradient": None}, "clip_gradient", None),
        ("sgd", {"clip_gradient": 5}, "clip_gradient", 5.0),
        ("sgd", {"rescale_grad": -0.25}, "rescale_grad", -0.25),
        ("sgd", {"momentum": 0.9, "nesterov": True}, "nesterov", True),
        ("sgd", {"dampening": -1}, "dampening", -1.0),
        ("adadelta", {"rho": 1}, "rho", 1.0),
        ("lamb", {"lower_bound": 0, "upper_bound": 10}, "upper_bound", 10.0),
    ],
)
def test_spellings_and_kinds_that_are_understood(
    name: str, given: dict[str, object], parameter: str, value: object
) -> None:
    got = resolve(name, given).values[parameter]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("sdg", {}, "unknown optimizer 'sdg'; use one of: adadelta, adagrad, adam, "),
        (b"sgd", {}, "unknown optimizer b'sgd'; use one of: "),
        (None, {}, "unknown optimizer None; use one of: "),
        ("x" * 10**6, {}, "unknown optimizer 'xxxxxxxxxxxx...xxxxxxxxxxxxx'; use one of: "),
        (
            "sgd",
            {"beta1": 0.9},
            "optimizer 'sgd' has no hyper-parameter 'beta1'; remove it or use one of: lr, "
            "weight_decay, rescale_grad, clip_gradient, clip_global_norm, multi_precision, momentum, dampening, "
            "nesterov, maximize, lr_mult, wd_mult, learning_rate, wd",
        ),
        ("adam", {"mu": 1}, "beta2, eps, amsgrad, maximize, betas, lr_mult"),
        ("sgd", {"epsilon": 1e-3}, "'sgd' has no hyper-parameter 'epsilon'"),
        ("sgd", {b"lr": 1}, "'sgd' has no hyper-parameter b'lr'"),
        ("sgd", {3: 1}, "'sgd' has no hyper-parameter 3"),
        (
            "sgd",
            {"lr": 1, "learning_rate": 1},
            "optimizer 'sgd': 'learning_rate' and 'lr' both set 'lr'; give only one",
        ),
        ("adam", {"betas": (0.9, 0.9), "beta2": 0.9}, "'beta2' and 'betas' both set 'beta2'; give only one"),
        ("adam", {"betas": 0.9}, "optimizer 'adam': betas=0.9 is not a pair; give betas=(beta1, beta2)"),
        ("adam", {"betas": "ab"}, "betas='ab' is not a pair"),
        ("adam", {"betas": (0.9,)}, "betas=(0.9,) is not a pair"),
        ("adam", {"betas": (0.9, 1)}, "beta2=1 is not allowed; give a number in [0, 1)"),
        ("sgd", {"lr": math.nan}, "optimizer 'sgd': lr=nan is not allowed; give a number in [0, inf)"),
        ("sgd", {"lr": math.inf}, "lr=inf is not allowed"),
        ("sgd", {"lr": 10**400}, "is not allowed; give a number in [0, inf)"),
        ("sgd", {"lr": -1e-9}, "lr=-1e-09 is not allowed"),
        ("sgd", {"lr": True}, "lr=True is not allowed; give a number"),
        ("sgd", {"lr": np.True_}, "lr=np.True_ is not allowed; give a number"),
        ("sgd", {"lr": "0.1"}, "lr='0.1' is not allowed; give a number"),
        ("sgd", {"lr": None}, "lr=None is not allowed; give a number"),
        ("sgd", {"lr": 1j}, "lr=1j is not allowed; give a number"),
        ("sgd", {"rescale_grad": math.nan}, "rescale_grad=nan is not allowed; give a number"),
        ("sgd", {"clip_gradient": 0}, "clip_gradient=0 is not allowed; give a number in (0, inf) or None"),
        ("sgd", {"nesterov": 1}, "nesterov=1 is not allowed; give True or False"),
        (
            "sgd",
            {"nesterov": True},
            "optimizer 'sgd': nesterov=True needs momentum above 0 and dampening=0; set them",
        ),
        ("sgd", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov=True needs"),
        ("ftrl", {"lr": 0}, "lr=0 is not allowed; give a number in (0, inf)"),
        ("adadelta", {"rho": 1.1}, "rho=1.1 is not allowed; give a number in [0, 1]"),
        (
            "lamb",
            {"lower_bound": 2, "upper_bound": 1},
            "optimizer 'lamb': lower_bound=2 is above upper_bound=1; swap them",
        ),
        ("sgd", {"lr_mult": [1]}, "optimizer 'sgd': lr_mult=[1] is not a map; give {key: factor}"),
        ("sgd", {"wd_mult": {b"w": 1}}, "wd_mult has the key b'w'; keys are str or int"),
        ("sgd", {"wd_mult": {True: 1}}, "wd_mult has the key True; keys are str or int"),
        ("sgd", {"lr_mult": {"w": -1}}, "lr_mult['w']=-1 is not allowed; give a number in [0, 3.4e+38]"),
        ("sgd", {"lr_mult": {"w": math.nan}}, "lr_mult['w']=nan is not allowed"),
        ("sgd", {"lr_mult": {"w": "1"}}, "lr_mult['w']='1' is not allowed"),
        ("sgd", {"lr_mult": {3: 1, "3": 1}}, "lr_mult names the key '3' twice"),
    ],
)
def test_a_refusal_names_the_thing_and_the_next_step(
    name: object, given: dict[object, object], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        HyperParams.from_wire(name, given)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 600  # whatever the length of what was sent


def test_a_peer_must_send_a_map() -> None:
    with pytest.raises(ConfigError, match=r"'sgd': \[\] is not a map of hyper-parameters; send"):
        HyperParams.from_wire("sgd", [])


def test_the_wire_form_survives_msgpack() -> None:
    given: dict[str, object] = {
        "lr": 0.1,
        "clip_gradient": 2,
        "nesterov": True,
        "momentum": 0.9,
        "lr_mult": {"w": 2, 3: 0.5},
        "wd_mult": {"bias": 0},
    }
    sent = resolve("sgd", given)
    received = msgpack.unpackb(msgpack.packb(sent.to_wire()))
    assert HyperParams.from_wire("sgd", received) == sent
    assert json.loads(json.dumps(received)) == received


def test_equal_settings_are_equal_however_they_were_spelled() -> None:
    item = resolve("adam", {"learning_rate": 1, "betas": (0.5, 0.5)})
    other = resolve("ADAM", {"lr": 1.0, "beta1": 0.5, "beta2": np.float64(0.5)})
    assert item == other
    assert item != other.with_lr(2)


def test_two_in_words_differ_in_what_is_not_alike() -> None:
    sgd = resolve("sgd", {"lr": 0.1, "momentum": 0.9})
    other = resolve("sgd", {"lr": 0.1, "lr_mult": {"bias": 2.0}})
    assert sgd.beside(other) == "sgd with momentum=0.9, lr_mult={}"
    assert other.beside(sgd) == "sgd with momentum=0.0, lr_mult={'bias': 2.0}"
    assert sgd.beside(resolve("adam", {})) == "sgd"
    assert sgd.beside(sgd) == "sgd"
    assert sgd.beside(None) == "sgd"


def test_with_lr_changes_only_the_rate() -> None:
    before = resolve("sgd", {"lr": 0.1, "momentum": 0.9, "lr_mult": {"w": 3}})
    after = before.with_lr(np.float64(0.5))
    assert after == resolve("sgd", {"lr": 0.5, "momentum": 0.9, "lr_mult": {"w": 3}})
    assert before.number("lr") == 0.1
    with pytest.raises(ConfigError, match="'ftrl': lr=0 is not allowed"):
        resolve("ftrl", {}).with_lr(0)


def test_a_key_has_its_own_rate_and_decay() -> None:
    given = {"lr": 0.5, "wd": 0.25, "lr_mult": {"w": 2, 7: 0}, "wd_mult": {"w": 4}}
    resolved = resolve("sgd", given)
    assert resolved.for_key("w") == (1.0, 1.0)
    assert resolved.for_key("7") == (0.0, 0.25)
    assert resolved.for_key("other") == (0.5, 0.25)


def test_values_are_read_by_kind() -> None:
    resolved = resolve("sgd", {"momentum": 0.5, "nesterov": True, "clip_gradient": 2})
    assert resolved.number("momentum") == 0.5
    assert resolved.flag("nesterov") is True
    assert resolved.optional("clip_gradient") == 2.0
    assert resolve("sgd", {}).optional("clip_gradient") is None


def test_a_plug_in_declares_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyperparams, "SCHEMAS", dict(SCHEMAS))
    register_schema(
        Schema.of(
            "mine",
            Parameter("window", 3, kind=int, low=1, high=9),
            Parameter("ceiling", 0.0, high=1.0),
            lr=0.1,
        )
    )
    assert resolve("Mine", {"window": np.int32(4)}).values["window"] == 4
    for wrong in (0, 10, 2.0, True, "4"):
        with pytest.raises(ConfigError, match=r"give a whole number in \[1, 9\]"):
            resolve("mine", {"window": wrong})
    with pytest.raises(ConfigError, match=r"give a number in \(-inf, 1\]"):
        resolve("mine", {"ceiling": 2})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sgd", "optimizer 'sgd' is already registered; choose another name"),
        ("Mine", "'Mine' cannot name an optimizer; use lower-case letters"),
        ("a b", "'a b' cannot name an optimizer"),
    ],
)
def test_a_plug_in_needs_a_free_plain_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        register_schema(Schema.of(name, lr=0.1))
    assert sorted(SCHEMAS) == sorted(NAMES)


def test_torch_is_not_imported() -> None:
    code = "import sys, kvps.core.optim.hyperparams; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

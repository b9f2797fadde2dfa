"""A parameter whose update was deferred: whoever reads it first makes the update."""

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import kvps
from kvps.torch.deferred_updates import ForwardOverlap, PendingParameter

X = torch.ones(1, 2)
NEW = 7.0


class Net(torch.nn.Module):
    """``hidden`` is read and never called; ``spare`` is neither; ``first`` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.hidden = torch.nn.Linear(2, 2, bias=False)
        self.spare = torch.nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x) @ self.hidden.weight
        return y


def put_off(model: torch.nn.Module) -> tuple[ForwardOverlap, list[str]]:
    """Defer updates that write NEW; return what was updated, too."""
    params = dict(model.named_parameters())
    updated: list[str] = []

    def update(names: list[str]) -> None:
        updated.extend(names)
        with torch.no_grad():
            for name in names:
                params[name].fill_(NEW)

    overlap = ForwardOverlap(model, params, update)
    overlap.put_off(params)
    return overlap, updated


def test_a_module_waits_for_its_own_parameters_and_for_what_it_reads() -> None:
    model = Net()
    overlap, updated = put_off(model)
    assert updated == []
    model.first(X)
    assert updated == ["first.weight", "first.bias"], "both by one update"
    model(X)
    assert updated[2:] == ["hidden.weight"]
    overlap.finish()
    assert updated[3:] == ["spare.weight"]
    assert {type(param) for param in model.parameters()} == {torch.nn.Parameter}
    assert not any("_kvps_owner" in vars(param) for param in model.parameters())


def saved(model: torch.nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False).weight


def averaged(model: torch.nn.Module) -> Any:
    averaged_model = AveragedModel(model)
    averaged_model.update_parameters(model)
    return averaged_model.module.weight


def summed(model: torch.nn.Module) -> Any:
    total = [torch.zeros(2, 2)]
    torch._foreach_add_(total, [model.weight])
    return total[0]


READERS: dict[str, Callable[[Any], Any]] = {
    "detach": lambda model: model.weight.detach(),
    "data": lambda model: model.weight.data,
    "arithmetic": lambda model: model.weight * 1,
    "a list of tensors": summed,
    "numpy": lambda model: torch.from_numpy(model.weight.detach().numpy()),
    "item": lambda model: torch.full((2, 2), model.weight[0, 0].item()),
    "state_dict": lambda model: model.state_dict()["weight"],
    "state_dict of what is around": lambda model: torch.nn.Sequential(model).state_dict()["0.weight"],
    "compiled model's state_dict": lambda model: torch.compile(model, backend="eager").state_dict()[
        "_orig_mod.weight"
    ],
    "state_dict with variables": lambda model: model.state_dict(keep_vars=True)["weight"] + 0,
    "deepcopy": lambda model: copy.deepcopy(model).weight,
    "deepcopy of a parameter": lambda model: copy.deepcopy(model.weight),
    "pickle": saved,
    "AveragedModel": averaged,
    "vector": lambda model: torch.nn.utils.parameters_to_vector(model.parameters()).view(2, 2),
    "functional_call": lambda model: torch.func.functional_call(
        model, dict(model.named_parameters()), torch.eye(2)
    ).t(),
    "half": lambda model: model.half().weight.float(),
    "data_ptr": lambda model: (model.weight.data_ptr(), model.weight.detach())[1],
}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_finds_the_new_weights(reader: str) -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    overlap, _ = put_off(model)
    found = READERS[reader](model)
    assert torch.equal(found, torch.full((2, 2), NEW))
    assert type(found) in (torch.Tensor, torch.nn.Parameter)
    assert type(model.weight) is torch.nn.Parameter
    overlap.close()


def test_the_text_of_a_parameter_is_of_the_new_weights() -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    put_off(model)
    assert repr(model.weight).startswith("Parameter containing:\ntensor([[7., 7.]")


def test_a_write_comes_after_the_update() -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    put_off(model)
    with torch.no_grad():
        model.weight.clamp_(max=3.0)
    assert torch.equal(model.weight, torch.full((2, 2), 3.0))


def test_a_hook_of_the_script_that_was_there_first_finds_the_new_weights() -> None:
    """weight_norm of old computes the weight in a hook, and backward needs what it has read."""
    model = torch.nn.Linear(2, 2, bias=False)
    with pytest.warns(FutureWarning, match="weight_norm"):
        torch.nn.utils.weight_norm(model)
    found: list[bool] = []
    model.register_forward_pre_hook(lambda *_: found.append(bool((model.weight_g == NEW).all())))
    put_off(model)
    model(X).sum().backward()
    assert found == [True]


@pytest.mark.parametrize(
    "make", [torch.nn.LSTM, lambda *_: torch.nn.MultiheadAttention(2, 1), torch.nn.Bilinear]
)
def test_modules_that_read_several_parameters_at_once(make: Any) -> None:
    model, expected = make(2, 2, 2), make(2, 2, 2)
    put_off(model)
    with torch.no_grad():
        for param in expected.parameters():
            param.fill_(NEW)
    inputs = (X,) if make is torch.nn.LSTM else (X, X) if make is torch.nn.Bilinear else (X, X, X)
    found, wanted = model(*inputs), expected(*inputs)
    for item, other in zip(
        torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(wanted), strict=True
    ):
        assert torch.equal(item, other)


def test_reads_of_no_element_do_not_wait() -> None:
    model = Net()
    _, updated = put_off(model)
    model.zero_grad()
    torch.optim.SGD(model.parameters()).zero_grad()
    for param in model.parameters():
        assert isinstance(param, torch.nn.Parameter)
        assert (param.requires_grad, param.is_leaf, param.dtype) == (True, True, torch.float32)
        assert param.shape[0] == len(param.size()) == 2 or param.dim() == 1
        assert {param: 1}[param] == 1
    assert updated == []


def test_a_parameter_of_a_class_of_its_own_is_updated_at_once() -> None:
    class Own(torch.nn.Parameter):
        pass

    model = torch.nn.Linear(2, 2)
    model.weight = Own(torch.zeros(2, 2))
    _, updated = put_off(model)
    assert updated == ["weight"]
    assert type(model.weight) is Own
    assert type(model.bias) is PendingParameter


def test_two_optimizers_over_two_models() -> None:
    linear, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    put_off(linear)
    put_off(other)
    assert torch.equal(linear.weight + other.weight, torch.full((2, 2), 2 * NEW))


def test_a_failed_update_leaves_an_ordinary_parameter() -> None:
    model = torch.nn.Linear(2, 2)

    def fail(_: list[str]) -> None:
        raise kvps.WorkerLost("gone")

    overlap = ForwardOverlap(model, dict(model.named_parameters()), fail)
    overlap.put_off(["weight", "bias"])
    with pytest.raises(kvps.WorkerLost):
        model(X)
    model(X)
    overlap.put_off(["weight"])
    overlap.forget()
    model(X)


@pytest.mark.parametrize("is_warm", [False, True])
def test_compiled_code_never_sees_a_pending_parameter(is_warm: bool) -> None:
    """``is_warm``: it was compiled before there was an optimizer."""
    torch._dynamo.reset()
    model = torch.nn.Linear(2, 2, bias=False)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    if is_warm:
        compiled(X)
    overlap, _ = put_off(model)
    overlap.finish()
    if not is_warm:
        torch._dynamo.reset()  # torch forgets who watches it
    overlap.put_off(["weight"])
    assert torch.equal(compiled(X), torch.full((1, 2), 2 * NEW))
    assert overlap.is_compiled, "from now on nothing is deferred"


def test_a_scripted_module_is_refused() -> None:
    with pytest.warns((DeprecationWarning, FutureWarning), match="script"):  # the latter from torch 2.14 on
        scripted = torch.jit.script(torch.nn.Linear(2, 2))
    model = torch.nn.Sequential(scripted)
    with pytest.raises(kvps.ConfigError, match="a scripted module reads its weights"):
        ForwardOverlap(model, dict(model.named_parameters()), lambda _: None)


def test_nothing_holds_it() -> None:
    model = torch.nn.Linear(2, 2)
    overlap, _ = put_off(model)
    gone = weakref.ref(overlap)
    del overlap, model
    gc.collect()
    assert gone() is None


def test_close_updates_everything_and_removes_the_hooks() -> None:
    model = Net()
    overlap, updated = put_off(model)
    overlap.close()
    assert len(updated) == 4
    assert not any(module._forward_pre_hooks for module in model.modules())

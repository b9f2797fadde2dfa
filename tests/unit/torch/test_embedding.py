"""An embedding table as a module: what is pulled, what is pushed, and how often."""

import copy
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import kvps
import kvps.torch
from kvps.errors import ConfigError, EpochChanged, Mismatch
from kvps.store.table_batch import TableBatch
from kvps.torch import Embedding


@pytest.fixture
def table() -> Any:
    with kvps.create("local") as kv:
        yield kv.embedding("t", 3, init=("normal", 0.5), optimizer="sgd", lr=1.0)


def test_embedding_trains_as_torch_does(table: kvps.EmbeddingTable) -> None:
    ids = [torch.tensor([[1, 2], [2, 5]]), torch.tensor([[5, 5], [3, 0]])]
    ours = Embedding(table)
    theirs = torch.nn.Embedding.from_pretrained(table.pull(range(6)), freeze=False)
    heads = [torch.nn.Linear(3, 1) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=1.0)
    for some in ids:
        losses = []
        for module, head in zip((ours, theirs), heads, strict=True):
            loss = head(module(some)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        assert losses[0] == pytest.approx(losses[1])
    assert torch.allclose(table.pull(range(6)), theirs.weight.detach(), atol=1e-6)


def test_several_forwards_before_one_backward_are_one_push(table: kvps.EmbeddingTable) -> None:
    module = Embedding(table)
    before = table.pull([1, 2])
    (module(torch.tensor([1, 2])) + module(torch.tensor([2, 2]))).sum().backward()
    assert table.version() == 1
    assert torch.equal(before - table.pull([1, 2]), torch.tensor([[1.0] * 3, [3.0] * 3]))
    module(torch.tensor([1])).sum().backward()
    assert table.version() == 2


def test_a_backward_that_failed_leaves_nothing_behind(table: kvps.EmbeddingTable) -> None:
    module = Embedding(table)
    before = table.pull([1, 2])

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    first = torch.ones(3, requires_grad=True)
    first.register_hook(fail)
    scaled = (first * 1.0).sum()  # what was made first is gone back through last
    with pytest.raises(RuntimeError, match="on purpose"):
        (scaled + module(torch.tensor([1])).sum()).backward()
    assert len(module._exchange._gathered) == 1
    module(torch.tensor([2])).sum().backward()
    assert table.version() == 1
    after = table.pull([1, 2])
    assert torch.equal(after[0], before[0])
    assert torch.allclose(after[1], before[1] - 1)


def test_a_graph_that_is_kept_pushes_each_time(table: kvps.EmbeddingTable) -> None:
    before = table.pull([4])
    loss = Embedding(table)(torch.tensor([4])).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert table.version() == 2
    assert torch.allclose(before - 2, table.pull([4]))


@pytest.mark.parametrize("how", ["no_grad", "eval", "inference"])
def test_without_gradients_it_only_pulls(table: kvps.EmbeddingTable, how: str) -> None:
    module = Embedding(table)
    weight = torch.ones(3, requires_grad=True)
    if how == "eval":
        module.eval()
        out = module(torch.tensor([1, 1]))
        (out * weight).sum().backward()
    else:
        with torch.no_grad() if how == "no_grad" else torch.inference_mode():
            out = module(torch.tensor([1, 1]))
    assert torch.equal(out, table.pull([1, 1]))
    assert (table.version(), len(table)) == (0, 0)


def test_the_row_of_padding_is_zero_for_ever(table: kvps.EmbeddingTable) -> None:
    module = Embedding(table, padding_idx=0)
    out = module(torch.tensor([[0, 7], [7, 0]]))
    assert out[0, 0].tolist() == [0.0] * 3
    out.sum().backward()
    assert len(table) == 1
    assert module(torch.tensor(0)).tolist() == [0.0] * 3
    module(torch.tensor([0])).sum().backward()  # nothing to push is a push
    assert table.version() == 2
    assert "'t', 3, padding_idx=0" in repr(module)
    assert "padding" not in repr(Embedding(table))


def test_copies_of_a_module_have_its_table(table: kvps.EmbeddingTable) -> None:
    model = torch.nn.Sequential(kvps.torch.Embedding(table), torch.nn.Linear(table.dim, 1))
    mean = AveragedModel(model)
    ids = torch.tensor([5, 7])
    model(ids).sum().backward()
    mean.update_parameters(model)
    for item in (mean.module, copy.deepcopy(model)):
        assert item[0].table is table
        assert torch.equal(item[0](ids), table.pull(ids))


def test_embedding_has_no_parameters(table: kvps.EmbeddingTable) -> None:
    model = torch.nn.Sequential(Embedding(table), torch.nn.Linear(3, 1))
    trainer = kvps.Trainer(model, "sgd", {"learning_rate": 0.5}, kvstore="local")
    before = model[1].weight.detach().clone(), table.pull([3])
    model(torch.tensor([3, 4])).sum().backward()
    trainer.step(1)
    assert not torch.equal(model[1].weight, before[0])
    assert not torch.equal(table.pull([3]), before[1])
    assert set(model.state_dict()) == {"1.weight", "1.bias"}


def test_forward_returns_to_where_the_servers_are(
    table: kvps.EmbeddingTable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = Embedding(table)
    monkeypatch.setattr(TableBatch, "pull", _once(TableBatch.pull))
    out = module(torch.tensor([1]))
    monkeypatch.setattr(TableBatch, "push", _once(TableBatch.push))
    out.sum().backward()
    assert table.version() == 0
    assert [record.message for record in caplog.records] == ["back", "back"]
    module(torch.tensor([1])).sum().backward()
    assert table.version() == 1


def _once(call: Any) -> Any:
    """Return what first says that the servers have returned to a cut."""
    calls: list[int] = []

    def made(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise EpochChanged("back", {}, {}, has_optimizer=True)
        return call(*args, **kwargs)

    return made


def test_a_mean_is_taken_where_a_store_adds_up(
    table: kvps.EmbeddingTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(table.store)
    monkeypatch.setattr(kind, "type", "dist_sync_device")
    monkeypatch.setattr(kind, "num_workers", 4)
    before = table.pull([1])
    Embedding(table)(torch.tensor([1])).sum().backward()
    assert torch.allclose(before - table.pull([1]), torch.tensor(0.25))
    Embedding(table, op="sum")(torch.tensor([1])).sum().backward()
    assert torch.allclose(before - table.pull([1]), torch.tensor(1.25))
    monkeypatch.setattr(kind, "average", True)
    Embedding(table)(torch.tensor([1])).sum().backward()
    assert torch.allclose(before - table.pull([1]), torch.tensor(2.25))


def test_arguments_that_cannot_be(table: kvps.EmbeddingTable) -> None:
    with pytest.raises(ConfigError, match=r"kv\.embedding"):
        Embedding(torch.nn.Embedding(1, 1))  # type: ignore[arg-type]
    for padding_idx in ("0", 2**63):
        with pytest.raises(ConfigError, match=f"padding_idx={padding_idx!r}: give a whole number of 64 bits"):
            Embedding(table, padding_idx=padding_idx)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="op='mean'"):
        Embedding(table, op="mean")
    with pytest.raises(Mismatch, match="ids are whole numbers"):
        Embedding(table)(torch.tensor([0.5]))

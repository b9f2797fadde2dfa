"""From tensors to rows and back, and reductions in this process."""

import pytest
import torch

from kvps.errors import ConfigError
from kvps.torch.distributed.host_tensor import (
    FOLDS,
    UNSIGNED,
    Staged,
    blank,
    check,
    check_sparse,
    fold,
    octets,
    padded,
)


def test_a_tensor_that_is_a_row_is_used_as_it_is() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    staged = Staged(tensor)
    staged.row += 1
    staged.deliver()
    assert tensor.tolist() == [[1, 2, 3], [4, 5, 6]]
    staged.deliver(torch.zeros(6))
    assert tensor.sum() == 0


def strided() -> torch.Tensor:
    return torch.arange(6.0).view(2, 3).t()


def conjugate() -> torch.Tensor:
    return torch.tensor([1 + 2j, 3 - 1j]).conj()


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(4.0)


def parameter() -> torch.Tensor:
    return torch.nn.Parameter(torch.arange(4.0))


@pytest.mark.parametrize("make", [strided, conjugate, inferred, parameter])
def test_of_any_other_there_is_a_copy_that_is_brought_back(make: object) -> None:
    tensor = make()  # type: ignore[operator]
    wanted = tensor.detach().clone().resolve_conj().reshape(-1)
    staged = Staged(tensor)
    assert torch.equal(staged.row, wanted)
    assert not staged.row.is_inference(), "the loop's thread could not write to it"
    with torch.no_grad():
        staged.row += 1
    staged.deliver()
    assert torch.equal(tensor.detach().resolve_conj().reshape(-1), wanted + 1)


def test_rows_that_are_made_in_inference_mode_are_plain() -> None:
    with torch.inference_mode():
        assert not blank(3, torch.float32).is_inference()
        assert not padded(torch.ones(3), 5).is_inference()
        assert not Staged(torch.ones(3)).row.is_inference()


def test_a_row_is_multiplied_and_the_tensor_is_not() -> None:
    tensor = torch.ones(2)
    staged = Staged(tensor)
    staged.multiply(3.0)
    assert staged.row.tolist() == [3.0, 3.0]
    assert tensor.tolist() == [1.0, 1.0]
    staged.deliver()
    assert tensor.tolist() == [3.0, 3.0]
    with pytest.raises(ConfigError, match=r"PREMUL_SUM needs fractions, got torch.int64"):
        Staged(torch.ones(2, dtype=torch.int64)).multiply(3.0)


def test_an_expanded_tensor_is_written_once() -> None:
    values = torch.zeros(2, 1)
    staged = Staged(values.expand(2, 3), is_read=False)
    staged.deliver(torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0, 2.0]))
    assert values.tolist() == [[1.0], [2.0]]


def test_write_only_tensor_is_not_read() -> None:
    staged = Staged(strided(), is_read=False)
    staged.row.fill_(7)
    staged.deliver()
    assert staged.row.tolist() == [7.0] * 6


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs dense tensors, got layout torch\.sparse_coo"):
        Staged(torch.zeros(2).to_sparse())


def test_padding_is_zeros_and_no_copy_where_none_is_needed() -> None:
    row = torch.ones(3, dtype=torch.int16)
    assert padded(row, 3) is row
    assert padded(row, 5).tolist() == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.bfloat16, torch.float64])
def test_octets_are_the_same_memory(dtype: torch.dtype) -> None:
    row = torch.zeros(3, dtype=dtype)
    octets(row).fill_(1)
    assert octets(row).nbytes == row.nbytes
    assert bool((row != 0).all())


ROWS = [torch.tensor([1, 6]), torch.tensor([3, 2]), torch.tensor([2, 4])]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        *(("SUM", [6, 12]), ("PRODUCT", [6, 48]), ("MIN", [1, 2]), ("MAX", [3, 6])),
        *(("BAND", [0, 0]), ("BOR", [3, 6]), ("BXOR", [0, 0])),
    ],
)
def test_every_reduction(name: str, wanted: list[int]) -> None:
    assert fold(name, ROWS).tolist() == wanted
    assert fold(name, ROWS[:1]).tolist() == [1, 6]


def test_halves_are_reduced_in_float32_and_rounded_once() -> None:
    rows = [torch.tensor([60_000.0], dtype=torch.float16)] * 3
    assert fold("AVG", rows).tolist() == rows[0].tolist()
    tiny = [torch.tensor([item], dtype=torch.bfloat16) for item in (1.0, 2.0**-8, 2.0**-8)]
    assert fold("SUM", tiny).item() == 1.0 + 2.0**-7


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_unsigned_numbers_are_reduced(dtype: torch.dtype) -> None:
    rows = [item.to(dtype) for item in ROWS]
    most = torch.iinfo(dtype).max
    for name in FOLDS:
        check(name, dtype)
        found = fold(name, rows)
        assert found.dtype == dtype
        assert found.tolist() == fold(name, ROWS).tolist(), name
    large = [torch.tensor([most, 1], dtype=dtype), torch.tensor([1, most], dtype=dtype)]
    assert fold("MAX", large).tolist() == [most, most]
    assert fold("SUM", large).tolist() == [0, 0]
    assert large[0].tolist() == [most, 1]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_halves_are_reduced_in_complex64() -> None:
    rows = [torch.tensor([1 + 2j, 2], dtype=torch.complex32)] * 2
    check("PRODUCT", torch.complex32)
    assert fold("SUM", rows).dtype == torch.complex32
    assert fold("SUM", rows).to(torch.complex64).tolist() == [2 + 4j, 4]
    assert fold("AVG", rows).to(torch.complex64).tolist() == [1 + 2j, 2]


def test_reduction_that_torch_cannot_do_is_refused_before_it_travels() -> None:
    with pytest.raises(ConfigError, match=r"ReduceOp.SUM of torch.bits8 is not supported: "):
        check("SUM", torch.bits8)
    for dtype in UNSIGNED:
        with pytest.raises(ConfigError, match=rf"sparse tensors of {dtype} .*use to_dense\(\)"):
            check_sparse(dtype)
    check_sparse(torch.float16)


def test_senseless_reduction_is_refused() -> None:
    for name, dtype, says in (
        ("UNUSED", torch.float32, r"ReduceOp\.UNUSED is not supported .* SUM, AVG"),
        ("BAND", torch.float32, r"ReduceOp\.BAND needs whole numbers or bool, got torch\.float32"),
        ("AVG", torch.bool, r"ReduceOp\.AVG needs numbers, got torch\.bool"),
        ("MAX", torch.complex64, r"ReduceOp\.MAX needs an order"),
    ):
        with pytest.raises(ConfigError, match=says):
            check(name, dtype)
    for name in FOLDS:
        check(name, torch.int32)

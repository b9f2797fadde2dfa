"""The arrays that every system pushes and pulls."""

import pytest

from kvps.tools.bench.workloads import numbers, payload_bytes, shapes_of, transformer


@pytest.mark.parametrize(
    ("workload", "arrays", "count"),
    [
        ("resnet50", 161, 25_557_032),
        ("big", 1, 16 * 1024 * 1024),
        ("small", 1000, 256_000),
        ("transformer", 148, 124_439_808),
        ("bytes:1024", 1, 256),
        ("keys:10", 10, 640),
    ],
)
def test_sizes(workload: str, arrays: int, count: int) -> None:
    shapes = shapes_of(workload)
    assert len(shapes) == arrays
    assert numbers(shapes) == count
    assert payload_bytes(shapes) == 4 * count


def test_a_transformer_follows_its_hyper_parameters() -> None:
    small = transformer(layers=1, width=2, vocabulary=5, context=3)
    assert len(small) == 2 + 12 + 2
    # embeddings; two norms, attention and feed-forward of a layer; the last norm
    assert numbers(small) == (10 + 6) + (8 + (12 + 6 + 4 + 2) + (16 + 8 + 16 + 2)) + 4


@pytest.mark.parametrize("workload", ["huge", "bytes:", "bytes:0", "bytes:6", "keys:-1", "keys"])
def test_an_unknown_workload_is_named(workload: str) -> None:
    with pytest.raises(ValueError, match=f"no workload '{workload}'; use one of resnet50"):
        shapes_of(workload)

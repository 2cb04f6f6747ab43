"""From what people have to micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from conftest import CONFIGS, stock
from ptq.errors import BadInput
from ptq.models.call import observe
from ptq.models.skeleton import from_module
from ptq.pipeline.batches import few_tokens, micro_batches, row_mask, rows
from ptq.pipeline.calibrate import calibrate
from ptq.pipeline.spine import Batch

MODEL = from_module(stock(CONFIGS["llama"]()))


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), size=st.integers(1, 5))
def test_every_sample_comes_once_and_nothing_is_padded(lengths: list[int], size: int) -> None:
    samples = [torch.full((n,), i) for i, n in enumerate(lengths)]
    made = micro_batches(MODEL, samples, size)
    got = [row for batch in made for row in batch.kwargs["input_ids"]]
    assert all(len(batch.kwargs["input_ids"]) <= size for batch in made)
    assert sorted((int(row[0]), len(row)) for row in got) == list(enumerate(lengths))


def test_a_table_of_tokens_is_cut_by_tokens() -> None:
    made = micro_batches(MODEL, torch.zeros(40, 512, dtype=torch.long))
    assert [len(b.kwargs["input_ids"]) for b in made] == [8] * 5


def test_no_cache_is_kept() -> None:
    (batch,) = micro_batches(MODEL, [torch.zeros(1, 4, dtype=torch.long)])
    assert batch.kwargs["use_cache"] is False


def test_mappings_and_plain_tensors_pass_through() -> None:
    ids, mask = torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)
    (batch,) = micro_batches(MODEL, [{"input_ids": ids, "attention_mask": mask}])
    assert batch.kwargs["attention_mask"] is mask
    x = torch.randn(3, 2)
    assert micro_batches(from_module(nn.Linear(2, 1)), [x]) == [Batch((x,), {})]


def mapping(samples: int, length: int, **more: object) -> dict[str, object]:
    ids = torch.arange(samples * length).view(samples, length) % 300
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


@given(samples=st.integers(1, 7), size=st.integers(1, 8))
def test_a_mapping_is_cut_where_its_samples_can_be_told_apart(samples: int, size: int) -> None:
    whole = mapping(samples, 5, pixel_values=torch.randn(samples, 3, 4, 4), output_router_logits=False)
    made = micro_batches(MODEL, [whole], size)
    assert [len(b.kwargs["input_ids"]) for b in made] == [min(size, samples - i) for i in range(0, samples, size)]
    for name in ("input_ids", "attention_mask", "pixel_values"):
        assert torch.equal(torch.cat([b.kwargs[name] for b in made]), whole[name])  # type: ignore[arg-type]
    assert all(b.kwargs["output_router_logits"] is False for b in made)


@pytest.mark.parametrize(
    "more",
    [
        {"pixel_values": torch.ones(24, 7)},  # patches of all images
        {"position_ids": torch.arange(5)},
        {"image_sizes": [(4, 4)] * 6},
        {"scale": torch.tensor(1.0)},
    ],
)
def test_a_mapping_stays_whole_where_they_cannot(more: dict[str, object]) -> None:
    whole = mapping(6, 5, **more)
    (batch,) = micro_batches(MODEL, [whole], 2)
    assert batch.kwargs == {**whole, "use_cache": False}
    assert few_tokens(batch) is batch


def test_a_mapping_of_many_tokens_is_cut_by_tokens() -> None:
    made = micro_batches(MODEL, [mapping(40, 512)])
    assert [len(b.kwargs["input_ids"]) for b in made] == [8] * 5


def test_a_probe_takes_as_little_as_it_can() -> None:
    def shapes(batch: dict[str, object]) -> dict[str, tuple[int, ...]]:
        few = few_tokens(Batch((), batch))
        return {name: tuple(v.shape) for name, v in few.kwargs.items() if isinstance(v, torch.Tensor)}

    hidden = torch.ones(4, 12, dtype=torch.long).tril(6).flip(-1)  # padded on the left
    assert shapes({"input_ids": torch.ones(4, 12)}) == {"input_ids": (1, 8)}
    assert shapes(mapping(4, 12)) == {"input_ids": (1, 8), "attention_mask": (1, 8)}
    assert shapes(mapping(4, 12) | {"attention_mask": hidden})["input_ids"] == (1, 12)
    assert shapes(mapping(4, 12, pixel_values=torch.ones(4, 3, 8, 8))) == {
        "input_ids": (1, 12),
        "attention_mask": (1, 12),
        "pixel_values": (1, 3, 8, 8),
    }


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [["text"]],
        [torch.tensor(3)],
        [torch.zeros(1, 0, dtype=torch.long)],
        [torch.zeros(1, 2, 3, dtype=torch.long)],
        [{"input_ids": torch.zeros(1, 4, dtype=torch.long), "attention_mask": torch.ones(1, 3)}],
    ],
)
def test_what_is_no_batch_is_refused(bad: list[object]) -> None:
    with pytest.raises(BadInput, match=r"batch|token ids"):
        micro_batches(MODEL, bad)


def test_masked_tokens_count_nowhere() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    flat = row_mask(Batch((), {"attention_mask": mask}))
    x = torch.arange(12.0).view(2, 3, 2)
    assert torch.equal(rows(x, flat), x[mask.bool()])
    assert row_mask(Batch((), {"attention_mask": torch.ones(2, 3)})) is None
    assert len(rows(torch.ones(1, 7, 2), flat)) == 7  # a tower with tokens of its own has no mask


def test_an_input_without_a_dimension_of_tokens_is_one_row() -> None:
    assert rows(torch.arange(4.0), None).tolist() == [[0, 1, 2, 3]]
    model, x = from_module(nn.Linear(4, 2)), torch.randn(4)
    for stats in (calibrate(model, [x]), observe(model, model.state, {"weight": ["gram"]}, x)[1]):
        assert torch.equal(stats["weight"]["gram"].sum, torch.outer(x, x))

"""Sampling: what top-k, top-p and min-p leave, ties, and the same tokens in every batch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sglang_minima.runner import cut as cut_module
from sglang_minima.runner import wide_rows
from sglang_minima.runner.cut import NO_TOKEN, Cut, draw_cut
from sglang_minima.runner.sampling import SamplingRow, draw, sample
from sglang_minima.sampling_params import SamplingParams

SLACK = 1e-9

logit_rows = st.lists(
    st.one_of(
        st.integers(-6, 6).map(float),  # ties, as logits of 16 bits have them
        st.floats(-30, 30, width=32),
        st.just(-float("inf")),
    ),
    min_size=2,
    max_size=24,
).filter(lambda row: max(row) > -float("inf"))
cuts = st.builds(
    Cut,
    temperature=st.sampled_from((1e-6, 0.05, 0.7, 1.0, 2.0, 1e6)),
    point=st.floats(0, 1, exclude_max=True),
    top_k=st.sampled_from((-1, 1, 2, 3, 7, 100)),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
)


def shares(logits: list[float], cut: Cut, clear: Callable[[bool], object] = assume) -> np.ndarray:
    """The definition in float64: the probability of each token after the cuts.

    ``clear`` is told whether every border is one that float64 decides.
    """
    values = np.array(logits, dtype=np.float32)
    distances = (values.max() - values).astype(np.float64)
    probs = np.exp(-distances / cut.temperature)
    probs /= probs.sum()
    order = np.argsort(distances, kind="stable")
    if cut.top_k > 0:
        order = order[: cut.top_k]
    ordered = probs[order] / probs[order].sum()
    before = np.cumsum(ordered) - ordered
    clear(np.abs(before - cut.top_p).min() > SLACK or cut.top_p == 1)
    clear(np.abs(ordered - cut.min_p * ordered[0]).min() > SLACK or cut.min_p in (0, 1))
    keep = ((before < cut.top_p) | (cut.top_p == 1)) & (ordered >= cut.min_p * ordered[0])
    keep[0] = True
    left = np.zeros(len(logits))
    left[order[keep]] = ordered[keep]
    return left / left.sum()


def expected(logits: list[float], cut: Cut, clear: Callable[[bool], object] = assume) -> int:
    summed = np.cumsum(shares(logits, cut, clear))
    clear(np.abs(summed - cut.point).min() > SLACK)
    return int(np.searchsorted(summed, cut.point, side="right"))


@settings(max_examples=300, deadline=None)
@given(logit_rows, cuts)
def test_draws_by_the_definition(logits: list[float], cut: Cut) -> None:
    assert draw_cut(torch.tensor([logits]), [cut]).tolist() == [expected(logits, cut)]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.lists(cuts, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_no_row_depends_on_the_batch(data: st.DataObject, chosen: list[Cut], rng: object) -> None:
    width = data.draw(st.integers(2, 16))
    values = st.lists(st.integers(-4, 4).map(float), min_size=width, max_size=width)
    logits = torch.tensor([data.draw(values) for _ in chosen])
    alone = [draw_cut(logits[i : i + 1], [cut]).item() for i, cut in enumerate(chosen)]
    assert draw_cut(logits, chosen).tolist() == alone


@contextmanager
def short_pieces() -> Iterator[None]:
    """Rows in pieces, as on a GPU, which short ones and those of a CPU are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide_rows, "PIECE", 4)
        patch.setattr(wide_rows, "FEW_ROWS", 1)
        patch.setattr(wide_rows, "_is_cut", lambda values, piece: True)
        yield


@settings(max_examples=200, deadline=None)
@given(logit_rows, cuts)
def test_pieces_draw_by_the_definition(logits: list[float], cut: Cut) -> None:
    with short_pieces():
        assert draw_cut(torch.tensor([logits]), [cut]).tolist() == [expected(logits, cut)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30).filter(any), st.floats(0, 0.999))
def test_pieces_give_what_whole_rows_give(values: list[int], point: float) -> None:
    row = torch.tensor([values, values[::-1]])
    summed = row.cumsum(-1)
    target = int(point * sum(values))
    places = [next(i for i, x in enumerate(one) if x > target) for one in summed.tolist()]
    points = torch.full((2, 1), point, dtype=torch.float64)
    keys = row * 100 + torch.arange(row.shape[-1])
    with short_pieces():
        assert torch.equal(wide_rows.running_sum(row), summed)
        assert wide_rows.pick(row, points).tolist() == places
        for most in {1, len(values) // 2, len(values)} - {0}:
            assert torch.equal(wide_rows.smallest(keys, most), keys.sort().values[:, :most])


def by_threshold(probs: torch.Tensor, top_p: torch.Tensor, is_deterministic: bool) -> torch.Tensor:
    """What the library's `top_p_renorm_probs` promises: float32, all equals of the last kept."""
    assert is_deterministic
    ordered = probs.sort(dim=-1, descending=True).values
    reached = ordered.cumsum(-1) < top_p[:, None]
    last = ordered.gather(-1, reached.sum(-1, keepdim=True).clamp_max(probs.shape[-1] - 1))
    kept = probs.masked_fill(probs < last, 0)
    return kept / kept.sum(-1, keepdim=True)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-40, 40), min_size=2, max_size=24), cuts)
def test_a_threshold_leaves_what_sorting_leaves(eighths: list[int], cut: Cut) -> None:
    """The way of the GPU library, which keeps too many equals of the last token."""
    # What float32 does not tell apart is equal there.
    logits = [value / 8 for value in eighths]
    row = cut._replace(top_k=-1, temperature=min(max(cut.temperature, 0.05), 2.0))
    assume(row.top_p < 1)
    want = expected(logits, row)
    # float32 decides near borders.
    values = shares(logits, row._replace(top_p=1.0, min_p=0.0))
    summed = np.cumsum(np.sort(values)[::-1])
    assume(np.abs(summed - row.top_p).min() > 1e-5)
    with pytest.MonkeyPatch.context() as patch:
        library = SimpleNamespace(sampling=SimpleNamespace(top_p_renorm_probs=by_threshold))
        patch.setattr(cut_module, "package", lambda: library)
        patch.setattr(
            cut_module,
            "_draw_nucleus_of_few",
            lambda rows, weights: cut_module.pick(
                cut_module._nucleus(rows, weights), rows.column("point")
            ),
        )
        assert draw_cut(torch.tensor([logits]), [row]).tolist() == [want]


@pytest.mark.parametrize("spread", [0.5, 4.0])
@pytest.mark.parametrize("top_k", [1000, 2000, -1])
def test_large_vocabularies(top_k: int, spread: float) -> None:
    """Each way of finding what is left, over logits of 16 bits with thousands of equals."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 20000, generator=generator).mul(spread).bfloat16().float()
    for point in (0.0, 0.2, 0.5, 0.9, 0.9999):
        cut = Cut(0.9, point, top_k, 0.95, 0.001)
        assert draw_cut(logits, [cut]).item() == expected(logits[0].tolist(), cut, bool)


@pytest.mark.parametrize("top_k", [1024, 1025, 20482, -1])
def test_pieces_of_full_length(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary that no piece divides, the most candidates that are taken out of it, rows of
    which one token is left or all are equal."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(9, 20483, generator=generator).mul(3).bfloat16().float()
    logits[0, :-1] = -torch.inf
    logits[1] = 0
    drawn = [Cut(1.5, point, top_k, 0.97, 0.0) for point in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)]
    drawn += [Cut(1e6, 1 - 2**-53, top_k, 1.0, 0.0), Cut(1.0, 0.5, top_k, 1.0, 0.2)]
    whole = draw_cut(logits, drawn)
    monkeypatch.setattr(wide_rows, "_is_cut", lambda values, piece: values.shape[-1] > 4 * piece)
    monkeypatch.setattr(wide_rows, "FEW_ROWS", 1)
    assert torch.equal(draw_cut(logits, drawn), whole)


def test_frequencies() -> None:
    """Thousands of rows, which take several turns."""
    logits = torch.tensor([[2.0, 0.0, 1.0, 1.0, -3.0]])
    cut = Cut(0.8, 0.0, 4, 0.9, 0.05)
    count = 4000
    points = [(i + 0.5) / count for i in range(count)]
    tokens = draw_cut(logits.expand(count, -1), [cut._replace(point=point) for point in points])
    found = np.bincount(tokens.numpy(), minlength=5) / count
    assert np.abs(found - shares(logits[0].tolist(), cut, bool)).max() <= 1 / count


def row_of(seed: int = 0, **params: float) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, array("i", [1, 2]), 2, frozenset())


def test_mixed_batches_keep_the_tokens_of_a_seed() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 500, generator=generator)
    rows = [
        row_of(7),
        row_of(8, top_p=0.9),
        row_of(9, top_k=20, top_p=0.8),
        row_of(temperature=0.0),
    ]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    backwards = sample(logits.flip(0), rows[::-1])
    assert backwards[::-1] == together
    assert together[3] == int(logits[3].argmax())


def test_rows_ahead_draw_what_they_will_draw_later() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(2))
    early, late = row_of(5), row_of(5)
    late.tokens.extend([4, 4])
    assert draw(logits, [early], ahead=2).tolist() == sample(logits, [late])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_without_numbers_have_no_token(bad: float) -> None:
    logits = torch.zeros(5, 40)
    logits[1, 3] = bad
    logits[2] = -torch.inf
    rows = [row_of(top_p=0.5), row_of(top_p=0.5), row_of(top_k=3), row_of(), row_of(top_k=5)]
    tokens = sample(logits, rows)
    assert [token == NO_TOKEN for token in tokens] == [False, True, True, False, False]

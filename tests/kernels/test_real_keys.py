"""The formats on real keys and values: those of the embedded model over a page of prose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from minima_kernels import FP8, TQ, TQ3, Format, KVGeometry, Rotation
from sglang_minima.models import find_embedded_model, load_model, resolve_model_path
from sglang_minima.tokenization.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(
    find_embedded_model() is None, reason="the embedded model is not installed"
)

GEOMETRY = KVGeometry(num_layers=30, num_kv_heads=3, head_dim=64, page_size=64)
NUM_TOKENS = 512
PROSE = Path(__file__).parents[2] / "LICENSE"


class _Recorder:
    """Dense causal attention that keeps the keys and values of every layer."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.keys.append(k)
        self.values.append(v)
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)


@pytest.fixture(scope="module")
def recorded() -> tuple[torch.Tensor, torch.Tensor]:
    """Keys after RoPE and values, ``[layers * pages, page_size, H, D]``."""
    directory = resolve_model_path(None)
    model, _ = load_model(directory, torch.float32)
    ids = Tokenizer.load(directory).encode(PROSE.read_text())[:NUM_TOKENS]
    recorder = _Recorder()
    with torch.inference_mode():
        model(torch.tensor(ids), torch.arange(NUM_TOKENS), recorder)
    k, v = (
        torch.cat(x).view(-1, GEOMETRY.page_size, 3, 64) for x in (recorder.keys, recorder.values)
    )
    assert len(k) == 30 * NUM_TOKENS // GEOMETRY.page_size
    return k, v


def errors(
    format_: Format, recorded: tuple[torch.Tensor, torch.Tensor], rotation: Rotation
) -> tuple[float, float]:
    """Mean squared error of K and V rows over their squared norms, averaged over all rows."""
    k, v = (rotation.forward(x) for x in recorded)
    decoded = format_.decode(format_.encode(k, v, GEOMETRY), GEOMETRY)
    k_error, v_error = (
        float(((y - x).square().sum(-1) / x.square().sum(-1)).mean())
        for x, y in zip((k, v), decoded, strict=True)
    )
    return k_error, v_error


def draws() -> list[Rotation]:
    """No signs, and three draws of signs: a codec must not be judged on one rotation."""
    generator = torch.Generator().manual_seed(0)
    signs = (torch.randint(0, 2, (3, 64), generator=generator) * 2 - 1).tolist()
    return [Rotation(64), *(Rotation(64, signs=draw) for draw in signs)]


@pytest.mark.parametrize(("levels", "theory"), [(8, 0.03455), (4, 0.11748)])
def test_values_meet_the_error_of_theory(
    levels: int, theory: float, recorded: tuple[torch.Tensor, torch.Tensor]
) -> None:
    for rotation in draws():
        _, v_error = errors(TQ(8, levels), recorded, rotation)
        assert v_error == pytest.approx(theory, rel=0.15)


def test_centring_cuts_the_error_of_keys_by_more_than_half(
    recorded: tuple[torch.Tensor, torch.Tensor],
) -> None:
    for rotation in draws():
        plain, _ = errors(TQ(8, 8, centred=False), recorded, rotation)
        centred, _ = errors(TQ3, recorded, rotation)
        assert plain == pytest.approx(0.0345, rel=0.2)
        assert centred < 0.45 * plain


def test_fp8_is_an_order_better_than_three_bits(
    recorded: tuple[torch.Tensor, torch.Tensor],
) -> None:
    k_error, v_error = errors(FP8, recorded, Rotation(64))
    assert max(k_error, v_error) < 1e-3

"""RoPE, rotation and storage in one kernel give what torch gives step by step."""

from __future__ import annotations

import gpu_pages  # noqa: F401  (its folder of cases)
import pytest
import torch
from append_cases import check_append

from minima_kernels import KVGeometry, parse_format
from minima_kernels.cuda.route import append_reason

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["fp8", "bf16", "f16"])
def test_equals_torch(name: str, dim: int, dtype: torch.dtype) -> None:
    reason = append_reason(parse_format(name), KVGeometry(1, 1, dim, 64), dtype)
    if reason is not None:
        pytest.skip(reason)
    check_append(name, dim, dtype, torch.device("cuda", 0))

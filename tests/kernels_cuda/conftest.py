"""What of the CUDA kernels can be tested without a GPU: page order, plans, compilation."""

from __future__ import annotations

import sys
from pathlib import Path

# Pages in a poisoned arena come from the tests of the torch route.
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

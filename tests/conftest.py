from __future__ import annotations

import os

# Before anything imports torch: OpenMP threads that spin at barriers are many times slower when
# another process uses a core, which test runs must survive.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

"""`launch_server` with the fake scheduler, as a program."""

from __future__ import annotations

import sys

from fake_scheduler import run_fake_scheduler
from sglang_minima.launch_server import main

if __name__ == "__main__":
    sys.exit(main(scheduler=run_fake_scheduler))

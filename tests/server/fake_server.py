"""`launch_server` with the fake scheduler, as a program."""

from __future__ import annotations

import sys

from server_kit import FAKE_SCHEDULER

from sglang_minima.launch_server import main

if __name__ == "__main__":
    sys.exit(main(scheduler=FAKE_SCHEDULER))

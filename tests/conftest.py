from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import settings

# Before anything imports torch: OpenMP threads that spin at barriers are many times slower when
# another process uses a core, which test runs must survive.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Servers are started many times: they need not compile their modules each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# An example may meet a moment in which other processes have the cores.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

_SHARE = {
    "the embedded model's server": (
        *("test_docs", "test_end_to_end", "test_examples", "test_frontend_programs"),
        *("test_real_server", "test_tool_choice"),
    ),
    "small models' servers": (
        *("test_anthropic_api", "test_bad_requests", "test_bench_serving", "test_bounds"),
        *(
            "test_chat",
            "test_chat_tools",
            "test_dashboard_api",
            "test_dashboard_page",
            "test_flood",
        ),
        *("test_generate_api", "test_info_api", "test_metrics", "test_openai_api"),
        *("test_random_bodies", "test_router", "test_structured_output"),
    ),
}
"""Files that run in one process, which need not start a server that another process has as well.
They run first: what takes longest must not be what is left at the end."""
_GROUPS = {name: group for group, names in _SHARE.items() for name in names}


def _group(nodeid: str) -> str:
    """What the tests are scheduled with: files share a process, and so do those of a GPU."""
    path = PurePosixPath(nodeid.split("::")[0])
    return "gpu" if path.parent.name == "gpu" else _GROUPS.get(path.stem, str(path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives whole groups to the processes of pytest-xdist."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    config.option.loadscopereorder = False
    return Scheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _group(item.nodeid) not in _SHARE)

"""The dashboard in a real browser: by mouse and keys, on a desk and on a phone."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import Page, chromium, find_chromium
from server_kit import RunningServer
from test_dashboard_api import run

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)"
)

LIVE = "document.getElementById('link').dataset.state === 'live'"
CANVAS = "document.getElementById('tree')"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
TRUNK = "the trunk that all the forks of this test share. " * 4
CONTRAST = """
(() => {
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    const text = style.getPropertyValue(name).trim();
    const part = (at) => {
      const value = parseInt(text.slice(at, at + 2), 16) / 255;
      return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    };
    return 0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5);
  };
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((m, n) => n - m);
    return (x + 0.05) / (y + 0.05);
  };
  const pairs = [['--text', '--card'], ['--text', '--page'], ['--soft', '--card'],
    ['--soft', '--page'], ['--accent', '--card'], ['--accent-text', '--accent'],
    ['--bad', '--card']];
  return pairs.map(([a, b]) => [a, b, ratio(a, b)]);
})()
"""
UNNAMED = """
[...document.querySelectorAll('button, input, textarea, canvas, th')]
  .filter((one) => !one.closest('dialog:not([open])'))
  .filter((one) => !(one.getAttribute('aria-label') || one.textContent.trim()
    || (one.labels && one.labels.length > 0)))
  .map((one) => one.outerHTML)
"""


@asynccontextmanager
async def opened(
    server: RunningServer, width: int = 1280, height: int = 800
) -> AsyncIterator[Page]:
    """The page of a server, showing its data; it must have worked without an error."""
    assert CHROMIUM is not None
    async with chromium(CHROMIUM) as page:
        await page.resize(width, height, phone=width < 600)
        await page.open(f"{server.url}/dashboard")
        await page.until(LIVE)
        shown = "document.getElementById('tree-details').textContent"
        await page.until(f"{shown}.startsWith('default namespace: ')")
        yield page
        assert page.errors == []
        assert all(url.startswith(f"{server.url}/dashboard") for url in page.requests)


def visit(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 120))  # type: ignore[arg-type]


async def colours(page: Page) -> int:
    """How many different colours the tree shows."""
    return int(
        await page.run(
            f"(() => {{ const c = {CANVAS}; const d = c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data; const seen = new Set();"
            "for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);"
            "return seen.size; })()"
        )
    )


async def place(page: Page, x: float, y: float) -> tuple[float, float]:
    """A place in the tree, in pixels from its corner, as a place in the window."""
    left, top = await page.run(
        f"(() => {{ const r = {CANVAS}.getBoundingClientRect(); return [r.left, r.top]; }})()"
    )
    return left + x, top + y


@pytest.fixture(scope="module")
def forked(tiny: RunningServer) -> RunningServer:
    """The tiny server with one namespace, in which four prompts share a trunk."""
    assert tiny.post("/flush_cache", None).status_code == 200
    for tail in ("one", "two", "three", "four"):
        run(tiny, TRUNK + tail * 12)
    return tiny


def test_page_shows_the_server(forked: RunningServer, tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(forked) as page:
            await page.until("document.getElementById('t-hit').textContent.includes('%')")
            assert "KV minima" in await page.text("#about")
            assert re.search(r"\d+ nodes", await page.text("#tree-about"))
            assert await colours(page) > 3
            assert "default namespace" in await page.text("#tree-details")
            assert await page.run(OVERFLOW) <= 0
            # Tiles, tree and charts are seen at once.
            bottom = "document.querySelector('.charts').getBoundingClientRect().bottom"
            assert await page.run(bottom) <= 800
            assert await page.run(UNNAMED) == []
            label = await page.run("document.querySelector('.chart canvas').ariaLabel")
            assert re.match(r"Bytes, latest: anchor .*, stale .*, recent ", label)
            await page.screenshot(tmp_path / "desk.png")
            assert (tmp_path / "desk.png").stat().st_size > 10_000

    visit(work)


def test_zoom_with_mouse_and_keys(forked: RunningServer) -> None:
    async def work() -> None:
        async with opened(forked) as page:
            crumbs = "document.querySelectorAll('#crumbs li').length"
            assert await page.run(crumbs) == 1
            await page.click(*await place(page, 20, 70))
            await page.until(f"{crumbs} === 2")
            assert "tokens 0 – " in await page.text("#crumbs")
            # The top block zooms out.
            await page.click(*await place(page, 20, 10))
            await page.until(f"{crumbs} === 1")
            await page.run(f"{CANVAS}.focus()")
            for key in ("ArrowDown", "ArrowDown"):
                await page.press(key)
            await page.until(
                "document.getElementById('tree-said').textContent.startsWith('Tokens 0 – ')"
            )
            await page.press("Enter")
            await page.until(f"{crumbs} === 2")
            await page.press("ArrowDown")
            await page.press("ArrowDown")
            first = await page.text("#tree-said")
            await page.press("ArrowRight")
            assert await page.text("#tree-said") != first
            await page.press("Backspace")
            await page.until(f"{crumbs} === 1")
            # The same by the table, without the canvas.
            await page.run("document.querySelector('#tree-rows button').click()")
            await page.until(f"{crumbs} === 2")

    visit(work)


def test_modes_pause_and_theme(forked: RunningServer) -> None:
    async def work() -> None:
        async with opened(forked) as page:
            await page.run("document.querySelector('input[value=hits]').click()")
            assert "most hits" in await page.text("#tree-legend")
            await page.run("document.querySelector('input[value=idle]').click()")
            assert "just now" in await page.text("#tree-legend")
            assert await colours(page) > 2
            for scheme in ("light", "dark"):
                await page.scheme(scheme)
                for first, second, ratio in await page.run(CONTRAST):
                    assert ratio >= 4.5, (scheme, first, second, ratio)
            background = "getComputedStyle(document.body).backgroundColor"
            dark = await page.run(background)
            await page.run("document.getElementById('theme').click()")
            assert await page.text("#theme") == "Light"
            assert await page.run(background) != dark
            await page.run("document.getElementById('pause').click()")
            assert await page.text("#link-text") == "paused"
            asked = len(page.requests)
            await asyncio.sleep(4.5)
            assert len(page.requests) <= asked + 2  # what was under way
            await page.run("document.getElementById('pause').click()")
            await page.until(LIVE)

    visit(work)


def test_path_of_a_prompt(forked: RunningServer) -> None:
    async def work() -> None:
        async with opened(forked) as page:
            prompt = TRUNK + "one" * 12 + "<b>and more, which is not cached</b>"
            await page.run(f"document.getElementById('probe-text').value = {prompt!r}")
            await page.run("document.querySelector('#probe button').click()")
            await page.until("document.querySelector('.prompt') !== null")
            # The prompt is shown as it is, never as markup.
            assert await page.text(".prompt") == prompt
            assert await page.run("document.querySelectorAll('.prompt b').length") == 0
            tiers = await page.run(
                "[...document.querySelectorAll('.page')].map((one) => one.dataset.tier)"
            )
            assert tiers[0] == "anchor" and tiers[-1] == "computed"
            assert set(tiers) >= {"anchor", "stale", "computed"}
            told = await page.text("#probe-result p")
            assert re.match(r"\d+ of \d+ tokens are cached, in \d+ nodes of the tree", told)
            assert "hit" in await page.run("document.querySelector('.page').title")
            await page.run("document.getElementById('probe-text').value = 'x'.repeat(5000)")
            await page.run("document.querySelector('#probe button').click()")
            await page.until("document.querySelector('#probe-result .error') !== null")
            assert "tokens" in await page.text("#probe-result")
            page.errors.clear()  # the browser reports the 400 itself

    visit(work)


def test_running_requests_are_listed(fake: RunningServer) -> None:
    body = {"text": "abcsecret", "rid": "slow-page", "stream": True}
    body["sampling_params"] = {"max_new_tokens": 200}

    def stream(stop: threading.Event) -> None:
        with fake.generate(body, stream=True) as reply:
            for _ in reply.iter_lines():
                if stop.is_set():
                    return

    async def work() -> None:
        stop = threading.Event()
        thread = threading.Thread(target=stream, args=(stop,))
        thread.start()
        try:
            async with opened(fake) as page:
                rows = "document.getElementById('requests').textContent"
                await page.until(f"{rows}.includes('slow-page')")
                assert "secret" not in await page.run("document.body.textContent")
        finally:
            stop.set()
            thread.join()

    visit(work)


def test_tree_of_50_000_nodes_stays_usable(fake: RunningServer) -> None:
    async def work() -> None:
        async with opened(fake) as page:
            assert "50,000 nodes" in await page.text("#tree-about")
            sizes: list[int] = await page.run(
                "performance.getEntriesByType('resource')"
                ".filter((one) => one.name.includes('/api/tree')).map((one) => one.decodedBodySize)"
            )
            assert sizes and max(sizes) < 500_000
            crumbs = "document.querySelectorAll('#crumbs li').length"
            # A branch, what is put together in it, and so on down to single leaves.
            await page.click(*await place(page, 60, 80))
            await page.until(f"{crumbs} === 2")
            for _ in range(4):
                before = await page.text("#crumbs")
                await page.click(*await place(page, 60, 80))
                changed = f"document.getElementById('crumbs').textContent !== {before!r}"
                await page.until(changed)
                if "Small nodes" not in await page.text("#crumbs"):
                    break
            assert "tokens 192 – 224" in await page.text("#crumbs")

    visit(work)


def test_phone(forked: RunningServer, tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(forked, 390, 844) as page:
            assert await page.run(OVERFLOW) <= 0
            await page.scheme("dark")
            heights: list[float] = await page.run(
                "[...document.querySelectorAll('header button, #probe .primary')]"
                ".map((one) => one.getBoundingClientRect().height)"
            )
            assert min(heights) >= 40  # for a finger
            await page.screenshot(tmp_path / "phone.png", full=True)

    visit(work)


def test_key_is_asked_for_and_a_lost_server_shown(scripted: RunningServer) -> None:
    async def type_key(page: Page, key: str) -> None:
        await page.until("document.getElementById('key-dialog').open")
        await page.run(f"document.getElementById('key').value = {key!r}")
        await page.run("document.querySelector('#key-form button').click()")

    async def work() -> None:
        assert CHROMIUM is not None
        async with chromium(CHROMIUM) as page:
            await page.open(f"{scripted.url}/dashboard")
            await type_key(page, "wrong")
            await page.until(
                "document.getElementById('key-why').textContent.includes('does not know')"
            )
            await type_key(page, "sesame")
            await page.until(LIVE)
            assert "sesame" not in await page.run("document.documentElement.outerHTML")
            await page.offline(True)
            await page.until("document.getElementById('link').dataset.state === 'lost'")
            assert "trying again" in await page.text("#link-text")
            await page.offline(False)
            await page.until(LIVE)

    visit(work)


def test_nothing_inline_runs(fake: RunningServer) -> None:
    """The policy of the page is in force: an injected script does nothing."""

    async def work() -> None:
        async with opened(fake) as page:
            result: Any = await page.run(
                "(() => { const s = document.createElement('script');"
                "s.textContent = 'window.bad = 1'; document.body.append(s);"
                "return window.bad ?? null; })()"
            )
            assert result is None
            page.errors.clear()  # the browser reports the refusal

    visit(work)

// Polls the server and fills the page.

import { ApiError, call } from "./api.js";
import { themeChanged } from "./canvas.js";
import { Chart } from "./chart.js";
import { bytes, count, decimal, plural, seconds, share } from "./format.js";
import { refreshTree } from "./tree.js";
import "./probe.js";

const POLL = 2000;
const SLOWEST = 15000;
const KEPT = 900;

let samples = [];
let paused = false;

const place = document.getElementById("charts");
const charts = [
  new Chart(place, {
    title: "Bytes", stacked: true, tall: true, format: bytes,
    series: ["anchor", "stale", "recent"].map((tier) => ({
      name: tier, colour: tier, value: (sample) => sample.bytes[tier],
    })),
  }),
  new Chart(place, {
    title: "Hit rate", top: 1, format: share,
    series: [{ name: "cached share of prompts", colour: "series-a", value: (sample) => sample.hit_rate }],
  }),
  new Chart(place, {
    title: "Requests", format: decimal,
    series: [
      { name: "running", colour: "series-a", value: (sample) => sample.running },
      { name: "waiting", colour: "series-b", value: (sample) => sample.waiting },
    ],
  }),
  new Chart(place, {
    title: "Time to first token", format: seconds,
    series: [
      { name: "median", colour: "series-a", value: (sample) => sample.ttft.p50 },
      { name: "p95", colour: "series-b", value: (sample) => sample.ttft.p95 },
    ],
  }),
  new Chart(place, {
    title: "Time per token", format: seconds,
    series: [
      { name: "median", colour: "series-a", value: (sample) => sample.tpot.p50 },
      { name: "p95", colour: "series-b", value: (sample) => sample.tpot.p95 },
    ],
  }),
  new Chart(place, {
    title: "Tokens per second", format: decimal, axis: true,
    series: [
      { name: "out", colour: "series-a", value: (sample) => sample.generated },
      { name: "in, computed", colour: "series-b", value: (sample) => sample.computed },
    ],
  }),
];

function set(id, text) {
  document.getElementById(id).textContent = text;
}

function link(state, text) {
  document.getElementById("link").dataset.state = state;
  set("link-text", text);
}

function tiles(state) {
  const now = samples.at(-1);
  const { cache, statistics } = state;
  if (!now || !cache) return;
  set("t-requests", count(now.running));
  set("t-requests-sub", `running; ${count(now.waiting)} waiting`);
  set("t-hit", share(statistics.cache_hit_rate));
  set("t-hit-sub", `${count(statistics.cached_tokens)} of ${count(statistics.prompt_tokens)}`);
  set("t-ttft", seconds(now.ttft.p50));
  set("t-ttft-sub", now.ttft.requests ? `median; p95 ${seconds(now.ttft.p95)}` : "none in the last minute");
  set("t-tpot", seconds(now.tpot.p50));
  set("t-tpot-sub", now.tpot.requests ? `median; p95 ${seconds(now.tpot.p95)}` : "none in the last minute");
  set("t-speed", decimal(now.generated));
  set("t-speed-sub", `in, computed: ${decimal(now.computed)}`);
  const used = Object.values(cache.tiers).reduce((sum, tier) => sum + tier.bytes, 0);
  const ratio = cache.compression_vs_bf16;
  set("t-kv", bytes(used));
  set("t-kv-title", `KV pages, of ${bytes(cache.arena_bytes)}`);
  set("t-kv-sub", ratio ? `${ratio.toFixed(2)}x under BF16` : "nothing is cached");
  const alone = statistics.kv_read_bytes_per_request;
  set("t-reads", share(alone ? 1 - statistics.kv_read_bytes / alone : null));
}

function about(state) {
  const server = state.server;
  if (!server) return;
  const name = state.model.split("/").at(-1);
  const up = seconds(state.time - state.started);
  set("about", `${name} on ${server.device}, ${server.dtype}; KV ${server.kv_profile} (${server.kv_kinds.join(", ")}), `
    + `pages of ${server.page_size} tokens, context ${count(server.context_length)}; up ${up}`);
}

function requests(state) {
  const shown = state.requests;
  set("requests-about", state.num_requests === 0 ? "none now" : plural(state.num_requests, "request")
    + (shown.length < state.num_requests ? `, the oldest ${shown.length} shown` : ""));
  document.getElementById("requests").replaceChildren(...shown.map((request) => {
    const row = document.createElement("tr");
    const cells = [request.rid, request.phase, count(request.prompt_tokens), count(request.cached_tokens),
      count(request.completion_tokens), decimal(request.seconds)];
    for (const text of cells) row.insertCell().textContent = text;
    return row;
  }));
}

async function poll() {
  const state = await call(`state?since=${samples.at(-1)?.time ?? 0}`);
  // After a restart of the server the old samples are another one's.
  if (samples.length > 0 && state.started > samples.at(-1).time) samples = [];
  samples = [...samples, ...state.samples].slice(-KEPT);
  about(state);
  tiles(state);
  requests(state);
  for (const chart of charts) chart.update(samples, state.time);
  try {
    await refreshTree();
  } catch (error) {
    if (!(error instanceof ApiError && error.status === 404)) throw error;
    set("tree-about", error.message);
  }
}

async function run() {
  let wait = POLL;
  for (;;) {
    if (!paused && !document.hidden) {
      try {
        await poll();
        wait = POLL;
        if (!paused) link("live", "live");
      } catch (error) {
        const why = error instanceof ApiError ? error.message : "the server does not answer";
        wait = Math.min(2 * wait, SLOWEST);
        link("lost", `${why}; trying again`);
      }
    }
    await new Promise((resolve) => { setTimeout(resolve, wait); });
  }
}

const pause = document.getElementById("pause");
pause.addEventListener("click", () => {
  paused = !paused;
  pause.setAttribute("aria-pressed", String(paused));
  link(paused ? "paused" : "live", paused ? "paused" : "live");
});

const LABELS = { system: "Auto", light: "Light", dark: "Dark" };
const THEMES = Object.keys(LABELS);
const theme = document.getElementById("theme");

function useTheme(name) {
  theme.textContent = LABELS[name];
  theme.setAttribute("aria-label", `Theme: ${LABELS[name]}`);
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  themeChanged();
}

theme.addEventListener("click", () => {
  const stored = localStorage.getItem("sglang_minima.theme") ?? "system";
  const next = THEMES[(THEMES.indexOf(stored) + 1) % THEMES.length];
  localStorage.setItem("sglang_minima.theme", next);
  useTheme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);
useTheme(localStorage.getItem("sglang_minima.theme") ?? "system");
run();

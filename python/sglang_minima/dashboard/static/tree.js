// The radix tree on a canvas: zoom, colours, details, and the same as a table.

import { call } from "./api.js";
import { colour, drawOn, inkOn, mix } from "./canvas.js";
import { bytes, count, plural, seconds } from "./format.js";
import { ROW, blockAt, layOut, neighbour, sizeOf } from "./icicle.js";

const TIERS = ["recent", "anchor", "stale"];
// Pages of a prefix lie in this order: sinks first, the latest last.
const ORDER = [1, 2, 0];
const TABLE_ROWS = 15;
const LEGENDS = {
  tier: [["anchor", "anchor (first pages)"], ["stale", "stale (compressed)"], ["recent", "recent"], ["rest", "small nodes put together"]],
  hits: [["low", "no hit"], ["high", "most hits"], ["rest", "small nodes put together"]],
  idle: [["high", "used just now"], ["low", "longest unused"], ["rest", "small nodes put together"]],
};

const canvas = document.getElementById("tree");
const details = document.getElementById("tree-details");
const said = document.getElementById("tree-said");
let tree = null;
let blocks = [];
let selected = null;
let hovered = null;
let mode = "tier";
let focus = { id: "root", children: null };
let marked = new Set();
let scale = { hits: 1, idle: 1 };

const repaint = drawOn(canvas, paint);

function paint(context, width, height) {
  if (!tree) return;
  blocks = layOut(tree, width, height);
  const again = (old) => old && (blocks.find((block) => key(block) === key(old)) ?? null);
  [hovered, selected] = [again(hovered), again(selected)];
  scale = {
    hits: Math.max(1, ...tree.nodes.map((node) => node.hits)),
    idle: Math.max(1, ...tree.nodes.map((node) => node.idle)),
  };
  if (tree.nodes[0].nodes === 0) {
    context.fillStyle = colour("soft");
    context.font = "14px system-ui, sans-serif";
    context.textAlign = "center";
    context.fillText("No prefix is cached yet: send a request.", width / 2, height / 2);
    return;
  }
  const tied = (block, other) => other && key(block) === key(other);
  for (const block of blocks) {
    fill(context, block);
    const strong = tied(block, hovered ?? selected);
    const onPath = block.node && marked.has(block.node.id);
    if (strong || onPath) {
      context.strokeStyle = colour(strong ? "text" : "accent");
      context.lineWidth = 2;
      context.strokeRect(block.x + 1, block.y + 1, Math.max(block.width - 3, 1), block.height - 4);
    }
  }
}

function fill(context, block) {
  const { x, y, node } = block;
  const width = Math.max(block.width - 1, 0.6);
  const high = block.height - 2;
  if (!node) {
    context.globalAlpha = 0.4;
    if (mode === "tier") stripes(context, block.rest.pages, x, y, width, high);
    context.globalAlpha = 1;
    context.fillStyle = hatch(context);
    context.fillRect(x, y, width, high);
    label(context, block, [`+${count(block.rest.nodes)}`], colour("text"));
    return;
  }
  let ink = colour("text");
  const own = total(node.own);
  if (own === 0) {
    context.fillStyle = mix(colour("card"), colour("text"), 0.1);
    context.fillRect(x, y, width, high);
  } else if (mode === "tier") {
    stripes(context, node.own, x, y, width, high);
    ink = inkOn(colour(TIERS[ORDER.reduce((a, b) => (node.own[b] > node.own[a] ? b : a))]));
  } else {
    const amount = mode === "hits"
      ? Math.log1p(node.hits) / Math.log1p(scale.hits)
      : 1 - Math.log1p(node.idle) / Math.log1p(scale.idle);
    context.fillStyle = mix(colour("low"), colour("high"), amount);
    ink = inkOn(context.fillStyle);
    context.fillRect(x, y, width, high);
  }
  if (node.locked) {
    context.fillStyle = ink;
    context.fillRect(x, y + high - 3, width, 3);
  }
  label(context, block, texts(node, own), ink);
}

function stripes(context, pages, x, y, width, height) {
  const all = total(pages);
  for (const tier of ORDER) {
    const part = width * pages[tier] / all;
    context.fillStyle = colour(TIERS[tier]);
    context.fillRect(x, y, part, height);
    x += part;
  }
}

function texts(node, own) {
  if (own === 0) return [name(node), plural(node.nodes, "node")];
  return [`${count(own * tree.page_size)} tok`, node.hits ? plural(node.hits, "hit") : ""];
}

function label(context, block, lines, ink) {
  if (block.width < 26) return;
  context.fillStyle = ink;
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.font = "11px system-ui, sans-serif";
  const room = block.width - 8;
  const shown = lines.filter((line) => line && context.measureText(line).width <= room);
  shown.forEach((line, i) => {
    const y = block.y + block.height / 2 - 1 + (shown.length === 1 ? 0 : 14 * i - 7);
    context.fillText(line, block.x + 4, y);
  });
}

function hatch(context) {
  const tile = document.createElement("canvas");
  [tile.width, tile.height] = [6, 6];
  const draw = tile.getContext("2d");
  draw.strokeStyle = colour("free");
  draw.lineWidth = 2;
  for (const shift of [-6, 0, 6]) {
    draw.beginPath();
    draw.moveTo(shift, 6);
    draw.lineTo(shift + 6, 0);
    draw.stroke();
  }
  return context.createPattern(tile, "repeat");
}

function key(block) {
  return block.node ? block.node.id : `${block.above.node.id} from ${block.rest.from}`;
}

function name(node) {
  if (node.range) return `Small nodes ${count(node.range[0] + 1)} – ${count(node.range[1])}`;
  if (node.id === "root") return "Whole cache";
  if (node.namespace) return node.namespace.name + (node.namespace.lora ? ` (${node.namespace.lora})` : "");
  return `${count(node.start)} – ${count(node.start + total(node.own) * tree.page_size)}`;
}

function total(pages) {
  return pages.reduce((sum, n) => sum + n, 0);
}

function tiersText(pages) {
  const parts = ORDER.filter((tier) => pages[tier] > 0).map((tier) => `${count(pages[tier])} ${TIERS[tier]}`);
  return parts.length > 0 ? parts.join(", ") : "none";
}

function describe(block) {
  if (!block) return "";
  const size = bytes(block.size);
  if (!block.node) {
    return `${plural(block.rest.nodes, "small node")} put together: ${size}; pages: ${tiersText(block.rest.pages)}.`;
  }
  const node = block.node;
  const below = `${plural(node.nodes, "node")}, ${size} with all below`;
  if (total(node.own) === 0) return `${name(node)}: ${below}; pages: ${tiersText(node.below)}.`;
  return `Tokens ${name(node)}: ${plural(total(node.own), "page")} (${tiersText(node.own)}), ${plural(node.hits, "hit")}, `
    + `last used ${seconds(node.idle)} ago${node.locked ? ", in use now" : ""}; `
    + `${plural(node.children, "child").replace("childs", "children")}; ${below}.`;
}

function tell() {
  details.textContent = describe(hovered ?? selected ?? blocks[0]);
}

function crumbs() {
  const list = document.getElementById("crumbs");
  const path = tree.nodes[0].range ? [...tree.path, tree.nodes[0]] : tree.path;
  list.replaceChildren(...path.map((node, i) => {
    const item = document.createElement("li");
    const last = i === path.length - 1;
    const text = total(node.own) > 0 ? `tokens ${name(node)}` : name(node);
    if (last) {
      item.textContent = text;
      item.setAttribute("aria-current", "location");
    } else {
      item.append(button(text, () => zoom(node.id)));
    }
    return item;
  }));
}

function button(text, action) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = "plain";
  made.textContent = text;
  made.addEventListener("click", action);
  return made;
}

function table() {
  const rows = [...tree.nodes].slice(1)
    .sort((a, b) => sizeOf(b.below, tree.tier_page_bytes) - sizeOf(a.below, tree.tier_page_bytes))
    .slice(0, TABLE_ROWS);
  const body = document.getElementById("tree-rows");
  body.replaceChildren(...rows.map((node) => {
    const row = document.createElement("tr");
    const cells = [name(node), tiersText(node.own), plural(node.nodes, "node"),
      bytes(sizeOf(node.below, tree.tier_page_bytes)), count(node.hits), `${seconds(node.idle)} ago`];
    for (const text of cells) row.insertCell().textContent = text;
    const link = button("zoom in", () => zoom(node.id));
    link.setAttribute("aria-label", `zoom into ${name(node)}`);
    row.insertCell().append(link);
    return row;
  }));
}

function legend() {
  document.getElementById("tree-legend").replaceChildren(...LEGENDS[mode].map(([swatch, text]) => {
    const item = document.createElement("li");
    const mark = document.createElement("i");
    mark.className = `swatch ${swatch}`;
    item.append(mark, text);
    return item;
  }));
}

async function zoom(id, children = null) {
  focus = { id, children };
  hovered = selected = null;
  await refreshTree();
}

function enter(block) {
  if (!block) return;
  if (!block.node) {
    zoom(block.above.node.id, [block.rest.from, block.rest.to]);
  } else if (block === blocks[0] && block.node.range) {
    zoom(block.node.id);
  } else if (block === blocks[0]) {
    const above = tree.path.at(-2);
    if (above) zoom(above.id);
  } else {
    zoom(block.node.id);
  }
}

export async function refreshTree() {
  const { width, height } = canvas.getBoundingClientRect();
  const depth = Math.max(1, Math.floor(height / ROW) - 1);
  // About one block for every three pixels of width is more than an eye can tell apart.
  const limit = Math.round(Math.min(2000, Math.max(200, width)));
  const asked = focus;
  const part = asked.children ? `&first=${asked.children[0]}&end=${asked.children[1]}` : "";
  const answer = await call(`tree?focus=${encodeURIComponent(asked.id)}&depth=${depth}&limit=${limit}${part}`);
  if (asked !== focus) return;
  if (!answer.found) focus = { id: "root", children: null };
  tree = answer;
  const unseen = tree.unseen_pages > 0 ? `, ${plural(tree.unseen_pages, "page")} not surveyed` : "";
  document.getElementById("tree-about").textContent =
    `${plural(tree.total_nodes, "node")}${unseen}; ${tree.age < 1 ? "as it is now" : `as it was ${seconds(tree.age)} ago`}`;
  repaint();
  canvas.setAttribute("aria-label", `Radix tree: ${describe(blocks[0])}`);
  crumbs();
  table();
  tell();
}

// Outlines the nodes on the path of a prompt, and shows the tree from its root.
export function markPath(ids) {
  marked = new Set(ids);
  zoom("root");
}

canvas.addEventListener("pointermove", (event) => {
  if (event.pointerType === "touch") return;
  hovered = blockAt(blocks, event.offsetX, event.offsetY);
  repaint();
  tell();
});
canvas.addEventListener("pointerleave", () => {
  hovered = null;
  repaint();
  tell();
});
canvas.addEventListener("click", (event) => enter(blockAt(blocks, event.offsetX, event.offsetY)));
canvas.addEventListener("keydown", (event) => {
  if (blocks.length === 0 || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key.startsWith("Arrow")) {
    selected = selected ? neighbour(blocks, selected, event.key) : blocks[0];
  } else if (event.key === "Enter") {
    if (selected && selected !== blocks[0]) enter(selected);
  } else if (event.key === "Backspace" || event.key === "Escape") {
    enter(blocks[0]);
  } else {
    return;
  }
  event.preventDefault();
  hovered = null;
  repaint();
  tell();
  // Read out when a key was pressed, not whenever the numbers change.
  said.textContent = details.textContent;
});
for (const input of document.querySelectorAll('input[name="mode"]')) {
  input.addEventListener("change", () => {
    mode = input.value;
    legend();
    repaint();
  });
}
legend();

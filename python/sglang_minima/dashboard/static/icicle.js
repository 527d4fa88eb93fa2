// Where the blocks of the tree lie: rows of depth, widths of bytes. No drawing here.

export const ROW = 34; // the least height of a row
const TALL = 54;
const BUNDLE = 40; // pixels of a run of children that are put together
const THIN = 3; // pixels: thinner blocks are put together

export function sizeOf(pages, pageBytes) {
  return pages.reduce((sum, n, tier) => sum + n * pageBytes[tier], 0);
}

// Blocks {x, y, width, height, node (or null for a rest), rest, above (block), size}, parents first.
// A rest is a run of children, by rank of size: {from, to, nodes, pages}.
export function layOut(tree, width, height) {
  const { nodes, tier_page_bytes: pageBytes } = tree;
  const children = nodes.map(() => []);
  nodes.forEach((node, i) => { if (node.parent >= 0) children[node.parent].push(i); });
  const blocks = [];
  const levels = [];
  nodes.forEach((node, i) => { levels[i] = node.parent < 0 ? 1 : levels[node.parent] + 1; });
  const most = Math.max(1, Math.floor((height + 1) / ROW));
  const rows = Math.min(Math.max(...levels) + 1, most);
  const high = Math.min(Math.floor((height + 1) / rows), TALL);
  const waiting = [{ index: 0, x: 0, width, row: 0, above: null }];
  while (waiting.length > 0) {
    const { index, x, width: wide, row, above } = waiting.shift();
    const node = nodes[index];
    const total = sizeOf(node.below, pageBytes);
    const block = { x, y: row * high, width: wide, height: high, node, rest: null, above, size: total };
    blocks.push(block);
    if (row + 1 >= rows || total === 0) continue;
    let at = x;
    let rank = node.range?.[0] ?? 0;
    const rests = [];
    for (const child of children[index]) {
      const { below, nodes: count } = nodes[child];
      const part = wide * sizeOf(below, pageBytes) / total;
      // Children come largest first: after a thin one all are.
      if (part >= THIN && rests.length === 0) {
        waiting.push({ index: child, x: at, width: part, row: row + 1, above: block });
        at += part;
      } else {
        rests.push({ from: rank, to: rank + 1, nodes: count, pages: below });
      }
      rank += 1;
    }
    rests.push(...node.rest ?? []);
    for (const rest of bundle(rests, wide / total, pageBytes)) {
      const size = sizeOf(rest.pages, pageBytes);
      const place = { x: at, y: (row + 1) * high, width: wide * size / total, height: high };
      blocks.push({ ...place, node: null, rest, above: block, size });
      at += place.width;
    }
  }
  return blocks;
}

// Puts neighbouring runs together until each is wide enough to be pointed at.
function bundle(rests, pixelsPerByte, pageBytes) {
  const bundles = [];
  let open = false;
  for (const rest of rests) {
    if (open) {
      const last = bundles.at(-1);
      bundles[bundles.length - 1] = {
        from: last.from, to: rest.to, nodes: last.nodes + rest.nodes,
        pages: last.pages.map((n, tier) => n + rest.pages[tier]),
      };
    } else {
      bundles.push(rest);
    }
    open = sizeOf(bundles.at(-1).pages, pageBytes) * pixelsPerByte < BUNDLE;
  }
  return bundles.filter((one) => sizeOf(one.pages, pageBytes) > 0);
}

export function blockAt(blocks, x, y) {
  return blocks.find((block) =>
    x >= block.x && x < block.x + block.width && y >= block.y && y < block.y + block.height - 1) ?? null;
}

// The block that an arrow key leads to from `from`.
export function neighbour(blocks, from, key) {
  if (key === "ArrowUp") return from.above ?? from;
  if (key === "ArrowDown") return blocks.find((block) => block.above === from) ?? from;
  const row = blocks.filter((block) => block.y === from.y).sort((a, b) => a.x - b.x);
  const next = row[row.indexOf(from) + (key === "ArrowRight" ? 1 : -1)];
  return next ?? from;
}

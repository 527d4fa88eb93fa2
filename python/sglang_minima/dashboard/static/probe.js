// The path of one prompt: what of it is cached, page by page.

import { ApiError, call } from "./api.js";
import { count, plural } from "./format.js";
import { markPath } from "./tree.js";

const NAMES = {
  anchor: "from anchor pages", stale: "from stale pages", recent: "from recent pages",
  copied: "copied from a page that it shares in part", computed: "to be computed",
};

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// One entry a page: {text, tokens, state, title}.
function pagesOf(found) {
  return found.texts.map((text, i) => {
    const tokens = Math.min(found.page_size, found.tokens - i * found.page_size);
    const range = `tokens ${count(i * found.page_size)} – ${count(i * found.page_size + tokens)}`;
    const page = found.pages[i];
    if (page) {
      const use = page.locked ? ", in use now" : "";
      return { text, tokens, state: page.tier, title: `${range}: ${page.tier}, ${page.kind}, ${plural(page.hits, "hit")}${use}` };
    }
    if (i === found.pages.length && found.copied_tokens > 0) {
      return { text, tokens, state: "copied", title: `${range}: the first ${plural(found.copied_tokens, "token")} copied, the rest computed` };
    }
    return { text, tokens, state: "computed", title: `${range}: to be computed` };
  });
}

function sums(found, pages) {
  const totals = { anchor: 0, stale: 0, recent: 0, copied: found.copied_tokens, computed: 0 };
  for (const page of pages) {
    if (page.state === "copied") totals.computed += page.tokens - found.copied_tokens;
    else totals[page.state] += page.tokens;
  }
  return totals;
}

function show(found, result) {
  const pages = pagesOf(found);
  const totals = sums(found, pages);
  const cached = found.tokens - totals.computed;
  const head = element("p");
  head.append(element("b", "", `${count(cached)} of ${plural(found.tokens, "token")} are cached`));
  head.append(cached > 0 ? `, in ${plural(found.path.length - 1, "node")} of the tree.` : ".");
  const stack = element("div", "stack");
  stack.setAttribute("aria-hidden", "true");
  const legend = element("ul", "legend");
  for (const [state, tokens] of Object.entries(totals)) {
    if (tokens === 0) continue;
    const part = element("span", state);
    part.style.flexGrow = String(tokens);
    stack.append(part);
    const item = element("li");
    item.append(element("i", `swatch ${state}`), `${count(tokens)} ${NAMES[state]}`);
    legend.append(item);
  }
  const text = element("div", "prompt");
  text.tabIndex = 0;
  text.setAttribute("aria-label", "The prompt, page by page");
  text.setAttribute("role", "region");
  text.append(...pages.map((page) => {
    const part = element("span", "page", page.text);
    part.dataset.tier = page.state;
    part.title = page.title;
    return part;
  }));
  result.replaceChildren(head, stack, legend, text, table(pages));
  markPath(found.path);
}

// The same as text: runs of pages that are alike.
function table(pages) {
  const box = element("details", "table");
  box.append(element("summary", "", "Page by page as a list"));
  const list = element("ol", "runs");
  for (const page of pages) list.append(element("li", "", page.title));
  box.append(list);
  return box;
}

document.getElementById("probe").addEventListener("submit", async (event) => {
  event.preventDefault();
  const result = document.getElementById("probe-result");
  const submit = event.target.querySelector("button[type=submit]");
  const salt = document.getElementById("probe-salt").value;
  submit.disabled = true;
  try {
    show(await call("probe", {
      text: document.getElementById("probe-text").value,
      chat: document.getElementById("probe-chat").checked,
      cache_salt: salt === "" ? null : salt,
    }), result);
  } catch (error) {
    const why = error instanceof ApiError ? error.message : "the server does not answer";
    result.replaceChildren(element("p", "error", `That did not work: ${why}.`));
  } finally {
    submit.disabled = false;
  }
});

// A canvas that is sharp on every screen, and colours of the current theme.

const repaints = new Set();
let palette = {};

function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const names = ["card", "line", "text", "soft", "accent", "recent", "anchor", "stale", "free",
    "series-a", "series-b", "low", "high"];
  palette = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

export function colour(name) {
  return palette[name];
}

// Calls paint(context, width, height) now and whenever size or theme change; returns a repaint.
export function drawOn(canvas, paint) {
  function repaint() {
    const { width, height } = canvas.getBoundingClientRect();
    if (width === 0) return;
    const ratio = window.devicePixelRatio || 1;
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    paint(context, width, height);
  }
  repaints.add(repaint);
  new ResizeObserver(repaint).observe(canvas);
  return repaint;
}

export function themeChanged() {
  readPalette();
  for (const repaint of repaints) repaint();
}

// "#rrggbb" of a mixture: 0 is `from`, 1 is `to`.
export function mix(from, to, amount) {
  const part = (text, at) => parseInt(text.slice(at, at + 2), 16);
  return `#${[1, 3, 5].map((at) =>
    Math.round(part(from, at) + (part(to, at) - part(from, at)) * amount).toString(16).padStart(2, "0")
  ).join("")}`;
}

// Black or white, whichever reads better on the colour.
export function inkOn(background) {
  const [r, g, b] = [1, 3, 5].map((at) => (parseInt(background.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#10151a" : "#ffffff";
}

// Small time charts: lines or stacked areas over half an hour at most, with the value under the pointer.

import { colour, drawOn } from "./canvas.js";

const SPANS = [120, 300, 600, 1200, 1800];
const GAP = 8; // seconds without a sample: the line is interrupted

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export class Chart {
  // series: [{name, colour (of the palette), value(sample) -> number or null}]
  constructor(parent, { title, series, format, stacked = false, top = null, tall = false, axis = false }) {
    Object.assign(this, { title, series, format, stacked, top, axis });
    this.samples = [];
    this.span = SPANS[0];
    this.at = null;
    const box = element("div", `chart${tall ? " tall" : ""}${axis ? " axis" : ""}`);
    const head = element("div", "head");
    head.append(element("b", "", title));
    const legend = element("span", "legend");
    this.labels = series.map((one) => {
      const item = element("span");
      item.append(element("i", `swatch ${one.colour}`), " ", one.name, " ");
      const value = element("span");
      item.append(value);
      legend.append(item);
      return value;
    });
    head.append(legend);
    this.canvas = element("canvas");
    this.canvas.setAttribute("role", "img");
    box.append(head, this.canvas);
    parent.append(box);
    this.repaint = drawOn(this.canvas, (context, width, height) => this.paint(context, width, height));
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
  }

  update(samples, now) {
    this.samples = samples;
    this.now = now;
    const known = now - (samples[0]?.time ?? now);
    this.span = SPANS.find((span) => span >= known) ?? SPANS.at(-1);
    this.repaint();
    this.tell();
  }

  point(x) {
    this.at = x;
    this.repaint();
    this.tell();
  }

  nearest() {
    if (this.samples.length === 0) return null;
    if (this.at === null) return this.samples.at(-1);
    const time = this.now - this.span * (1 - this.at / this.canvas.clientWidth);
    return this.samples.reduce((best, sample) =>
      Math.abs(sample.time - time) < Math.abs(best.time - time) ? sample : best);
  }

  tell() {
    const sample = this.nearest();
    if (!sample) return;
    const texts = this.series.map((one) => this.text(one.value(sample)));
    this.labels.forEach((label, i) => { label.textContent = texts[i]; });
    const spoken = this.series.map((one, i) => `${one.name} ${texts[i]}`).join(", ");
    this.canvas.setAttribute("aria-label", `${this.title}, latest: ${spoken}`);
  }

  text(value) {
    return value === null || value === undefined ? "–" : this.format(value);
  }

  paint(context, width, height) {
    const bottom = height - (this.axis ? 14 : 2);
    const values = this.samples.map((sample) => this.series.map((one) => one.value(sample) ?? null));
    const peak = Math.max(0, ...values.map((row) =>
      this.stacked ? row.reduce((sum, value) => sum + (value ?? 0), 0) : Math.max(...row.map((v) => v ?? 0))));
    const top = this.top ?? (peak > 0 ? 1.08 * peak : 1);
    const x = (time) => width * (1 - (this.now - time) / this.span);
    const y = (value) => bottom - (bottom - 3) * Math.min(value / top, 1);
    context.strokeStyle = colour("line");
    context.fillStyle = colour("soft");
    context.lineWidth = 1;
    context.font = "10px system-ui, sans-serif";
    for (const line of [0, top / 2, top]) {
      context.beginPath();
      context.moveTo(0, Math.round(y(line)) + 0.5);
      context.lineTo(width, Math.round(y(line)) + 0.5);
      context.stroke();
    }
    if (this.axis) this.times(context, width, height);
    if (this.stacked) this.areas(context, values, x, y);
    else this.lines(context, values, x, y);
    if (peak > 0 || this.top !== null) {
      context.textAlign = "left";
      context.textBaseline = "top";
      context.fillStyle = colour("soft");
      context.fillText(this.text(top), 2, 5);
    }
    const sample = this.at === null ? null : this.nearest();
    if (sample) {
      context.strokeStyle = colour("soft");
      context.beginPath();
      context.moveTo(x(sample.time), 0);
      context.lineTo(x(sample.time), bottom);
      context.stroke();
    }
  }

  times(context, width, height) {
    context.textBaseline = "alphabetic";
    for (const [align, x, part] of [["left", 0, 1], ["center", width / 2, 0.5], ["right", width, 0]]) {
      context.textAlign = align;
      context.fillText(part ? `${part * this.span / 60} min ago` : "now", x, height - 2);
    }
  }

  runs() {
    const runs = [];
    this.samples.forEach((sample, i) => {
      if (i === 0 || sample.time - this.samples[i - 1].time > GAP) runs.push([]);
      runs.at(-1).push(i);
    });
    return runs;
  }

  areas(context, values, x, y) {
    for (const run of this.runs()) {
      let below = run.map(() => 0);
      this.series.forEach((one, k) => {
        const above = run.map((i, n) => below[n] + (values[i][k] ?? 0));
        context.beginPath();
        run.forEach((i, n) => context.lineTo(x(this.samples[i].time), y(above[n])));
        for (let n = run.length - 1; n >= 0; n -= 1) context.lineTo(x(this.samples[run[n]].time), y(below[n]));
        context.fillStyle = colour(one.colour);
        context.fill();
        below = above;
      });
    }
  }

  lines(context, values, x, y) {
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    this.series.forEach((one, k) => {
      context.strokeStyle = colour(one.colour);
      context.fillStyle = colour(one.colour);
      for (const run of this.runs()) {
        let open = false;
        context.beginPath();
        run.forEach((i) => {
          const value = values[i][k];
          if (value === null) {
            open = false;
          } else {
            const [px, py] = [x(this.samples[i].time), y(value)];
            // A value without neighbours is a dot.
            if (!open) context.moveTo(px - 1, py);
            context.lineTo(px, py);
            open = true;
          }
        });
        context.stroke();
      }
    });
    context.lineWidth = 1;
  }
}

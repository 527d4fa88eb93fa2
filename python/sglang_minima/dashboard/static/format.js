// Numbers and times as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function count(value) {
  return whole.format(value);
}

export function decimal(value) {
  return value >= 100 || Number.isInteger(value) ? whole.format(value) : one.format(value);
}

export function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? whole.format(value) : decimal(value)} ${UNITS[unit]}`;
}

export function share(value) {
  return value === null || value === undefined ? "–" : `${decimal(100 * value)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${decimal(1000 * value)} ms`;
  if (value < 120) return `${one.format(value)} s`;
  if (value < 7200) return `${whole.format(value / 60)} min`;
  return `${whole.format(value / 3600)} h`;
}

export function plural(value, word) {
  return `${count(value)} ${word}${value === 1 ? "" : "s"}`;
}

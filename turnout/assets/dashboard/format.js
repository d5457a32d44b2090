// Numbers and elements for people.

export const SIGNIFICANT = 3;

/** 12345 -> "12.3k"; three significant digits. */
export function count(value) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) return `${Number((value / (unit === "k" ? 1e3 : size)).toPrecision(SIGNIFICANT))}${unit}`;
  }
  return value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

/** Seconds with a unit, as [number, unit]; null: nothing was observed. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return ["–", ""];
  return seconds < 1
    ? [String(Number((seconds * 1000).toPrecision(SIGNIFICANT))), "ms"]
    : [String(Number(seconds.toPrecision(SIGNIFICANT))), "s"];
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A stroke of a line's colour, for keys. */
export function mark(tint) {
  const made = element("i");
  made.style.background = `var(--${tint})`;
  return made;
}

/** An element with a class, a text and children. */
export function element(tag, className = "", text = "", ...children) {
  const made = document.createElement(tag);
  made.className = className;
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

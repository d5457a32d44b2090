// The experts of every layer: a cell's colour is its tokens relative to an even spread, in powers of two.

import { colour, count, element, percent } from "./format.js";

const WINDOWS = [["10 s", 10], ["1 min", 60], ["10 min", 600]];
const LIMIT = 2; // powers of two, to both sides of even
// From four times less than even over even to four times more.
const LIGHT = ["#2166ac", "#92c5de", "#f7f4ef", "#f4a582", "#b2182b"];
const DARK = ["#4393c3", "#2b5f85", "#333b45", "#b5583f", "#ff7b5c"];
const dark = matchMedia("(prefers-color-scheme: dark)");

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

/** The colour of tokens relative to even: 0 is nothing at all. */
export function shade(ratio) {
  if (ratio <= 0) return colour("empty");
  const stops = dark.matches ? DARK : LIGHT;
  const at = ((Math.max(-LIMIT, Math.min(LIMIT, Math.log2(ratio))) + LIMIT) / (2 * LIMIT)) * (stops.length - 1);
  const [low, part] = [Math.min(Math.floor(at), stops.length - 2), at - Math.min(Math.floor(at), stops.length - 2)];
  const [a, b] = [channels(stops[low]), channels(stops[low + 1])];
  return `rgb(${a.map((value, i) => Math.round(value + part * (b[i] - value))).join(",")})`;
}

export class HeatMap {
  constructor(root) {
    this.canvas = root.querySelector("#map");
    this.summary = root.querySelector("#experts-summary");
    this.slicesBox = root.querySelector("#slices");
    this.legend = root.querySelector("#legend");
    this.scale = root.querySelector("#scale");
    this.tip = root.querySelector("#tip");
    this.seconds = WINDOWS[1][1];
    this.buttons = WINDOWS.map(([label, seconds]) => {
      const button = element("button", "", label);
      button.addEventListener("click", () => this.choose(seconds));
      root.querySelector("#window").append(button);
      return button;
    });
    root.querySelector("#ticks").append(...["≤ ¼ of even", "½", "even", "2 ×", "≥ 4 ×"].map((text) => element("span", "", text)));
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    new ResizeObserver(() => this.update(this.now)).observe(this.canvas.parentElement);
    dark.addEventListener("change", () => this.draw());
    this.about({ layers: [], experts: 0, slices: 1 });
    this.choose(this.seconds);
  }

  /** The model's MoE layers, how many experts each has, and how many ranks divide them. */
  about({ layers, experts, slices }) {
    [this.layers, this.experts, this.slices, this.seen] = [layers, experts, slices, []];
    this.bars = Array.from({ length: slices }, () => {
      const [text, fill] = [element("span"), element("span", "fill")];
      return { text, fill, box: element("div", "", "", text, fill) };
    });
    this.slicesBox.replaceChildren(...this.bars.map((bar) => bar.box));
    this.slicesBox.hidden = slices < 2 || !layers.length;
    this.canvas.hidden = this.legend.hidden = !layers.length;
    this.update(0);
  }

  /** Tokens since the last second: base64 of uint32 [layer, expert], or null. */
  add(now, encoded) {
    if (encoded) {
      const bytes = Uint8Array.from(atob(encoded), (char) => char.charCodeAt(0));
      const counts = new Uint32Array(bytes.buffer);
      if (counts.length === this.layers.length * this.experts) this.seen.push([now, counts]);
    }
    const longest = WINDOWS.at(-1)[1];
    while (this.seen.length && this.seen[0][0] <= now - longest) this.seen.shift();
    this.update(now);
  }

  choose(seconds) {
    this.seconds = seconds;
    this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", WINDOWS[i][1] === seconds));
    this.update(this.now);
  }

  update(now) {
    this.now = now;
    this.counts = new Float64Array(this.layers.length * this.experts);
    for (const [time, counts] of this.seen) {
      if (time > now - this.seconds) counts.forEach((value, i) => { this.counts[i] += value; });
    }
    this.sums = this.layers.map((_, layer) => this.row(layer).reduce((a, b) => a + b, 0));
    const total = this.sums.reduce((a, b) => a + b, 0);
    const balances = this.layers.map((_, layer) => this.balance(layer)).filter((value) => value !== null);
    const worst = balances.length ? Math.min(...balances) : null;
    this.summary.textContent = total
      ? `${count(total)} token copies; the busiest expert of a layer gets up to ${(1 / worst).toFixed(1)} × even`
      : this.layers.length ? "no tokens in this window" : "known when the ranks are ready";
    const { left, right, width } = this.layout();
    const room = (width - left - right) / this.slices; // for the words about a rank
    const size = this.experts / this.slices;
    const owned = this.bars.map(() => 0);
    this.counts.forEach((value, i) => { owned[Math.floor((i % this.experts) / size)] += value; });
    this.bars.forEach(({ box, text, fill }, slice) => {
      const own = owned[slice];
      const share = percent(total ? own / total : 0);
      box.title = `rank ${slice}: ${share}`;
      text.textContent = room > 80 ? box.title : room > 30 ? share : "";
      fill.style.width = `${total ? (100 * own) / Math.max(...owned) : 0}%`; // the busiest rank's is full
    });
    this.canvas.dataset.total = total;
    this.draw();
  }

  row(layer) {
    return this.counts.subarray(layer * this.experts, (layer + 1) * this.experts);
  }

  /** Mean over maximum of a layer; null without tokens. */
  balance(layer) {
    return this.sums[layer] ? this.sums[layer] / this.experts / Math.max(...this.row(layer)) : null;
  }

  /** Tokens of an expert relative to an even spread over its layer. */
  ratio(layer, expert) {
    return this.sums[layer] ? (this.counts[layer * this.experts + expert] * this.experts) / this.sums[layer] : 0;
  }

  layout() {
    const width = this.canvas.parentElement.clientWidth;
    const narrow = width < 600;
    const [left, right] = narrow ? [24, 0] : [34, 74];
    const height = Math.max(6, Math.min(24, Math.floor(420 / Math.max(1, this.layers.length))));
    const top = height < 12 ? 5 : 0; // half a line of text, which the first row's number needs
    return { width, left, right, top, height, cell: (width - left - right) / Math.max(1, this.experts) };
  }

  draw() {
    if (!this.layers.length) return;
    const { width, left, right, top, height, cell } = this.layout();
    const bottom = top + height * this.layers.length;
    const context = prepare(this.canvas, width, this.layers.length ? bottom + 16 : 0);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const gap = cell > 5 ? 1 : 0;
    const every = Math.ceil(13 / height);
    this.layers.forEach((name, layer) => {
      const y = top + layer * height;
      context.fillStyle = colour("muted");
      context.textAlign = "right";
      if (layer % every === 0) context.fillText(name, left - 6, y + height / 2);
      for (let expert = 0; expert < this.experts; expert++) {
        context.fillStyle = shade(this.ratio(layer, expert));
        context.fillRect(left + expert * cell, y, Math.max(0.5, cell - gap) + (gap ? 0 : 0.5), height - (height > 8 ? 1 : 0));
      }
      if (right) this.drawBalance(context, layer, width - right + 10, y, height, every);
    });
    context.fillStyle = colour("muted");
    context.textAlign = "left";
    if (this.experts) context.fillText("expert 0", left, bottom + 9);
    if (this.experts && right) context.fillText("mean/max", width - right + 10, bottom + 9);
    context.textAlign = "right";
    if (this.experts) context.fillText(String(this.experts - 1), width - right, bottom + 9);
    context.fillStyle = colour("text");
    for (let slice = 1; slice < this.slices; slice++) {
      context.fillRect(left + (slice * this.experts * cell) / this.slices - 1, top, 2, bottom - top);
    }
    this.drawScale();
  }

  drawBalance(context, layer, x, y, height, every) {
    const value = this.balance(layer);
    context.fillStyle = colour("empty");
    context.fillRect(x, y + 1, 30, height - 3);
    if (value === null) return;
    context.fillStyle = colour("blue");
    context.fillRect(x, y + 1, 30 * value, height - 3);
    context.fillStyle = colour("muted");
    context.textAlign = "right";
    if (layer % every === 0) context.fillText(value.toFixed(2), x + 62, y + height / 2);
  }

  drawScale() {
    const width = this.scale.parentElement.clientWidth;
    const context = prepare(this.scale, width, 10);
    for (let x = 0; x < width; x++) {
      context.fillStyle = shade(2 ** ((2 * LIMIT * x) / (width - 1) - LIMIT));
      context.fillRect(x, 0, 1.5, 10);
    }
  }

  point(event) {
    const { left, top, height, cell } = this.layout();
    const box = this.canvas.getBoundingClientRect();
    const [expert, layer] = [Math.floor((event.clientX - box.left - left) / cell), Math.floor((event.clientY - box.top - top) / height)];
    this.tip.hidden = !(expert >= 0 && expert < this.experts && layer >= 0 && layer < this.layers.length);
    if (this.tip.hidden) return;
    const rank = this.slices > 1 ? ` (rank ${Math.floor((expert * this.slices) / this.experts)})` : "";
    this.tip.textContent = `layer ${this.layers[layer]}, expert ${expert}${rank}\n${count(this.counts[layer * this.experts + expert])} tokens, ${this.ratio(layer, expert).toFixed(2)} × even`;
    this.tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 220)}px`;
    this.tip.style.top = `${event.clientY + 14}px`;
  }
}

/** A canvas of this size in CSS pixels, sharp on any screen. */
function prepare(canvas, width, height) {
  canvas.width = Math.round(width * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  return context;
}

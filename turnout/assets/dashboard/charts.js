// Time lines of the last ten minutes, drawn by uPlot.

import { colour, count, duration, element, mark, percent } from "./format.js";

const KEPT = 600; // seconds
const time = (seconds) => duration(seconds).join(" ");
const steps = (tick, i) => (tick.ranks.length ? tick.ranks.reduce((sum, rank) => sum + rank.shares[i], 0) / tick.ranks.length : null);
const hits = (tick, before) => {
  if (!before) return null;
  const [asked, found] = ["prefix_cache_queries_total", "prefix_cache_hits_total"].map((n) => tick.values[n] - before.values[n]);
  return asked > 0 ? found / asked : null;
};

// [title, how to write a value, lines: [name, colour, (tick, the one before) => value]]
const CHARTS = [
  ["Tokens per second", count, [
    ["output", "blue", (t) => t.rates.generation_tokens_total],
    ["prompts", "orange", (t) => t.rates.prompt_tokens_total],
  ]],
  ["Time to first token", time, [
    ["p50", "blue", (t) => t.latency.time_to_first_token_seconds.p50],
    ["p99", "orange", (t) => t.latency.time_to_first_token_seconds.p99],
  ]],
  ["Time between tokens", time, [
    ["p50", "blue", (t) => t.latency.inter_token_latency_seconds.p50],
    ["p99", "orange", (t) => t.latency.inter_token_latency_seconds.p99],
  ]],
  ["Requests", count, [
    ["running", "blue", (t) => t.values.num_requests_running],
    ["waiting", "orange", (t) => t.values.num_requests_waiting],
  ]],
  ["KV cache", percent, [
    ["in use", "blue", (t) => t.values.kv_cache_usage_perc],
    ["prefix hits", "green", hits],
  ]],
  ["Where the time goes", percent, [
    ["decode", "blue", (t) => steps(t, 2)],
    ["prefill", "orange", (t) => steps(t, 1)],
    ["other ranks", "purple", (t) => steps(t, 0)],
  ]],
];

export class Charts {
  constructor(box) {
    this.box = box;
    this.times = [];
    this.series = CHARTS.map(([, , lines]) => lines.map(() => []));
    this.cards = CHARTS.map(([title, , lines]) => {
      const keys = lines.map(([name, tint]) => {
        const value = element("span");
        return { value, key: element("span", "", "", mark(tint), document.createTextNode(`${name} `), value) };
      });
      const plot = element("div", "plot");
      box.append(element("div", "card", "", element("div", "bar", "", element("h2", "", title), element("div", "keys", "", ...keys.map((k) => k.key))), plot));
      return { plot, keys };
    });
    this.draw();
    new ResizeObserver(() => this.resize()).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** Another second; a tick of null is a gap. */
  add(now, tick, before) {
    this.times.push(now);
    CHARTS.forEach(([, write, lines], c) => {
      lines.forEach(([, , read], i) => {
        const value = tick ? read(tick, before) : null;
        this.series[c][i].push(value);
        this.cards[c].keys[i].value.textContent = value === null ? "–" : write(value);
      });
    });
    while (this.times.length && this.times[0] < now - KEPT) {
      this.times.shift();
      this.series.flat().forEach((line) => line.shift());
    }
    this.plots.forEach((plot, c) => plot.setData([this.times, ...this.series[c]]));
  }

  draw() {
    this.plots?.forEach((plot) => plot.destroy());
    const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    this.plots = CHARTS.map(([, write, lines], c) => new uPlot({
      width: this.cards[c].plot.clientWidth || 300,
      height: 150,
      cursor: { drag: { x: false, y: false } },
      scales: {
        x: { range: (u, low, high) => [high === null ? Date.now() / 1000 - 60 : Math.min(high - 60, low), high ?? Date.now() / 1000] },
        y: { range: (u, low, high) => [0, high ? high * 1.1 : 1] },
      },
      axes: [
        { ...axis, space: 70, size: 28, gap: 8, values: (u, at) => at.map((s) => new Date(1000 * s).toTimeString().slice(0, 8)) },
        { ...axis, size: 54, space: 36, values: (u, at) => at.map(write) },
      ],
      series: [{}, ...lines.map(([name, tint]) => ({ label: name, stroke: colour(tint), width: 2, points: { show: false } }))],
    }, [this.times, ...this.series[c]], this.cards[c].plot));
  }

  resize() {
    this.plots.forEach((plot, c) => plot.setSize({ width: this.cards[c].plot.clientWidth, height: 150 }));
  }
}

// The numbers of this second. data-metric names what of /metrics a tile shows unchanged.

import { count, duration, element, percent } from "./format.js";

const both = (values) => {
  const [p50, unit] = duration(values.p50);
  return [p50, unit, `p99 ${duration(values.p99).join(" ")}`.trim()];
};

function cached(values) {
  const share = values.prompt_tokens_total ? values.cached_prompt_tokens_total / values.prompt_tokens_total : 0;
  return `${percent(share)} prefix hits`;
}

function why(waiting) {
  const names = { running_requests: "for a place", kv_pages: "for KV pages", prefill_tokens: "for their turn", restart: "for the ranks" };
  const [reason] = Object.entries(waiting).sort((a, b) => b[1] - a[1])[0];
  return waiting[reason] ? names[reason] : "";
}

// [label, metric shown as it is, (tick) => [value, unit, detail]]
const TILES = [
  ["Output", "", (t) => [count(t.rates.generation_tokens_total), "tok/s", `${count(t.values.generation_tokens_total)} in all`]],
  ["Prompts", "", (t) => [count(t.rates.prompt_tokens_total), "tok/s", `${count(t.values.prompt_tokens_total)} in all`]],
  ["Running", "num_requests_running", (t) => [count(t.values.num_requests_running), "", ""]],
  ["Waiting", "num_requests_waiting", (t) => [count(t.values.num_requests_waiting), "", why(t.waiting)]],
  ["KV cache in use", "kv_cache_usage_perc", (t) => [percent(t.values.kv_cache_usage_perc), "", cached(t.values)]],
  ["First token", "", (t) => both(t.latency.time_to_first_token_seconds)],
  ["Between tokens", "", (t) => both(t.latency.inter_token_latency_seconds)],
  ["Restarts", "engine_restarts_total", (t) => [count(t.values.engine_restarts_total), "", `${count(t.values.resumed_requests_total)} resumed`]],
];

export class Tiles {
  constructor(box) {
    this.shown = TILES.map(([label, metric]) => {
      const value = element("span");
      const unit = element("small");
      const detail = element("div", "detail");
      const tile = element("div", "tile", "", element("div", "label", label), element("div", "value", "", value, unit), detail);
      if (metric) tile.dataset.metric = metric;
      box.append(tile);
      return { tile, value, unit, detail };
    });
  }

  show(tick) {
    TILES.forEach(([, metric, read], i) => {
      const { tile, value, unit, detail } = this.shown[i];
      [value.textContent, unit.textContent, detail.textContent] = read(tick);
      if (metric) tile.dataset.value = tick.values[metric];
    });
  }
}

// The page: one stream of events, and the parts that show them.

import { Charts } from "./charts.js";
import { element } from "./format.js";
import { HeatMap } from "./heatmap.js";
import { Ranks } from "./ranks.js";
import { Tiles } from "./tiles.js";

const RETRY = 2000; // milliseconds
const GOOD = { ready: "good", failed: "bad", restarting: "bad" };
const $ = (selector) => document.querySelector(selector);

const tiles = new Tiles($("#tiles"));
const charts = new Charts($("#charts"));
const map = new HeatMap(document);
const ranks = new Ranks($("#ranks"));
let last = null;
let served = false; // since this page was opened

function showState(state) {
  $("#state").textContent = state;
  $("#state").className = `pill ${GOOD[state] ?? "busy"}`;
}

function showBanner(text) {
  $("#banner").hidden = !text;
  $("#banner").textContent = text;
}

function about(told) {
  document.title = `${told.model} – Turnout`;
  $("#model").textContent = told.model;
  const plan = told.plan.length ? told.plan : ["Known when the ranks are ready."];
  $("#plan").replaceChildren(...plan.map((reason) => element("li", "", reason)));
  const phases = Object.entries(told.startup).filter(([, seconds]) => seconds >= 0.05);
  const all = Object.values(told.startup).reduce((a, b) => a + b, 0);
  $("#startup").textContent = phases.length
    ? `Started in ${all.toFixed(1)} s: ${phases.map(([phase, s]) => `${phase.replaceAll("_", " ")} ${s.toFixed(1)}`).join(", ")}.`
    : "";
  map.about(told);
}

function tick(told) {
  served ||= told.state === "ready";
  showState(told.state);
  const down = ["restarting", "failed"].includes(told.state);
  showBanner(down && told.failure ? `${told.failure}${told.state === "restarting" ? ". The ranks restart; requests wait and then go on." : ""}` : "");
  tiles.show(told);
  charts.add(told.time, told, last);
  map.add(told.time, told.experts);
  ranks.show(told.ranks, !served && !told.values.engine_restarts_total && told.state !== "failed");
  last = told;
  document.body.dataset.ticks = Number(document.body.dataset.ticks ?? 0) + 1;
}

function connect() {
  const source = new EventSource("dashboard/events");
  source.addEventListener("about", (event) => about(JSON.parse(event.data)));
  source.addEventListener("tick", (event) => tick(JSON.parse(event.data)));
  source.addEventListener("error", () => {
    showState("no connection");
    showBanner("The server does not answer. This page goes on when it does.");
    if (last) charts.add(Date.now() / 1000, null, null);
    last = null;
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, RETRY);
  });
}

connect();

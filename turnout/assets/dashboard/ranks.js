// A row for every rank: what it does, and how it spent the last second.

import { count, element } from "./format.js";

const HEAD = ["Rank", "State", "Running", "Waiting", "KV pages", "Tokens/s", "Step", "Decode, prefill, waiting for other ranks"];
const TINTS = [[2, "blue"], [1, "orange"], [0, "purple"]]; // of rank.shares: sync, prefill, decode
const SERVES = ["idle", "running"];

export class Ranks {
  constructor(table) {
    this.body = table.tBodies[0];
    table.tHead.append(element("tr", "", "", ...HEAD.map((title) => element("th", "", title))));
  }

  /** Red is a rank that served and does not; one that starts for the first time is not. */
  show(ranks, starting) {
    this.body.replaceChildren(...ranks.map((rank) => {
      const down = !SERVES.includes(rank.state);
      const state = rank.state === "loading" && rank.phase !== "loading" ? rank.phase : rank.state;
      const pill = element("span", `pill ${down ? (starting ? "busy" : "bad") : rank.state === "running" ? "good" : ""}`, down && !starting && rank.state === "loading" ? "down, restarting" : state);
      const shares = element("div", "shares");
      for (const [i, tint] of TINTS) {
        const part = element("div");
        part.style.width = `${100 * rank.shares[i]}%`;
        part.style.background = `var(--${tint})`;
        shares.append(part);
      }
      const cells = [
        rank.rank, pill, count(rank.num_running), count(rank.num_waiting),
        rank.pages_total ? `${count(rank.pages_used)} of ${count(rank.pages_total)}` : "–",
        count(rank.tokens_per_second), rank.step_ms === null ? "–" : `${rank.step_ms.toFixed(1)} ms`, shares,
      ];
      const row = element("tr", down && !starting ? "dead" : "", "", ...cells.map((cell) => element("td", "", "", cell)));
      row.dataset.state = rank.state;
      return row;
    }));
  }
}

// A row for every rank: what it does, and how it spent the last second.

import { count, element, mark } from "./format.js";

const HEAD = ["Rank", "State", "Running", "Waiting", "KV pages", "Tokens/s", "Step"];
// [place in rank.shares, colour, what it is]
const SHARES = [[2, "blue", "decode"], [1, "orange", "prefill"], [0, "purple", "waiting for other ranks"]];
const SERVES = ["idle", "running"];

export class Ranks {
  constructor(table) {
    this.body = table.tBodies[0];
    const keys = SHARES.flatMap(([, tint, name]) => [mark(tint), `${name} `]);
    table.tHead.append(element("tr", "", "", ...HEAD.map((title) => element("th", "", title)), element("th", "", "", ...keys)));
  }

  /** Red is a rank that served and does not; one that starts for the first time is not. */
  show(ranks, starting) {
    this.body.replaceChildren(...ranks.map((rank) => {
      const down = !SERVES.includes(rank.state);
      const state = rank.state === "loading" && rank.phase !== "loading" ? rank.phase : rank.state;
      const pill = element("span", `pill ${down ? (starting ? "busy" : "bad") : rank.state === "running" ? "good" : ""}`, down && !starting && rank.state === "loading" ? "down, restarting" : state);
      const shares = element("div", "shares");
      for (const [i, tint] of SHARES) {
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

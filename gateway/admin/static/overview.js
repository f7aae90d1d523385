// The first page: how much is done, what is wrong, what each slot does, the fleet, and the last hour.

import { html, nothing, svg } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { keepAsking } from "./ask.js";
import { chartsView, column, drawCharts, fedCharts, hasPrices } from "./charts.js";
import { count, money, percent, rate, seconds } from "./format.js";
import { membersView } from "./members.js";
import * as nodes from "./nodes.js";
import { problemsView } from "./problems.js";
import { isOperator, state } from "./state.js";
import * as timeline from "./timeline.js";

const ASKED_SECONDS = 60;
/** Of a sparkline: its points at most, and its sides. */
const [MOST_POINTS, WIDTH, HEIGHT] = [90, 180, 30];

let isMarked = false;
/** What the requests of this day have cost, as the ledger says; null: it does not. */
let spentToday = null;
let stop = () => {};

export function enter(route, redraw) {
  timeline.enter();
  stop = keepAsking(async (get) => {
    if (isOperator() && hasPrices()) spentToday = (await get("admin/usage?by=tier&since=0d")).total.cost;
    return ASKED_SECONDS;
  }, (trouble) => {
    if (trouble !== "") spentToday = null;
    redraw();
  }, ASKED_SECONDS);
}

export function leave() {
  timeline.leave();
  stop();
}

export function view(route, redraw) {
  const { connection, problems, summary, versions } = state;
  const charts = fedCharts();
  return html`${connection === "lost" && problems.length === 0 ? nothing
      : guard([problems, versions.page], () => problemsView(problems, redraw))}
    ${guard([versions.history, versions.page, summary], figuresView)}
    ${timeline.timelineView(redraw)}
    ${guard(nodes.depends(route), nodes.fleetView)}
    ${guard([summary], () => membersView(summary.cluster))}
    ${guard(charts, () => chartsView(charts))}`;
}

export function drawn() {
  nodes.drawn();
  // In a frame of its own: together they would be one long task.
  setTimeout(timeline.drawTimeline, 0);
  if (isMarked) drawCharts();
  else {
    isMarked = true;
    performance.mark("fleet drawn");
    requestAnimationFrame(() => setTimeout(drawCharts, 0));
  }
}

function figuresView() {
  const { summary } = state;
  const last = (name) => column(name).findLast((value) => value !== null);
  return html`<section id="figures" aria-label="The fleet in figures"><ul class="figures">
    ${figure("Tokens a second", rate(last("tokens_per_second")), column("tokens_per_second"))}
    ${figure("Time to first token, p95", seconds(last("ttft_p95")), column("ttft_p95"))}
    ${figure("Prompt tokens from caches", percent(last("cached_share")), column("cached_share"), 1)}
    ${figure("Busy slots", html`${count(summary.slots_busy)} <small>of ${count(summary.slots_total)}</small>`,
      column("slots_busy"), summary.slots_total)}
    ${hasPrices() ? moneyView() : nothing}</ul></section>`;
}

function moneyView() {
  let sum = 0;
  const spent = column("cost").map((cost) => sum += cost);
  return isOperator() && spentToday !== null ? figure("Spent today (UTC)", money(spentToday), spent)
    : figure("Spent in the last hour", money(sum), spent);
}

/** A figure, with what it was in the last hour; `top`: what fills the sparkline's height. */
function figure(title, words, values, top = 0) {
  const size = Math.max(1, Math.ceil(values.length / MOST_POINTS));
  const points = [];
  for (let place = 0; place < values.length; place += size) {
    const known = values.slice(place, place + size).filter((value) => value !== null);
    if (known.length > 0) points.push([place, known.reduce((sum, value) => sum + value, 0) / known.length]);
  }
  const most = Math.max(top, 1e-9, ...points.map(([, value]) => value));
  const across = WIDTH / Math.max(1, values.length - 1);
  const line = points.map(([place, value]) => `${(place * across).toFixed(1)},${(HEIGHT - 2 - (value / most) * (HEIGHT - 4)).toFixed(1)}`);
  return html`<li class="figure"><h2>${title}</h2><p class="large">${words}</p>
    <svg class="spark" viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" aria-hidden="true">${
      svg`<polyline points=${line.join(" ")} vector-effect="non-scaling-stroke"></polyline>`}</svg></li>`;
}

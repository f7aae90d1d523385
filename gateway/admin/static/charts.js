// The last hour of the fleet as charts.

import { html } from "./vendor/lit-html/lit-html.js";
import { count, money, percent, rate, seconds } from "./format.js";
import { drawPlots, isKnown, plotsView } from "./plot.js";
import { state } from "./state.js";

const HOUR = 3600;
/** Seconds that are drawn at least, of a gateway that has just started. */
const LEAST_SPAN = 300;

/** Each chart, as `plot.js` has them; a `scale` makes other values of a column's, and `isFed` tells more of what feeds it. */
const CHARTS = [
  { id: "requests", title: "Requests a minute", read: count, scale: "perMinute",
    series: [["requests", "ended"], ["failed", "failed"], ["refused", "refused"]] },
  { id: "ttft", title: "Time to first token", read: seconds,
    series: [["ttft_p50", "p50"], ["ttft_p95", "p95"]] },
  { id: "tokens", title: "Tokens a second", read: rate, series: [["tokens_per_second", "written"]] },
  { id: "queued", title: "Queue and slots", read: count, series: [["queued", "waiting"], ["slots_busy", "busy slots"]] },
  { id: "cached", title: "Prompt tokens from caches", read: percent, top: 1, series: [["cached_share", "cached"]] },
  { id: "gpu", isFed: () => state.summary.hybrid !== null, title: "Requests on GPU nodes", read: percent, top: 1, series: [["gpu_share", "GPU"]] },
  { id: "spent", title: "Money within the hour", isFed: () => hasPrices() && state.summary.hybrid === null, read: money,
    scale: "running", least: 1e-6, series: [["cost", "spent"]] },
  { id: "money", isFed: () => hasPrices() && state.summary.hybrid !== null, title: "Money within the hour", read: money, scale: "running",
    least: 1e-6, series: [["cost", "spent"], ["gpu_cost", "all on GPU"]] },
];

/** Whether anything has a price. */
export function hasPrices() {
  return column("cost").some((cost) => cost > 0) || [...state.nodes.values()].some((node) => node.cost_per_hour > 0);
}

/** The values of the last hour of this name, the oldest first. */
export function column(name) {
  const place = state.history.columns.indexOf(name);
  return state.history.points.map((point) => point[place]);
}

function dataOf(chart) {
  const { step } = state.history;
  const series = chart.series.map(([name]) => {
    const values = column(name);
    if (chart.scale === "perMinute") return values.map((value) => (value * 60) / step);
    if (chart.scale !== "running") return values;
    let sum = 0;
    // One step without a known price makes the sum unknown.
    return values.map((value) => { sum = value === null || sum === null ? null : sum + value; return sum; });
  });
  return [column("at"), ...series];
}

/** Charts that something feeds. */
export function fedCharts() {
  return CHARTS.filter(({ series, isFed = () => true }) => isFed() && isKnown(column(series[0][0])));
}

export function chartsView(charts) {
  return html`<section id="charts" class="panel" aria-labelledby="charts-title">
    <h2 id="charts-title">The last hour</h2>
    ${plotsView(charts)}
  </section>`;
}

/** Draw what has changed since the last call. */
export function drawCharts() {
  const { at, versions } = state;
  drawPlots(CHARTS, versions.history, dataOf, {
    words: "the last hour", height: 112, steps: [60, 120, 300, 600, 900, 1800, 3600], to: at,
    from: (first = at) => Math.max(at - HOUR, Math.min(first, at - LEAST_SPAN)),
  });
}

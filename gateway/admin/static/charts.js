// The last hour, drawn by uPlot. Charts are made after the first paint and change with each step.

import { html, render } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { count, money, percent, rate, seconds } from "./format.js";
import { state } from "./state.js";
import { colour, theme } from "./theme.js";

const HEIGHT = 112;
const HOUR = 3600;
/** Seconds that are drawn at least, of a gateway that has just started. */
const LEAST_SPAN = 300;

/** Each chart: its series by column, and how its values read. */
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
    scale: "running", series: [["cost", "spent"]] },
  { id: "money", isFed: () => hasPrices() && state.summary.hybrid !== null, title: "Money within the hour", read: money, scale: "running",
    series: [["cost", "spent"], ["gpu_cost", "all on GPU"]] },
];

const STYLES = [["--series-1", []], ["--series-2", [6, 3]], ["--series-3", [2, 3]]];

/** Whether anything has a price. */
export function hasPrices() {
  return column("cost").some((cost) => cost > 0) || [...state.nodes.values()].some((node) => node.cost_per_hour > 0);
}

/** Charts that something feeds. */
const fed = () => CHARTS.filter((chart) => chart.isFed === undefined || chart.isFed());

let plots = [];
let drawn = -1;
let drawnTheme = "";

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

export function chartsView() {
  return html`<section id="charts" class="panel" aria-labelledby="charts-title">
    <h2 id="charts-title">The last hour</h2>
    <div class="charts">${repeat(fed(), (chart) => chart.id, (chart) => html`<figure data-chart=${chart.id}>
      <figcaption></figcaption><div class="plot" role="img"></div></figure>`)}</div>
  </section>`;
}

function captionOf(chart, data) {
  const last = data.slice(1).map((values) => values.findLast((value) => value !== null));
  const words = chart.series.map(([, name], index) => `${name} ${chart.read(last[index])}`);
  return { words, last };
}

/** Draw what has changed since the last call. */
export function drawCharts() {
  // The page was another one in between, such as the form for a key.
  const isGone = plots.length !== document.querySelectorAll("#charts figure").length
    || plots.some(({ figure }) => !figure.isConnected);
  if (isGone || theme() !== drawnTheme) { destroy(); drawnTheme = theme(); }
  if (document.getElementById("charts") === null) return;
  if (drawn === state.versions.history && plots.length > 0) return;
  drawn = state.versions.history;
  if (plots.length === 0) make();
  for (const { chart, figure, plot } of plots) {
    const data = dataOf(chart);
    const { words, last } = captionOf(chart, data);
    render(html`<h3>${chart.title}</h3><p>${chart.series.map(
      ([, name], index) => html`<span class="key k${index + 1}"><i aria-hidden="true"></i>${name} <b>${chart.read(last[index])}</b></span>`)}</p>`,
      figure.querySelector("figcaption"));
    figure.querySelector(".plot").setAttribute("aria-label", `${chart.title}, the last hour; now ${words.join(", ")}`);
    plot.setData(data, false);
    const end = state.at;
    const first = data[0][0] ?? end;
    plot.setScale("x", { min: Math.max(end - HOUR, Math.min(first, end - LEAST_SPAN)), max: end });
  }
}

function make() {
  const muted = colour("--muted");
  const line = colour("--line");
  for (const chart of fed()) {
    const figure = document.querySelector(`[data-chart="${chart.id}"]`);
    const place = figure.querySelector(".plot");
    const axis = { stroke: muted, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const plot = new window.uPlot({
      width: Math.max(120, place.clientWidth), height: HEIGHT,
      padding: [8, 4, 0, 0],
      legend: { show: false },
      cursor: { points: { size: 6 }, drag: { x: false, y: false }, sync: { key: "hour" } },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, chart.top ?? Math.max(high || 0, chart.scale === "running" ? 1e-6 : 1) * 1.1] } },
      axes: [
        { ...axis, size: 22, space: 60, values: [[60, "{HH}:{mm}"]], incrs: [60, 120, 300, 600, 900, 1800, 3600] },
        { ...axis, size: 46, space: 26, values: (_, splits) => splits.map((value) => chart.read(value)) },
      ],
      series: [{}, ...chart.series.map((_, index) => ({
        stroke: colour(STYLES[index][0]), dash: STYLES[index][1], width: 1.75, spanGaps: false, points: { show: false },
      }))],
    }, [[], ...chart.series.map(() => [])], place);
    plots.push({ chart, figure, plot, place });
  }
}

function destroy() {
  for (const { plot } of plots) plot.destroy();
  plots = [];
}

new ResizeObserver(() => {
  for (const { plot, place } of plots) {
    const width = Math.max(120, place.clientWidth);
    if (width !== plot.width) plot.setSize({ width, height: HEIGHT });
  }
}).observe(document.documentElement);

// Lines over time, drawn by uPlot. Charts are made once they have a place, and change with their data.

import { html, render } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { colour, theme } from "./theme.js";

const STYLES = [["--series-1", []], ["--series-2", [6, 3]], ["--series-3", [2, 3]]];

/** What is drawn, by its figure: the plot, its element, and of what data it is. */
const drawn = new Map();
let drawnTheme = "";

/** Whether anything feeds a series. */
export const isKnown = (values) => values.some((value) => value !== null);

/**
 * Places for charts. Each has an `id`, a `title`, how its values `read`, and `series`: pairs of a column and its name;
 * perhaps `top`, the value that fills its height, and `least`, the smallest such value.
 */
export function plotsView(charts) {
  return html`<div class="charts">${repeat(charts, (chart) => chart.id, (chart) => html`<figure data-chart=${chart.id}>
    <figcaption></figcaption><div class="plot" role="img"></div></figure>`)}</div>`;
}

/**
 * Draw the charts that have a place, unless they show this `version` of the data. `dataOf` returns the times of a chart
 * and the values of each series; `frame` has the times `from` and `to`, what they are in `words`, and the `height`.
 */
export function drawPlots(charts, version, dataOf, frame) {
  const isOther = drawnTheme !== theme();
  drawnTheme = theme();
  for (const [figure, { plot }] of drawn) {
    // The page was another one in between, such as the form for a key.
    if (isOther || !figure.isConnected) {
      plot.destroy();
      drawn.delete(figure);
    }
  }
  for (const chart of charts) {
    const figure = document.querySelector(`[data-chart="${chart.id}"]`);
    if (figure === null || drawn.get(figure)?.version === version) continue;
    const place = figure.querySelector(".plot");
    const plot = drawn.get(figure)?.plot ?? made(chart, place, frame);
    drawn.set(figure, { plot, place, version });
    const data = dataOf(chart);
    const known = data.slice(1).map((values) => values.filter((value) => value !== null));
    render(html`<h3>${chart.title}</h3><p>${chart.series.map(([, name], index) => html`<span class="key k${index + 1}"><i
      aria-hidden="true"></i>${name} <b>${chart.read(known[index].at(-1))}</b></span>`)}</p>`, figure.querySelector("figcaption"));
    place.setAttribute("aria-label", `${chart.title}, ${frame.words}: ${chart.series.map(
      ([, name], index) => `${name} ${inWords(known[index], chart.read)}`).join("; ")}`);
    plot.setData(data, false);
    plot.setScale("x", { min: frame.from(data[0][0]), max: frame.to });
  }
}

function inWords(values, read) {
  if (values.length === 0) return "not known yet";
  return `from ${read(Math.min(...values))} to ${read(Math.max(...values))}, now ${read(values.at(-1))}`;
}

function made(chart, place, { height, steps }) {
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return new window.uPlot({
    width: widthOf(place), height, padding: [8, 4, 0, 0], legend: { show: false },
    cursor: { points: { size: 6 }, drag: { x: false, y: false }, sync: { key: "time" } },
    scales: { x: { time: true }, y: { range: (_, low, high) => [0, chart.top ?? Math.max(high || 0, chart.least ?? 1) * 1.1] } },
    axes: [
      { ...axis, size: 22, space: 60, values: [[60, "{HH}:{mm}"]], incrs: steps },
      { ...axis, size: 46, space: 26, values: (_, splits) => splits.map((value) => chart.read(value)) },
    ],
    series: [{}, ...chart.series.map((_, index) => ({
      stroke: colour(STYLES[index][0]), dash: STYLES[index][1], width: 1.75, spanGaps: false,
      // A single point would be no line.
      points: { show: (plot) => plot.data[0].length === 1 },
    }))],
  }, [[], ...chart.series.map(() => [])], place);
}

const widthOf = (place) => Math.max(120, place.clientWidth);

new ResizeObserver(() => {
  for (const { plot, place } of drawn.values()) {
    if (widthOf(place) !== plot.width) plot.setSize({ width: widthOf(place), height: plot.height });
  }
}).observe(document.documentElement);

// One node: what it is, its last day, and what its prompt cache has saved.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { fetchJson } from "./ask.js";
import { count, money, percent, plain, plural, rate, seconds, size } from "./format.js";
import { actionsView, cellsView, MARKS, slotsInWords } from "./nodes.js";
import { href } from "./route.js";
import { isOperator, state } from "./state.js";
import { colour, theme } from "./theme.js";

const ASK_SECONDS = 60;
const DAY = 86_400;
const HEIGHT = 128;
/** How full a cell of the map can be, as the style sheet has it. */
const MOST_HEAT = 8;

/** Each chart: its series by column, and how its values read. */
const CHARTS = [
  { id: "busy", title: "Busy slots", read: (value) => rate(value), series: [["busy", "busy"], ["slots", "slots"]] },
  { id: "decode", title: "Writing, tokens a second", read: rate, series: [["decode_tps", "one request alone"]] },
  { id: "prefill", title: "Reading, tokens a second", read: rate, series: [["prefill_tps", "prompts"]] },
];
const STYLES = [["--series-1", []], ["--series-2", [6, 3]]];

/** What was asked of the gateway for the node that is shown. */
let asked = { name: "", day: null, cache: null, trouble: "" };
let timer = 0;
let plots = [];
let drawnOf = null;

export function enter(route, redraw) {
  asked = { name: route.id, day: null, cache: null, trouble: "" };
  const load = () => fetchAll(asked, redraw);
  load();
  timer = setInterval(load, ASK_SECONDS * 1000);
}

export function leave() {
  clearInterval(timer);
  destroy();
  asked = { name: "", day: null, cache: null, trouble: "" };
}

async function fetchAll(into, redraw) {
  if (!state.nodes.has(into.name)) return;
  const name = encodeURIComponent(into.name);
  try {
    const [day, cache] = await Promise.all([`admin/nodes/${name}/history`, `admin/cache?node=${name}`]
      .map((path) => fetchJson(path)));
    Object.assign(into, { day, cache, trouble: "" });
  } catch (error) {
    into.trouble = error.message;
  }
  if (into === asked) redraw();
}

/** What the view is made of. */
export function depends() {
  return [state.versions.nodes, state.versions.page, state.role];
}

export function view(route) {
  const node = state.nodes.get(route.id);
  const back = html`<p><a href=${href("nodes")}>All nodes</a></p>`;
  if (node === undefined) {
    return html`<section id="node" class="panel" aria-labelledby="node-name">${back}
      <h2 id="node-name">${plain(route.id)}</h2><p>It is not in the inventory.</p></section>`;
  }
  return html`<section id="node" class="panel" aria-labelledby="node-name">${back}
      <h2 id="node-name">${plain(node.name)}</h2>${factsView(node)}
      <p class="actions">${isOperator() ? actionsView(node)
        : html`<span class="muted">Draining and probing need an operator's key.</span>`}</p></section>
    <section id="day" class="panel" aria-labelledby="day-title">
      <h2 id="day-title">The last 24 hours</h2>
      ${asked.trouble ? html`<p class="error" role="alert">${plain(asked.trouble)}</p>` : nothing}
      ${asked.day?.points.length === 0 ? html`<p class="muted">Nothing was seen of it at work.</p>` : nothing}
      <div class="charts">${CHARTS.map((chart) => html`<figure><figcaption><h3>${chart.title}</h3>
        <p>${chart.series.length > 1 ? chart.series.map(([, name], index) => html`<span
          class="key k${index + 1}"><i aria-hidden="true"></i>${name}</span>`) : nothing}</p></figcaption>
        <div class="plot" data-plot=${chart.id} role="img" aria-label=${wordsOf(chart)}></div></figure>`)}</div>
    </section>
    ${guard([asked.cache], () => (asked.cache === null ? nothing : cacheView(asked.cache, node.name)))}`;
}

function factsView(node) {
  const labels = Object.entries(node.labels);
  const facts = [
    ["State", html`<span class="state s-${node.state}"><span class="mark" aria-hidden="true">${MARKS[node.state]}</span> ${node.state}</span>`],
    ["Reason", node.reason ? plain(node.reason) : nothing],
    ["Slots", html`${cellsView(node)} ${slotsInWords(node)}`],
    ["Requests", `${count(node.in_flight)} now, ${count(node.requests)} since the start, ${count(node.failures)} failed`],
    ["Writes", node.decode_tps === null ? "not measured yet" : `${rate(node.decode_tps)} tokens/s${of(node.decode_share)}`],
    ["Reads", node.prefill_tps === null ? "not measured yet" : `${rate(node.prefill_tps)} tokens/s${of(node.prefill_share)}`],
    ["Cached", `${plural(node.cached_prompts, "prompt")}, ${count(node.cached_tokens)} tokens, as the gateway believes`],
    ["Models", node.models.length === 0 ? "unknown" : plain(node.models.join(", "))],
    ["Context", node.context === null ? "unknown" : `${count(node.context)} tokens a slot`],
    ["Differs", node.drift.length === 0 ? nothing : plain(node.drift.join("; "))],
    ["Memory", node.router === undefined ? nothing : `${node.memory === null ? "size unknown" : size(node.memory)}${
      node.pinned_by === null ? "" : `, pinned (${node.pinned_by})`}`],
    ["Loaded", node.router !== undefined && node.state === "loading" && node.progress !== null ? percent(node.progress) : nothing],
    ["Host", html`${plain(node.host)}${node.labels.numa === undefined ? nothing : `, NUMA node ${plain(node.labels.numa)}`}`],
    ["Address", html`<code>${plain(node.url)}</code>`],
    ["Tier", `${node.tier}${node.cost_per_hour ? `, ${money(node.cost_per_hour)} an hour` : ""}`],
    ["Labels", labels.length === 0 ? nothing : plain(labels.map((pair) => pair.join("=")).join(", "))],
    ["Build", node.build ? plain(node.build) : nothing],
    ["Deadline", node.deadline_at === null ? nothing : `in ${seconds(Math.max(0, node.deadline_at - state.at))} what still runs is moved or ended`],
  ];
  return html`<dl class="facts">${facts.filter(([, value]) => value !== nothing)
    .map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>`;
}

function of(share) {
  return share === null ? "" : `, ${percent(share)} of its usual`;
}

// The charts of the day.

function column(name) {
  const place = asked.day.columns.indexOf(name);
  return asked.day.points.map((point) => point[place]);
}

/** What a chart shows, in words. */
function wordsOf(chart) {
  const values = asked.day === null ? [] : column(chart.series[0][0]).filter((value) => value !== null);
  if (values.length === 0) return `${chart.title}: nothing is known yet`;
  const [least, most] = [Math.min(...values), Math.max(...values)];
  return `${chart.title} in the last 24 hours: from ${chart.read(least)} to ${chart.read(most)}, now ${chart.read(values.at(-1))}`;
}

/** The series of a chart; a time without the node is a gap. */
function dataOf(chart) {
  const at = column("at");
  const rows = chart.series.map(([name]) => column(name));
  const data = [[], ...rows.map(() => [])];
  at.forEach((time, place) => {
    if (place > 0 && time - at[place - 1] > 1.5 * asked.day.step) {
      data[0].push(at[place - 1] + 1);
      for (const one of data.slice(1)) one.push(null);
    }
    data[0].push(time);
    rows.forEach((values, index) => data[index + 1].push(values[place]));
  });
  return data;
}

export function drawn() {
  if (asked.day === null) return;
  const words = theme();
  const isGone = plots.some(({ place }) => !place.isConnected);
  if (isGone || (plots.length > 0 && plots[0].words !== words)) destroy();
  if (drawnOf === asked.day && plots.length > 0) return;
  drawnOf = asked.day;
  for (const chart of CHARTS) {
    const place = document.querySelector(`[data-plot="${chart.id}"]`);
    if (place === null) return;
    let one = plots.find((plot) => plot.place === place);
    if (one === undefined) plots.push(one = { place, words, plot: make(chart, place) });
    one.plot.setData(dataOf(chart), false);
    one.plot.setScale("x", { min: state.at - DAY, max: state.at });
  }
}

function make(chart, place) {
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return new window.uPlot({
    width: Math.max(120, place.clientWidth), height: HEIGHT, padding: [8, 8, 0, 0], legend: { show: false },
    cursor: { points: { size: 6 }, drag: { x: false, y: false }, sync: { key: "day" } },
    scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(high || 0, 1) * 1.1] } },
    axes: [
      { ...axis, size: 22, space: 60, values: [[60, "{HH}:{mm}"]], incrs: [3600, 7200, 10_800, 14_400, 21_600, 43_200] },
      { ...axis, size: 46, space: 26, values: (_, splits) => splits.map((value) => chart.read(value)) },
    ],
    series: [{}, ...chart.series.map((_, index) => ({
      stroke: colour(STYLES[index][0]), dash: STYLES[index][1], width: 1.75, spanGaps: false, points: { show: false },
    }))],
  }, [[], ...chart.series.map(() => [])], place);
}

function destroy() {
  for (const { plot } of plots) plot.destroy();
  plots = [];
  drawnOf = null;
}

new ResizeObserver(() => {
  for (const { plot, place } of plots) {
    const width = Math.max(120, place.clientWidth);
    if (width !== plot.width) plot.setSize({ width, height: HEIGHT });
  }
}).observe(document.documentElement);

// The map of cache hits.

function cacheView(map, name) {
  return html`<section id="cache" class="panel" aria-labelledby="cache-title">
    <h2 id="cache-title">Prompts from the cache</h2>
    ${map.prefixes.length === 0 ? html`<p class="muted">Since the gateway started, the node has found no beginning of a prompt in its cache.</p>`
    : html`<p class="muted">A row for each beginning that prompts share: letters of its digest, and its length. A cell tells
      what share of these prompts' tokens a node had cached since its first such hit.${map.complete ? "" : " There are more: what saved most is shown."}</p>
      <div class="scroll" tabindex="0" role="region" aria-label="Cache hits by prefix and node"><table class="heat">
        <thead><tr><th scope="col">Prefix</th><th scope="col" class="n">Tokens</th>${map.nodes.map((one) => html`<th
          scope="col">${one === name ? html`<b>${plain(one)}</b>` : html`<a href=${href("nodes", one)}>${plain(one)}</a>`}</th>`)}</tr></thead>
        <tbody>${map.prefixes.map((row) => html`<tr><th scope="row"><code>${plain(row.prefix)}</code></th>
          <td class="n">${count(row.tokens)}</td>${row.cells.map(cellView)}</tr>`)}</tbody></table></div>`}
  </section>`;
}

function cellView(cell) {
  if (cell === null) return html`<td class="n">–</td>`;
  const [requests, prompt, cached] = cell;
  const share = prompt === 0 ? 0 : cached / prompt;
  return html`<td class="n h${Math.round(share * MOST_HEAT)}" title="${plural(requests, "request")}, ${count(cached)} of ${
    count(prompt)} tokens">${percent(share)}</td>`;
}

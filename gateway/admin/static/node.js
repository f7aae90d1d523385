// One node: what it is, its last day, and what its prompt cache has saved.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { keepAsking } from "./ask.js";
import { count, money, percent, plain, plural, rate, seconds, size } from "./format.js";
import { actionsView, cellsView, MARKS, slotsInWords } from "./nodes.js";
import { drawPlots, isKnown, plotsView } from "./plot.js";
import { href } from "./route.js";
import { isOperator, state } from "./state.js";

const ASK_SECONDS = 60;
/** Seconds that are drawn at most, and at least of a gateway that has just started. */
const [DAY, LEAST_SPAN] = [86_400, 7200];
/** How full a cell of the map can be, as the style sheet has it. */
const MOST_HEAT = 8;

/** Each chart, as `plot.js` has them. */
const CHARTS = [
  { id: "busy", title: "Busy slots", read: rate, series: [["busy", "busy"], ["slots", "slots"]] },
  { id: "decode", title: "Writing, tokens a second", read: rate, series: [["decode_tps", "one request alone"]] },
  { id: "prefill", title: "Reading, tokens a second", read: rate, series: [["prefill_tps", "prompts"]] },
];
const UNKNOWN = { day: null, cache: null, trouble: "" };

/** What the gateway has told of the node that is shown. */
let told = { ...UNKNOWN };
let stop = () => {};

export function enter({ id }, redraw) {
  told = { ...UNKNOWN };
  const name = encodeURIComponent(id);
  stop = keepAsking(async (get) => {
    if (state.nodes.has(id)) {
      [told.day, told.cache] = await Promise.all([get(`admin/nodes/${name}/history`), get(`admin/cache?node=${name}`)]);
    }
    return ASK_SECONDS;
  }, (trouble) => { told.trouble = trouble; redraw(); }, ASK_SECONDS);
}

export function leave() {
  stop();
  told = { ...UNKNOWN };
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
      ${told.trouble ? html`<p class="error" role="alert">${plain(told.trouble)}</p>` : nothing}
      ${told.day?.points.length === 0 ? html`<p class="muted">Nothing was seen of it at work.</p>` : nothing}
      ${plotsView(fed())}
    </section>
    ${guard([told.cache], () => (told.cache === null ? nothing : cacheView(told.cache, node.name)))}`;
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
  const place = told.day.columns.indexOf(name);
  return told.day.points.map((point) => point[place]);
}

/** Charts that something feeds. */
function fed() {
  return told.day === null ? [] : CHARTS.filter(({ series: [[name]] }) => isKnown(column(name)));
}

/** The series of a chart; a time without the node is a gap. */
function dataOf(chart) {
  const at = column("at");
  const rows = chart.series.map(([name]) => column(name));
  const data = [[], ...rows.map(() => [])];
  at.forEach((time, place) => {
    if (place > 0 && time - at[place - 1] > 1.5 * told.day.step) {
      data[0].push(at[place - 1] + 1);
      for (const one of data.slice(1)) one.push(null);
    }
    data[0].push(time);
    rows.forEach((values, index) => data[index + 1].push(values[place]));
  });
  return data;
}

export function drawn() {
  const { at } = state;
  drawPlots(fed(), told.day, dataOf, {
    words: "the last 24 hours", height: 128, steps: [900, 3600, 7200, 10_800, 14_400, 21_600, 43_200],
    from: (first = at) => Math.max(at - DAY, Math.min(first, at - LEAST_SPAN)), to: at,
  });
}

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

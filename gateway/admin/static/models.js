// Models: every public name, where it is and who used it, and the memory of each host with routers.

import { html, nothing, svg } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { order, pauseModel } from "./actions.js";
import { keepAsking } from "./ask.js";
import { count, moment, money, percent, plain, plural, rate, seconds, size } from "./format.js";
import { MARKS } from "./nodes.js";
import { href } from "./route.js";
import { isOperator, state } from "./state.js";
import { moreView, tableView } from "./table.js";

/** Hosts, and models of each, that are drawn; the others are counted. */
const [MOST_HOSTS, MOST_DRAWN] = [48, 48];
const WIDTH = 1000;
/** Of the bar: the least that a model takes, and what one of unknown size does. */
const LEAST = 6;
const UNKNOWN = 60;
/** States in which a model has its memory. */
const HELD = new Set(["ready", "degraded", "mute", "sleeping", "loading", "unloading", "draining", "ejected"]);
/** How far back the page tells who used a model, and the groups that it asks for. */
const [USED_SINCE, MOST_GROUPS] = ["7d", 5000];
/** Seconds after which the page asks again. */
const ASK_AGAIN = 5;

/** What the live view does not have: public names, what routers have loaded, and who used a model. */
let known = { models: null, placements: [], used: null, more: false, trouble: "" };
let stop = () => {};

export function enter(route, redraw) {
  known = { ...known, used: null, trouble: "" };
  askFor(route, redraw);
}

export function leave() {
  stop();
}

function askFor(route, redraw) {
  stop();
  stop = keepAsking(async (get) => {
    const [{ models }, { placements }] = await Promise.all([get("admin/models"), get("admin/placements")]);
    known = { ...known, models, placements };
    if (route.id !== "" && known.used === null && isOperator()) {
      redraw();
      const report = await get(`admin/usage?by=key,model&since=${USED_SINCE}&limit=${MOST_GROUPS}`);
      known.used = report.rows.filter((row) => row.model === route.id);
      known.more = report.rows_found > report.rows.length;
    }
    return ASK_AGAIN;
  }, (trouble) => {
    known = { ...known, trouble };
    redraw();
  });
}

export function depends(route) {
  return [route, state.versions.nodes, state.versions.page, state.summary, state.role];
}

export function view(route, redraw) {
  const again = () => askFor(route, redraw);
  return html`${known.trouble === "" ? nothing : html`<p class="panel error" role="alert">${plain(known.trouble)}</p>`}
    ${route.id === "" ? html`${namesView(again)}${memoriesView()}` : modelView(route.id, again)}`;
}

// Every public name.

function namesView(again) {
  const models = known.models ?? [];
  return html`<section id="names" class="panel" aria-labelledby="names-title">
    <h2 id="names-title">Models <small>${known.models === null ? "asking…" : count(models.length)}</small></h2>
    ${tableView("Models", ["Model", "Stands for", "Where it is", "#Slots busy", "#Waiting", "", actions()], models, (model) => [
      linkView("models", model.name), model.stands_for.join(", "), statesView(model), `${model.slots_busy} of ${model.slots_total}`,
      count(model.waiting), model.paused ? html`<b class="tag">paused</b>` : "", pauseView(model, again)], { word: "more model" })}
  </section>`;
}

/** The heading of a column that only those have who may act. */
const actions = () => (isOperator() ? "Actions" : nothing);

function statesView(model) {
  const states = Object.entries(model.nodes);
  return states.length === 0 ? "nowhere" : states.map(([word, number]) => html`<span class="s-${word}"><span class="mark"
    aria-hidden="true">${MARKS[word]}</span> ${count(number)} ${word}</span> `);
}

function pauseView(model, again) {
  const word = model.paused ? "Resume" : "Pause";
  return html`<button class="small" @click=${(event) => pauseModel(event, model, again)} aria-label="${word} ${plain(model.name)}">${word}</button>`;
}

// One of them.

function modelView(name, again) {
  const model = known.models?.find((one) => one.name === name);
  if (model === undefined) {
    return html`<section id="model" class="panel"><h2>${plain(name)}</h2><p class="muted" role="status">${
      known.models === null ? "Asking…" : "There is no such model."}</p></section>`;
  }
  const names = new Set([name, ...model.stands_for]);
  const nodes = [...state.nodes.values()].filter((node) => node.router === undefined && node.loadable === undefined
    && node.models.some((one) => names.has(one)));
  const placements = known.placements.filter((one) => names.has(one.model));
  const facts = [
    ["Where", statesView(model)],
    ["Stands for", model.stands_for.map((one) => html`${linkView("models", one)} `)],
    ["Slots", `${model.slots_busy} of ${plural(model.slots_total, "slot")} busy, ${plural(model.waiting, "request")} waiting`],
    ["Differs", plain(model.differences.join("; "))],
  ].filter(([, value]) => value.length !== 0);
  return html`<section id="model" class="panel" aria-labelledby="model-title">
    <div class="bar"><h2 id="model-title">${plain(name)}${model.paused ? html` <b class="tag">paused</b>` : nothing}</h2>
      ${isOperator() ? html`${pauseView(model, again)}<a href=${href("requests", "", { model: name })}>Its requests</a>` : nothing}</div>
    <dl>${facts.map(([word, value]) => html`<dt>${word}</dt><dd>${value}</dd>`)}</dl>
    ${placements.length === 0 ? nothing : html`<h3>Routers that can load it</h3>${tableView("Routers that can load it",
      ["Router", "State", "Since", "#Memory", "#Requests", "#Loads", "#Seconds a load", "Pinned by", actions()], placements,
      (one) => placementCells(one, again), { key: (one) => one.node, word: "more router" })}`}
    ${nodes.length === 0 ? nothing : html`<h3>Nodes that always have it</h3>${tableView("Nodes that always have it",
      ["Node", "State", "#Slots busy", "#Writes", "#Reads", "#Requests"], nodes, (node) => [linkView("nodes", node.name), markView(node.state),
        `${node.slots_busy} of ${node.slots_total}`, `${rate(node.decode_tps)} tokens/s`, `${rate(node.prefill_tps)} tokens/s`, count(node.requests)], { word: "more node" })}`}
  </section>${memoriesView(names)}${isOperator() ? usedView(name) : nothing}`;
}

function placementCells(one, again) {
  const orders = [one.state === "unloaded" || one.state === "failed" ? "load" : "unload",
    ...(one.pinned_by === null ? ["pin"] : one.pinned_by === "operator" ? ["unpin"] : [])];
  return [
    linkView("nodes", one.node),
    html`${markView(one.state)}${one.state === "loading" && one.progress !== null ? `, ${percent(one.progress)}` : nothing}
      <span class="muted">${plain(one.reason)}</span>`,
    one.since === null ? "–" : moment(one.since, state.at),
    one.memory === null ? "unknown" : size(one.memory),
    count(one.requests),
    `${count(one.loads)}${one.load_failures === 0 ? "" : `, ${count(one.load_failures)} failed in a row`}`,
    one.loads === 0 ? `${seconds(one.expected_load_seconds)} expected` : seconds(one.load_seconds / one.loads),
    one.pinned_by ?? "–",
    orders.map((verb) => html`<button class="small" @click=${(event) => order(event, verb, one, again)}
      aria-label="${verb} ${plain(one.model)} on ${plain(one.node)}">${verb}</button> `),
  ];
}

function usedView(name) {
  const { used, more } = known;
  return html`<section id="used" class="panel" aria-labelledby="used-title"><h2 id="used-title">Who used it <small>in the last seven days</small></h2>
    ${used === null ? html`<p class="muted" role="status">${known.trouble ? nothing : "Asking the ledger…"}</p>`
      : used.length === 0 ? html`<p class="muted">Nobody.</p>`
      : tableView("Who used it", ["Caller", "#Requests", "#Failed", "#Prompt tokens", "#of them cached", "#Answer tokens", "#Cost"], used,
        (row) => [html`<a href=${href("requests", "", { key: row.key, model: name })} title=${plain(row.key)}>${plain(row.key_name ?? row.key)}</a>`,
          count(row.requests), count(row.failures), count(row.prompt_tokens), row.prompt_tokens === 0 ? "–" : percent(row.cached_tokens / row.prompt_tokens),
          count(row.completion_tokens), money(row.cost)], { key: (row) => row.key, word: "more caller" })}
    ${more ? html`<p class="muted">Only the ${count(MOST_GROUPS)} dearest pairs of caller and model were looked at.</p>` : nothing}
  </section>`;
}

function linkView(page, name) {
  return html`<a href=${href(page, name)}>${plain(name)}</a>`;
}

function markView(word) {
  return html`<span class="s-${word}"><span class="mark" aria-hidden="true">${MARKS[word]}</span> ${word}</span>`;
}

// The memory of hosts: all of them, or those on which a model of these names has a place.

function memoriesView(names) {
  const byHost = new Map(Object.keys(state.summary.hosts ?? {}).map((host) => [host, []]));
  for (const node of state.nodes.values()) if (node.router !== undefined) byHost.get(node.host)?.push(node);
  const isOf = (node) => names !== undefined && node.models.some((one) => names.has(one));
  const hosts = [...byHost].filter(([, nodes]) => names === undefined || nodes.some(isOf));
  if (hosts.length === 0) return nothing;
  return html`<section id="models" class="panel" aria-labelledby="models-title">
    <h2 id="models-title">Models in memory</h2>
    <ul class="memories">${repeat(hosts.slice(0, MOST_HOSTS), ([host]) => host,
      ([host, nodes]) => hostView(host, state.summary.hosts[host], nodes, isOf))}</ul>
    ${moreView(hosts.length - MOST_HOSTS, "more host")}
  </section>`;
}

function hostView(host, use, models, isOf) {
  const held = models.filter((node) => HELD.has(node.state)).sort((a, b) => (b.memory ?? 0) - (a.memory ?? 0));
  const listed = [...held, ...models.filter((node) => !HELD.has(node.state))];
  const told = use.memory === null ? `${size(use.used)} taken; how much it has is not known`
    : `${size(use.used)} of ${size(use.memory)} taken`;
  const unknown = use.unknown === 0 ? "" : `, and ${plural(use.unknown, "model")} of unknown size`;
  return html`<li class="memory"><h3>${plain(host)} <small>${told}${unknown}</small></h3>
    ${barOf(held.slice(0, MOST_DRAWN), use, isOf)}
    <ul class="held">${repeat(listed.slice(0, MOST_DRAWN), (node) => node.name, heldView)}</ul>
    ${moreView(listed.length - MOST_DRAWN, "more model")}
  </li>`;
}

/** The bar has no text: the list below it tells the same. */
function barOf(held, use, isOf) {
  const whole = Math.max(use.memory ?? 0, use.used, 1);
  const wanted = held.map((node) => (node.memory === null ? UNKNOWN : Math.max(LEAST, (WIDTH * node.memory) / whole)));
  const scale = Math.min(1, WIDTH / Math.max(1, wanted.reduce((sum, one) => sum + one, 0)));
  let left = 0;
  const parts = held.map((node, place) => {
    const width = wanted[place] * scale;
    const [x, inner] = [left, Math.max(1, width - 2)];
    left += width;
    const done = node.state === "loading" ? node.progress ?? 0 : 1;
    return svg`<rect class="place" x=${x} y="0" width=${inner} height="22"></rect>
      <rect class="filled s-${node.state} ${isOf(node) ? "own" : ""}" x=${x} y="0" width=${inner * done} height="22"></rect>`;
  });
  return html`<svg class="memory-bar" viewBox="0 0 ${WIDTH} 22" preserveAspectRatio="none" aria-hidden="true">${parts}</svg>`;
}

function heldView(node) {
  const words = node.state === "loading" && node.progress !== null ? `loading, ${percent(node.progress)}` : node.state;
  const pinned = node.pinned_by === null ? "" : ", pinned";
  const busy = node.slots_total === 0 ? "" : `, ${node.slots_busy} of ${plural(node.slots_total, "slot")} busy`;
  return html`<li class="s-${node.state}" data-model=${node.name}><span class="mark" aria-hidden="true">${MARKS[node.state]}</span>
    ${linkView("nodes", node.name)}
    <span class="muted">${words}, ${node.memory === null ? "size unknown" : size(node.memory)}${busy}${pinned}</span></li>`;
}

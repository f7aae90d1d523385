// Requests, without their text: those that wait and run, and those that have ended, from the ledger.
// What is shown of them stands in the address; each has an address of its own (`why.js`).

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { cancel } from "./actions.js";
import { keepAsking } from "./ask.js";
import { count, money, moment, plain, plural, rate, seconds } from "./format.js";
import { legendView, lifeOf, stripView, wordsOf } from "./life.js";
import { go, href } from "./route.js";
import { state } from "./state.js";
import { cutView, tableView } from "./table.js";
import * as why from "./why.js";

const FEW = 14;
const ORDER = { writing: 0, reading: 1, waiting: 2 };
const PAGE_ROWS = 100;
/** Names that a field suggests. */
const MOST_NAMES = 200;
/** Seconds from one look at the ledger to the next, and how often a look's own time they are. */
const [LOOK_AGAIN, LOOK_SHARE] = [5, 20];
const DAY = 86_400_000;

/** The filters by their names in the address: the word before the field, and what it takes. */
const FILTERS = {
  __proto__: null,
  key: ["Caller", { placeholder: "key" }],
  group: ["Group", {}],
  user: ["End user", {}],
  model: ["Model", { list: "filter-models" }],
  node: ["Node", { list: "filter-nodes" }],
  class: ["Class", { options: [["", "any"], "urgent", "premium", "normal", "batch"] }],
  outcome: ["Outcome", { options: [["", "any"], ["ok", "answered"], ["failed", "failed"], ["left", "left by the client"]] }],
  slower: ["Slower than", { placeholder: "seconds" }],
  since: ["Since", { placeholder: "2h, 7d, 2026-11-23" }],
  until: ["Until", { placeholder: "now" }],
  order: ["Order", { options: [["", "latest first"], ["slowest", "slowest first"]] }],
};
/** As the admin API calls them, where it calls them otherwise. */
const PARAMETERS = { __proto__: null, slower: "slower_than" };
/** What can be said of a request that still runs. */
const OF_RUNNING = {
  __proto__: null,
  key: (row, value) => row.caller === value || row.caller_name === value,
  model: (row, value) => row.model === value,
  node: (row, value) => row.node === value,
  class: (row, value) => row.class === value,
  slower: (row, value) => state.at - row.received_at > Number(value),
  since: () => true,
  order: () => true,
};

let showsAll = false;
let ended = null;
let stop = () => {};

export function enter(route, redraw) {
  if (route.id !== "") why.enter(route, redraw);
  else if (ended?.words === String(route.query)) look(route, redraw);
}

export function leave() {
  why.leave();
  stop();
  // The next key may not see what this one has shown.
  if (state.summary === null) ended = null;
}

export function view(route, redraw) {
  if (route.id !== "") return why.view(route, redraw);
  if (ended?.words !== String(route.query)) follow(route, redraw);
  const today = Math.floor(state.at * 1000 / DAY);
  return html`${guard([route, state.summary.models.length, state.nodes.size, today], () => filtersView(route, today))}
    ${runningView(route, redraw)}${guard([ended], () => endedView(route, redraw))}`;
}

/** Show what the address has come to ask for. */
function follow(route, redraw) {
  ended = { words: String(route.query), rows: null, next: null, readSince: null, trouble: "" };
  for (const field of document.querySelector("#filters form")?.elements ?? []) {
    if (field.name) field.value = route.query.get(field.name) ?? "";
  }
  look(route, redraw);
}

// The filters.

function filtersView(route, today) {
  return html`<section id="filters" class="panel" aria-label="Filters">
    <form @change=${apply} @submit=${apply}>${Object.entries(FILTERS).map(([name, [label, field]]) => html`<label>${label}
      ${fieldView(name, field, route.query.get(name) ?? "")}</label>`)}
      <datalist id="filter-models">${state.summary.models.slice(0, MOST_NAMES).map((name) => html`<option value=${name}></option>`)}</datalist>
      <datalist id="filter-nodes">${[...state.nodes.keys()].slice(0, MOST_NAMES).map((name) => html`<option value=${name}></option>`)}</datalist>
      <span class="actions"><button type="submit" class="small">Show</button></span></form>
    ${legendView(["queue", "reading", "writing", "other"])}
    <p class="links">${presets(today).map(([words, query]) => html`<a href=${href("requests", "", query)}
      aria-current=${String(new URLSearchParams(query)) === String(route.query) ? "true" : nothing}>${words}</a>`)}</p>
  </section>`;
}

function fieldView(name, { options, list, placeholder = "" }, value) {
  if (options === undefined) {
    return html`<input name=${name} .value=${value} maxlength="256" autocomplete="off" spellcheck="false" placeholder=${placeholder}
      list=${list ?? nothing}>`;
  }
  const known = options.map((one) => (Array.isArray(one) ? one : [one, one]));
  // An address may name one outcome of the many, such as queue_timeout.
  if (known.every(([word]) => word !== value)) known.push([value, value]);
  return html`<select name=${name}>${known.map(([word, label]) => html`<option value=${word} ?selected=${word === value}>${plain(label)}</option>`)}</select>`;
}

function apply(event) {
  event.preventDefault();
  const fields = [...event.currentTarget.elements].filter((field) => field.name && field.value.trim());
  go(href("requests", "", fields.map((field) => [field.name, field.value.trim()])));
}

/** Days are those of the ledger, which are UTC's. */
function presets(today) {
  const day = (before) => new Date((today - before) * DAY).toISOString().slice(0, 10);
  return [
    ["All", {}],
    ["Slowest today", { since: day(0), order: "slowest" }],
    ["Slowest yesterday", { since: day(1), until: day(1), order: "slowest" }],
    ["Failed today", { since: day(0), outcome: "failed" }],
    ["Failed yesterday", { since: day(1), until: day(1), outcome: "failed" }],
  ];
}

// Those that wait and run.

function runningView(route, redraw) {
  const filters = [...route.query].filter(([, value]) => value !== "");
  if (filters.some(([name]) => OF_RUNNING[name] === undefined)) return nothing;
  const rows = [...state.requests.values()].filter((row) => filters.every(([name, value]) => OF_RUNNING[name](row, value)));
  rows.sort((a, b) => (ORDER[a.state] - ORDER[b.state]) || (a.position ?? 0) - (b.position ?? 0) || a.received_at - b.received_at);
  const shown = showsAll ? rows : rows.slice(0, FEW);
  const longest = Math.max(...shown.map(ageOf), 0);
  const inFlight = state.summary.in_flight;
  const unlisted = filters.length === 0 ? inFlight - rows.length : 0;
  return html`<section id="requests" class="panel" tabindex="-1" aria-labelledby="requests-title">
    <h2 id="requests-title">Requests in flight <small>${count(inFlight)}</small></h2>
    ${rows.length === 0 ? html`<p class="muted">${inFlight === 0 || filters.length === 0 ? "Nothing waits and nothing runs."
      : "None that waits or runs is like that."}</p>` : html`${tableView("Requests in flight", ["Request", "State", "Class", "Model", "Caller", "Node",
      "#Age", "#TTFT", "#Tokens", "#Tokens/s", "Actions"], shown, (row) => runningCells(row, longest), { most: shown.length })}
    ${rows.length > FEW || unlisted > 0 ? html`<p class="muted">
      ${rows.length > FEW ? html`<button @click=${() => { showsAll = !showsAll; redraw(); }}>
        ${showsAll ? "Show fewer" : `Show ${rows.length}`}</button>` : nothing}
      ${unlisted > 0 ? `${count(unlisted)} more are not listed.` : nothing}</p>` : nothing}`}
  </section>`;
}

function ageOf(row) {
  return Math.max(0, Math.round(state.at - row.received_at));
}

function runningCells(row, longest) {
  const age = ageOf(row);
  const expected = row.expected_start === null ? "" : `, in ${seconds(row.expected_start)}`;
  return [
    nameView(row.id, row.request_id),
    html`<span class="phase ${row.state}">${row.state}</span>${row.state === "waiting"
      ? html` <span class="muted">place ${row.position}${expected}</span>`
      : lifeView({ ...row, seconds: age, wait_seconds: row.queue_seconds, ttft_seconds: row.ttft ?? age }, longest)}`,
    row.class, cutView(row.model), cutView(row.caller_name ?? row.caller, row.caller),
    html`${cutView(row.node)}${row.attempts > 1 ? html` <span class="muted">attempt ${row.attempts}</span>` : nothing}`,
    seconds(age), seconds(row.ttft), `${count(row.prompt_tokens)} + ${count(row.tokens)}`, rate(row.tokens_per_second),
    html`<button class="small" @click=${(event) => cancel(event, row.id, row.request_id)}
      aria-label="Cancel request ${plain(row.request_id)}">Cancel</button>`,
  ];
}

/** Its life so far, on a scale that is `longest` seconds long, and the same in words. */
function lifeView(row, longest) {
  const life = lifeOf(row);
  return html`${stripView(life, longest)}<span class="muted">${wordsOf(life, row)}</span>`;
}

function nameView(id, name) {
  return html`<a href=${href("requests", id)} title=${plain(name)}><span class="unseen">Why request ${plain(name)}</span><code
    aria-hidden="true">${plain(name.length <= 14 ? name : `…${name.slice(-10)}`)}</code></a>`;
}

// Those that have ended.

/** Look into the ledger, and again after some time if the latest are shown. */
function look(route, redraw) {
  stop();
  const query = new URLSearchParams({ limit: PAGE_ROWS });
  for (const [name, value] of route.query) {
    if (value !== "" && (name in FILTERS || name === "before")) query.set(PARAMETERS[name] ?? name, value);
  }
  stop = keepAsking(async (get) => {
    // What the reader points at stays where it is.
    if (ended.rows !== null && document.querySelector("#ended table:is(:hover, :focus-within)") !== null) return LOOK_AGAIN;
    const begun = performance.now();
    const found = await get(`admin/requests/ended?${query}`);
    ended = { ...ended, rows: found.requests, next: found.next, readSince: found.complete ? null : found.since };
    return route.query.has("before") ? 0 : Math.max(LOOK_AGAIN, LOOK_SHARE * (performance.now() - begun) / 1000);
  }, (trouble) => {
    ended = { ...ended, trouble };
    redraw();
  });
}

function endedView(route, redraw) {
  const { rows, next, readSince, trouble } = ended;
  const longest = Math.max(...(rows ?? []).map((row) => row.seconds), 0);
  const filters = [...route.query].filter(([name]) => name !== "before");
  return html`<section id="ended" class="panel" tabindex="-1" aria-labelledby="ended-title">
    <div class="bar"><h2 id="ended-title">Ended <small>${rows === null ? nothing : `${plural(rows.length, "request")} of this page`}</small></h2>
      <button class="small" @click=${() => look(route, redraw)}>Look again</button></div>
    <p class="error" role="alert">${plain(trouble)}</p>
    ${rows === null ? html`<p class="muted" role="status">${trouble ? nothing : "Asking the ledger…"}</p>`
        : rows.length === 0 ? html`<p class="muted">None that has ended is like that.</p>`
      : tableView("Requests that have ended", ["Request", "Ended", "Outcome", "#Seconds", "Its life", "Class", "Model", "Caller", "Node",
        "#Tokens", "#Cost"], rows, (row) => endedCells(row, longest))}
    ${readSince === null ? nothing : html`<p class="muted">Only what ended since ${moment(readSince, state.at)} was read, since more takes too long.</p>`}
    <p class="links">${route.query.has("before") ? html`<a href=${href("requests", "", filters)}>First page</a>` : nothing}
      ${next === null ? nothing : html`<a href=${href("requests", "", [...filters, ["before", next]])}>Next page</a>`}</p>
  </section>`;
}

function endedCells(row, longest) {
  const isBad = row.outcome !== "ok";
  return [
    nameView(row.id, row.client_request_id ?? row.id),
    moment(row.ended_at, state.at),
    html`<span class=${isBad ? "bad" : ""}><span aria-hidden="true">${isBad ? "✕" : "✓"}</span> ${row.status} ${plain(row.outcome)}</span>`,
    seconds(row.seconds),
    lifeView(row, longest),
    row.class, cutView(row.model), cutView(row.key_name ?? row.key, row.key), cutView(row.node),
    `${count(row.prompt_tokens)} + ${count(row.completion_tokens)}`,
    money(row.cost),
  ];
}

// Batches of all keys: what they wait for and when they end, a batch's own page, and uploads.

import { html, nothing, svg } from "./vendor/lit-html/lit-html.js";
import { act, confirmed, download, save, toast } from "./actions.js";
import { ask, keepAsking } from "./ask.js";
import { count, money, plain, plural, rate, seconds } from "./format.js";
import { go, href, setQuery } from "./route.js";
import { state } from "./state.js";
import { cutView, tableView } from "./table.js";

const POLL_SECONDS = 3;
const PAGE = 50;
/** Names of keys that the fields suggest. */
const MOST_KEYS = 200;
const LIST = "admin/batches?";
const WIDTH = 1000;
const STATES = { "": "all", unfinished: "not ended", ended: "ended" };
const WINDOWS = ["1h", "6h", "24h", "7d"];
const ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank"];
const RECKONED = {
  speed: "at the speed of its last minutes",
  nodes: "if it has all slots of its nodes from then on",
};
const CHANGED = { pause: "No more of its lines begin.", resume: "Its lines run again.", cancel: "Its waiting lines are cancelled." };
const OVER = new Set(["completed", "failed", "expired", "cancelled"]);

/** What the page has been told: the list, or the one batch; why it could not be told. */
let list = { batches: [], next: null };
let batch = null;
let trouble = "";
let keys = [];
let isLoaded = false;
let upload = { busy: false, trouble: "", endpoint: ENDPOINTS[0] };
/** The path that is asked, and what ends that. */
let question = "";
let stop = () => {};

export function depends(route) {
  return [state.versions.page, state.role, route.query];
}

export function enter(route, redraw) {
  askFor(questionOf(route), redraw);
}

/** What a key was shown is gone with it. */
export function leave() {
  stop();
  question = "";
  [list, batch, keys] = [{ batches: [], next: null }, null, []];
  [trouble, isLoaded] = ["", false];
}

/** A filter, and a link to older batches, enter no other page. */
function follow(route, redraw) {
  if (question !== questionOf(route)) askFor(questionOf(route), redraw);
}

function askFor(path, redraw) {
  stop();
  question = path;
  const isList = path.startsWith(LIST);
  stop = keepAsking(async (get) => {
    const answer = await get(path);
    if (isList) list = answer;
    else batch = answer;
    // Only admins may list keys; others type the name.
    if (isList && !isLoaded && state.role === "admin") {
      const found = await get(`admin/keys?limit=${MOST_KEYS}`).catch(() => ({ keys: [] }));
      keys = found.keys.map((key) => key.name ?? key.id);
    }
    return isList || !OVER.has(batch.status) ? POLL_SECONDS : 0;
  }, (words, error) => {
    [trouble, isLoaded] = [words, true];
    if (error?.status === 404) batch = null;
    redraw();
  }, POLL_SECONDS);
}

function questionOf({ id, query }) {
  if (id !== "") return pathOf(id);
  const words = new URLSearchParams({ limit: PAGE });
  for (const name of ["key", "state", "before"]) if (query.get(name)) words.set(name, query.get(name));
  return `${LIST}${words}`;
}

function pathOf(id, action = "") {
  return `admin/batches/${encodeURIComponent(id)}${action && `/${action}`}`;
}

export function view(route, redraw) {
  queueMicrotask(() => follow(route, redraw));
  if (trouble !== "" && (route.id !== "" ? batch === null : list.batches.length === 0)) {
    return html`<section id="batches" class="panel"><h2>${route.id === "" ? "Batches" : plain(route.id)}</h2>
      <p class="error" role="alert">${plain(trouble)}</p>${route.id === "" ? nothing : backView()}</section>`;
  }
  if (!isLoaded) return html`<p class="loading">Asking for batches…</p>`;
  return route.id === "" ? html`${uploadView(redraw)}${listView(route, redraw)}` : batchView(route, redraw);
}

// The list.

function listView(route, redraw) {
  const filter = (name) => (event) => {
    setQuery("before", "");
    setQuery(name, event.target.value.trim());
    redraw();
  };
  const { query } = route;
  return html`<section id="batches" class="panel" aria-labelledby="batches-title">
    <h2 id="batches-title">Batches</h2>
    <div class="bar"><label>Key <input type="search" list="batch-keys" maxlength="256" .value=${query.get("key") ?? ""} @change=${filter("key")}></label>
      <label>Show <select @change=${filter("state")}>${Object.entries(STATES).map(([value, word]) => html`<option
        value=${value} ?selected=${value === (query.get("state") ?? "")}>${word}</option>`)}</select></label></div>
    ${list.batches.length === 0 ? html`<p class="muted">There are no such batches.</p>` : html`
    ${tableView("List of batches", ["Batch", "Key", "State", "Lines", "#Failed", "Waits for", "Due", "#Cost"], list.batches, cellsOf)}`}
    <p class="bar">${query.get("before") ? html`<a href=${href("batches", "", without(query, "before"))}>The newest</a>` : nothing}
      ${list.next === null ? nothing : html`<a href=${href("batches", "", { ...without(query, "before"), before: list.next })}>Older ones</a>`}</p>
  </section>`;
}

function without(query, name) {
  const rest = Object.fromEntries(query);
  delete rest[name];
  return rest;
}

function cellsOf(one) {
  const why = one.llama_gateway.why_waiting;
  return [
    html`<a href=${href("batches", one.id)}><code title=${plain(one.id)}>${plain(shortened(one.id))}</code></a>`,
    cutView(one.key_name ?? one.key, one.key), stateOf(one),
    html`${barOf(one)} ${count(endedOf(one))} of ${count(one.request_counts.total)}`, count(one.request_counts.failed),
    why === null ? "–" : cutView(`${words(why.reason)}${sinceOf(why)}`, why.message),
    OVER.has(one.status) ? `ended ${timeOf(one.ended_at)}` : timeOf(one.expires_at),
    one.llama_gateway.cost ? money(one.llama_gateway.cost) : "–",
  ];
}

// One batch.

function batchView(route, redraw) {
  const own = batch.llama_gateway;
  const counts = batch.request_counts;
  const isOver = OVER.has(batch.status);
  const facts = [
    ["Key", html`${plain(batch.key_name ?? batch.key)} <code>${plain(batch.key)}</code>`],
    ["Group", batch.group && plain(batch.group)], ["End user", batch.user && plain(batch.user)],
    ["Endpoint", plain(batch.endpoint)], ["Model", batch.model && plain(batch.model)],
    ["Created", timeOf(batch.created_at)],
    [isOver ? "Ended" : "Deadline", timeOf(isOver ? batch.ended_at : batch.expires_at)],
    ["Expected start", own.expected_start && aheadOf(own.expected_start)],
    ["Expected end", endOf(batch)],
    ["Tokens", `${count(batch.usage.input_tokens)} read, ${count(batch.usage.output_tokens)} written${
      own.tokens_per_second ? `, ${rate(own.tokens_per_second)}/s` : ""}`],
    ["Cost", own.cost || own.expected_cost ? `${money(own.cost)}${
      isOver || own.expected_cost === null ? "" : ` so far, about ${money(own.expected_cost)} in all`}` : null],
    ["Lines", `${count(counts.completed)} done, ${count(counts.failed)} failed${own.running ? `, ${count(own.running)} running` : ""}${
      own.waiting ? `, ${count(own.waiting)} waiting` : ""}${own.cancelled ? `, ${count(own.cancelled)} cancelled` : ""}${
      own.expired ? `, ${count(own.expired)} expired` : ""}`],
  ];
  return html`<section id="batch" class="panel" aria-labelledby="batch-title">
    ${backView()}
    <h2 id="batch-title">${plain(batch.id)}</h2>
    <p class="bar"><b>${stateOf(batch)}</b> ${barOf(batch)} ${count(endedOf(batch))} of ${plural(counts.total, "line")}</p>
    ${trouble === "" ? nothing : html`<p class="error" role="alert">${plain(trouble)} Trying again…</p>`}
    ${whyView(own.why_waiting)}
    ${(batch.errors?.data ?? []).map((one) => html`<p class="error"><span aria-hidden="true">✕</span> ${plain(one.message)}</p>`)}
    <dl class="facts">${facts.map(([name, value]) => (value ? html`<dt>${name}</dt><dd>${value}</dd>` : nothing))}</dl>
    ${errorsView(batch.errors_by_kind ?? [])}
    <p class="actions">
      ${isOver ? nothing : html`<button @click=${(event) => change(event.currentTarget, own.paused ? "resume" : "pause", route, redraw)}
        >${own.paused ? "Resume" : "Pause"}</button>`}
      <button ?disabled=${counts.completed === 0} @click=${(event) => download(event, pathOf(batch.id, "results"), `${batch.id}_results.jsonl`)}>Download results</button>
      <button ?disabled=${endedOf(batch) === counts.completed} @click=${(event) => download(event, pathOf(batch.id, "errors"), `${batch.id}_errors.jsonl`)}>Download errors</button>
      ${isOver || batch.status === "cancelling" ? nothing : html`<button @click=${(event) => cancel(event, route, redraw)}>Cancel</button>`}
    </p>
  </section>`;
}

function backView() {
  return html`<p><a href=${href("batches")}>All batches</a></p>`;
}

function whyView(why) {
  if (why === null) return nothing;
  return html`<div class="problem notice" role="status"><h3>It waits: ${words(why.reason)}</h3>
    <p>${plain(why.message)}${why.since === null ? "" : ` It has waited since ${timeOf(why.since)}.`}${
      why.until === null ? "" : ` That is over ${aheadOf(why.until)}.`}</p></div>`;
}

function endOf({ status, expires_at: due, llama_gateway: own }) {
  if (OVER.has(status)) return null;
  if (own.expected_end === null) return "not known yet";
  const late = own.expected_end - due;
  return html`${aheadOf(own.expected_end)}, ${RECKONED[own.expected_by] ?? ""}: ${late > 0
    ? html`<b class="error">${seconds(late)} after the deadline</b>` : `${seconds(-late)} before the deadline`}`;
}

function errorsView(kinds) {
  if (kinds.length === 0) return nothing;
  return html`<h3>Errors by kind</h3>${tableView("Table of errors", ["Error", "#Lines", "#First line"],
    kinds, (kind) => [html`<code>${plain(kind.code)}</code>`, count(kind.lines), kind.first_line], { key: (kind) => kind.code })}`;
}

async function change(button, action, route, redraw) {
  await act(button, "POST", pathOf(route.id, action), () => CHANGED[action]);
  if (question === questionOf(route)) askFor(question, redraw);
}

async function cancel(event, route, redraw) {
  const button = event.currentTarget;
  const left = plural(batch.request_counts.total - endedOf(batch), "line");
  if (await confirmed(`Cancel this batch? ${left} will never run; what is done stays.`, "Cancel it")) change(button, "cancel", route, redraw);
}

// Uploads.

function uploadView(redraw) {
  const known = new Set([...keys, ...list.batches.map((one) => one.key_name ?? one.key)]);
  return html`<details id="upload" class="panel"><summary>Upload a batch</summary>
    <form @submit=${(event) => { event.preventDefault(); send(event.target, redraw); }}>
      <label>For the key <input name="key" list="batch-keys" maxlength="256" autocomplete="off" aria-describedby="upload-key"></label>
      <datalist id="batch-keys">${[...known].map((name) => html`<option value=${plain(name)}></option>`)}</datalist>
      <label>File <input name="file" type="file" accept=".jsonl,.json,.txt" required @change=${(event) => look(event.target, redraw)}></label>
      <label>Endpoint <select name="endpoint">${ENDPOINTS.map((path) => html`<option ?selected=${path === upload.endpoint}>${path}</option>`)}</select></label>
      <label>Done within <select name="window">${WINDOWS.map((word) => html`<option ?selected=${word === "24h"}>${word}</option>`)}</select></label>
      <span class="actions"><button type="submit" class="primary" ?disabled=${upload.busy}>${upload.busy ? "Uploading…" : "Upload"}</button>
        <button type="button" @click=${() => save(new Blob([template()]), "batch-template.jsonl")}>Download a template</button></span>
      <p id="upload-key" class="muted wide">The batch is that key's: its rights, its limits, its bill. Without keys leave it empty. A table (CSV)
        goes by <code>llama-gateway batch submit FILE.csv --template …</code></p>
      <p class="error wide" role="alert">${plain(upload.trouble)}</p>
    </form></details>`;
}

/** Lines as the file must have them, for a model that there is. */
function template() {
  const [model] = state.summary.models;
  return ["What is a llama?", "Say it in one word."].map((content, number) => `${JSON.stringify({
    custom_id: `line-${number + 1}`, method: "POST", url: "/v1/chat/completions",
    body: { ...(model && { model }), messages: [{ role: "user", content }], max_tokens: 100 },
  })}\n`).join("");
}

/** Choose the endpoint that the file's first line names. */
async function look(input, redraw) {
  upload.trouble = "";
  try {
    const [line] = (await input.files[0].slice(0, 65_536).text()).split("\n", 1);
    const { url } = JSON.parse(line);
    if (ENDPOINTS.includes(url)) upload.endpoint = url;
  } catch {
    // A long line, or none: the gateway tells what is wrong with it.
  }
  redraw();
}

async function send(form, redraw) {
  if (upload.busy) return;
  const { key, file, endpoint, window: time } = form.elements;
  const query = new URLSearchParams({ endpoint: endpoint.value, completion_window: time.value });
  if (key.value.trim()) query.set("key", key.value.trim());
  const body = new FormData();
  body.set("purpose", "batch");
  body.set("file", file.files[0]);
  upload = { ...upload, busy: true, trouble: "" };
  redraw();
  try {
    const made = await (await ask("POST", `admin/batches?${query}`, { form: body })).json();
    form.reset();
    toast("The batch is there; its lines are being read.");
    go(href("batches", made.id));
  } catch (error) {
    upload.trouble = error.message;
  }
  upload.busy = false;
  redraw();
}

// Words.

const endedOf = ({ request_counts: counts, llama_gateway: own }) => counts.completed + counts.failed + own.cancelled + own.expired;
const words = (reason) => plain(reason).replaceAll("_", " ");
const stateOf = (one) => (one.llama_gateway.paused ? "paused" : words(one.status));
const sinceOf = (why) => (why.since === null ? "" : `, since ${timeOf(why.since)}`);

function shortened(id) {
  return id.length <= 18 ? id : `${id.slice(0, 8)}…${id.slice(-8)}`;
}

function timeOf(at) {
  if (at === null) return "–";
  const then = new Date(at * 1000);
  const isNear = Math.abs(Date.now() - then) < 72_000_000;
  return isNear ? then.toLocaleTimeString() : then.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

function aheadOf(at) {
  return `about ${timeOf(at)} (in ${seconds(Math.max(0, at - Date.now() / 1000))})`;
}

/** How its lines have ended; the words beside it tell the same. */
function barOf({ request_counts: counts, llama_gateway: own }) {
  const whole = Math.max(1, counts.total);
  let left = 0;
  const parts = [["filled", counts.completed], ["filled s-failed", counts.failed + own.cancelled + own.expired], ["filled s-loading", own.running ?? 0]]
    .map(([name, lines]) => {
      const [x, width] = [left, (WIDTH * lines) / whole];
      left += width;
      return svg`<rect class=${name} x=${x} y="0" width=${width} height="10"></rect>`;
    });
  return html`<svg class="memory-bar lines" viewBox="0 0 ${WIDTH} 10" preserveAspectRatio="none" aria-hidden="true">${parts}</svg>`;
}

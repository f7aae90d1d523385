// A caller's own page: what its key has used, what is left, its requests, and how to connect.

import { html, nothing, render } from "./vendor/lit-html/lit-html.js";
import { copy } from "./actions.js";
import { fetchJson, keepAsking, setKey } from "./ask.js";
import { snippetsOf } from "./connect.js";
import { count, money, plain, seconds } from "./format.js";
import { focusKey, keyForm } from "./key.js";
import { cutView, tableView } from "./table.js";
import { costs, daysView, inWords, limitsView, selectView, sumsView, timeOf } from "./usage.js";

const REFRESH_SECONDS = 30;
/** Requests that are asked for at once, and that the page keeps. */
const [PAGE_ROWS, MOST_ROWS] = [50, 1000];

const page = document.getElementById("page");

const NOTHING = { use: null, requests: [], next: null, unread: "", models: [], trouble: "", wantsKey: false };
const mine = { ...NOTHING };
/** The key as it was typed, for the snippets that shall have it; the requests have it from `ask.js`. */
let typedKey = "";
let chosen = { client: "", model: "", withKey: false };
let hasFocus = false;
let stop = () => {};

function draw() {
  render(headerView(), document.getElementById("top"));
  render(mine.wantsKey ? keyForm("Your API key is needed", "API key", mine.trouble, useKey) : pageView(), page);
  if (mine.wantsKey && !hasFocus) focusKey();
  hasFocus = mine.wantsKey;
}

function headerView() {
  const { use } = mine;
  return html`<h1>Your use</h1>
    <p class="headline">${use === null ? "" : html`${plain(use.name || use.key)}${use.group === null ? "" : `, group ${plain(use.group)}`}`}</p>
    <p class="about">${use === null ? nothing : html`<span class="muted">classes up to ${plain(use.max_class)}</span>
      <button class="small" @click=${refresh}>Refresh</button>
      ${typedKey === "" ? nothing : html`<button class="small" @click=${forget}>Forget the key</button>`}`}</p>`;
}

function pageView() {
  const { use, trouble } = mine;
  const told = trouble === "" ? nothing : html`<p class="error" role="alert">${plain(trouble)}</p>`;
  if (use === null) return html`${told}<p class="loading">Asking the gateway…</p>`;
  return html`${told}${limitsPanel(use)}${usePanel(use)}${requestsPanel()}${connectPanel(use)}`;
}

function limitsPanel(use) {
  const sizes = [["prompt", use.largest_prompt_tokens], ["answer", use.largest_completion_tokens]]
    .filter(([, most]) => most !== null).map(([what, most]) => `${what} of at most ${count(most)} tokens`);
  return html`<section id="limits" class="panel" aria-labelledby="limits-title"><h2 id="limits-title">Limits</h2>
    ${limitsView(use.limits)}
    ${sizes.length === 0 ? nothing : html`<p class="muted">Of one request: ${sizes.join(", ")}.</p>`}</section>`;
}

function usePanel({ today, month, as_of: at, reason }) {
  return html`<section id="use" class="panel" aria-labelledby="use-title"><h2 id="use-title">Use ${
    at === null ? nothing : html`<small>as of ${timeOf(at)}</small>`}</h2>
    ${month === null ? html`<p class="muted">${plain(reason)}</p>` : html`
      <dl class="sums"><dt>Today</dt><dd>${inWords(today)}</dd><dt>This month</dt><dd>${inWords(month)}</dd></dl>
      ${daysView(month.days, ", this month", month.since, today.since)}
      ${month.models.length === 0 ? nothing : sumsView(month.models, "Model", "model", (row) => cutView(row.model ?? "none"), "This month by model")}`}
  </section>`;
}

function requestsPanel() {
  const { requests, next, unread } = mine;
  return html`<section id="requests" class="panel" aria-labelledby="requests-title">
    <h2 id="requests-title">Requests <small>that have ended, the latest first</small></h2>
    ${requests.length === 0 ? html`<p class="muted">${plain(unread) || "There are none."}</p>` : html`
    ${tableView("Requests", ["Ended", "Model", "Came of it", "#Waited", "#First token", "#In all", "#Tokens",
      costs(requests) ? "#Cost" : nothing, "Request"], requests, cellsOf, { most: MOST_ROWS })}`}
    ${next === null || requests.length >= MOST_ROWS ? nothing : html`<p><button @click=${older}>Show older ones</button></p>`}
  </section>`;
}

function cellsOf(row) {
  return [
    timeOf(row.ended_at), cutView(row.model ?? "none"), row.status < 400 ? "done" : `${row.status} ${row.outcome}`,
    seconds(row.wait_seconds), seconds(row.ttft_seconds), seconds(row.seconds), `${count(row.prompt_tokens)} + ${count(row.completion_tokens)}`,
    money(row.cost), html`<code>${cutView(row.client_request_id ?? row.id)}</code>`,
  ];
}

function connectPanel(use) {
  const models = mine.models.map((model) => model.id);
  const model = models.includes(chosen.model) ? chosen.model : models[0] ?? "MODEL";
  const context = mine.models.find((one) => one.id === model)?.meta?.n_ctx;
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const key = chosen.withKey && typedKey !== "" ? typedKey : "KEY";
  const snippets = snippetsOf(base, key, model, context);
  const [client, place, text] = snippets.find(([name]) => name === chosen.client) ?? snippets[0];
  const choose = (what) => { chosen = { ...chosen, ...what }; draw(); };
  return html`<section id="connect" class="panel" aria-labelledby="connect-title"><h2 id="connect-title">How to connect</h2>
    <p>OpenAI's clients: <code>${base}/v1</code>. Anthropic's clients: <code>${base}</code>.</p>
    <div class="bar">${selectView("Model", (models.length === 0 ? [model] : models).map((name) => [name, name]), model, (name) => choose({ model: name }))}
    ${selectView("Client", snippets.map(([name]) => [name, name]), client, (name) => choose({ client: name }))}
    ${typedKey === "" ? nothing : html`<label><input type="checkbox" .checked=${chosen.withKey}
      @change=${(event) => choose({ withKey: event.target.checked })}> with my key</label>`}</div>
    <p class="muted">${place}${key === "KEY" && use.key.startsWith("anonymous:") === false ? "; write your key in place of KEY" : ""}</p>
    <pre class="snippet" tabindex="0" role="region" aria-label="Settings of ${client}"><code>${text}</code></pre>
    <p><button @click=${() => copy(text)}>Copy</button></p></section>`;
}

function useKey(key) {
  typedKey = key;
  setKey(key);
  start();
}

function forget() {
  typedKey = "";
  setKey("");
  start();
}

/** Begin with what is known of the key that holds now. */
function start() {
  Object.assign(mine, NOTHING);
  chosen = { ...chosen, withKey: false };
  refresh();
}

/** Ask for all that the page shows. A key that is refused is not sent again by itself. */
function refresh() {
  stop();
  draw();
  stop = keepAsking(async (get, signal) => {
    const use = await get("v1/usage");
    const [requests, models] = await Promise.allSettled([get(`v1/usage/requests?limit=${PAGE_ROWS}`), get("v1/models")]);
    if (signal.aborted) return 0;
    Object.assign(mine, { use, unread: requests.reason?.message ?? "" });
    // Older ones that were asked for stay.
    if (requests.status === "fulfilled" && mine.requests.length <= PAGE_ROWS) {
      Object.assign(mine, { requests: requests.value.requests, next: requests.value.next });
    }
    if (models.status === "fulfilled") mine.models = models.value.data;
    return REFRESH_SECONDS;
  }, (trouble, error) => {
    if (error?.status === 401) {
      Object.assign(mine, { ...NOTHING, wantsKey: true, trouble: typedKey === "" ? "" : "This key is not valid." });
    } else mine.trouble = trouble;
    draw();
  }, REFRESH_SECONDS);
}

async function older() {
  const key = typedKey;
  const known = { trouble: "" };
  try {
    const { requests, next } = await fetchJson(`v1/usage/requests?limit=${PAGE_ROWS}&before=${encodeURIComponent(mine.next)}`);
    Object.assign(known, { requests: [...mine.requests, ...requests].slice(0, MOST_ROWS), next });
  } catch (error) {
    known.trouble = error.message;
  }
  if (key !== typedKey || mine.wantsKey) return;
  Object.assign(mine, known);
  draw();
}

page.replaceChildren();
start();

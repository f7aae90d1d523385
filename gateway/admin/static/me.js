// A caller's own page: what its key has used, what is left, its requests, and how to connect.

import { html, nothing, render } from "./vendor/lit-html/lit-html.js";
import { ApiError, fetchJson, setKey } from "./ask.js";
import { snippetsOf } from "./connect.js";
import { count, money, plain, seconds } from "./format.js";
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
/** Goes up with each key, so that an answer for the key before is not shown. */
let turn = 0;

function draw() {
  render(headerView(), document.getElementById("top"));
  render(mine.wantsKey ? keyView() : pageView(), page);
  if (mine.wantsKey && !hasFocus) document.getElementById("own-key").focus();
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

function keyView() {
  return html`<form class="panel key" @submit=${useKey}>
    <h2>Your API key is needed</h2>
    <p>It stays in this page's memory until you close or reload it; it is not stored.</p>
    <label for="own-key">API key</label>
    <input id="own-key" name="key" type="password" autocomplete="off" required maxlength="4096" aria-describedby="key-trouble">
    <p id="key-trouble" class="error" role="alert">${mine.trouble}</p>
    <button type="submit" class="primary">Open</button>
  </form>`;
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
      ${daysView(month.days, ", this month")}
      ${month.models.length === 0 ? nothing : sumsView(month.models, "Model", (row) => plain(row.model ?? "none"), "This month by model")}`}
  </section>`;
}

function requestsPanel() {
  const { requests, next, unread } = mine;
  const withCost = costs(requests);
  return html`<section id="requests" class="panel" aria-labelledby="requests-title">
    <h2 id="requests-title">Requests <small>that have ended, the latest first</small></h2>
    ${requests.length === 0 ? html`<p class="muted">${plain(unread) || "There are none."}</p>` : html`
    <div class="scroll" tabindex="0" role="region" aria-label="Requests"><table>
      <thead><tr><th scope="col">Ended</th><th scope="col">Model</th><th scope="col">Came of it</th><th scope="col" class="n">Waited</th>
        <th scope="col" class="n">First token</th><th scope="col" class="n">In all</th><th scope="col" class="n">Tokens</th>
        ${withCost ? html`<th scope="col" class="n">Cost</th>` : nothing}<th scope="col">Request</th></tr></thead>
      <tbody>${requests.map((row) => requestRow(row, withCost))}</tbody></table></div>`}
    ${next === null || requests.length >= MOST_ROWS ? nothing : html`<p><button @click=${older}>Show older ones</button></p>`}
  </section>`;
}

function requestRow(row, withCost) {
  const id = row.client_request_id ?? row.id;
  return html`<tr><td>${timeOf(row.ended_at)}</td><td class="cut" title=${plain(row.model)}>${plain(row.model ?? "none")}</td>
    <td>${row.status < 400 ? "done" : `${row.status} ${plain(row.outcome)}`}</td><td class="n">${seconds(row.wait_seconds)}</td>
    <td class="n">${seconds(row.ttft_seconds)}</td><td class="n">${seconds(row.seconds)}</td>
    <td class="n">${count(row.prompt_tokens)} + ${count(row.completion_tokens)}</td>
    ${withCost ? html`<td class="n">${money(row.cost)}</td>` : nothing}<td class="cut"><code title=${plain(id)}>${plain(id)}</code></td></tr>`;
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

async function copy(text) {
  const said = document.getElementById("said");
  try {
    await navigator.clipboard.writeText(text);
    said.textContent = "Copied.";
  } catch {
    said.textContent = "The browser does not let this page copy.";
  }
  said.classList.remove("unseen");
}

function useKey(event) {
  event.preventDefault();
  const { key } = event.target.elements;
  typedKey = key.value.trim();
  key.value = "";
  setKey(typedKey);
  start();
}

function forget() {
  typedKey = "";
  setKey("");
  start();
}

/** Begin with what is known of the key that holds now. */
function start() {
  turn += 1;
  Object.assign(mine, NOTHING);
  chosen = { ...chosen, withKey: false };
  refresh();
}

/** Ask for all that the page shows. A key that is refused is not sent again by itself. */
async function refresh() {
  const asked = turn;
  draw();
  try {
    const use = await fetchJson("v1/usage");
    const [requests, models] = await Promise.allSettled([fetchJson(`v1/usage/requests?limit=${PAGE_ROWS}`), fetchJson("v1/models")]);
    if (asked !== turn) return;
    Object.assign(mine, { use, trouble: "", unread: requests.reason?.message ?? "" });
    // Older ones that were asked for stay.
    if (requests.status === "fulfilled" && mine.requests.length <= PAGE_ROWS) {
      Object.assign(mine, { requests: requests.value.requests, next: requests.value.next });
    }
    if (models.status === "fulfilled") mine.models = models.value.data;
  } catch (error) {
    if (asked !== turn) return;
    if (error instanceof ApiError && error.status === 401) {
      const trouble = typedKey === "" ? "" : "This key is not valid.";
      Object.assign(mine, { ...NOTHING, wantsKey: true, trouble });
    } else mine.trouble = error instanceof ApiError ? error.message : "The gateway does not answer.";
  }
  draw();
}

async function older() {
  const asked = turn;
  try {
    const { requests, next } = await fetchJson(`v1/usage/requests?limit=${PAGE_ROWS}&before=${encodeURIComponent(mine.next)}`);
    if (asked !== turn) return;
    Object.assign(mine, { requests: [...mine.requests, ...requests].slice(0, MOST_ROWS), next, trouble: "" });
  } catch (error) {
    mine.trouble = error instanceof ApiError ? error.message : "The gateway does not answer.";
  }
  draw();
}

setInterval(() => {
  if (!document.hidden && !mine.wantsKey && mine.use !== null) refresh();
}, REFRESH_SECONDS * 1000);
page.replaceChildren();
start();

// The page: follows the live view, and draws what has changed, once a frame at most.

import { html, nothing, render } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { chartsView, drawCharts } from "./charts.js";
import { count, plain, plural, seconds } from "./format.js";
import { membersView } from "./members.js";
import { modelsView } from "./models.js";
import { drawDetails, drawSlots, nodesView, openNode, setPrinted } from "./nodes.js";
import { playgroundView } from "./playground.js";
import { problemsView } from "./problems.js";
import { queueView } from "./queue.js";
import { requestsView } from "./requests.js";
import { isOperator, nodesAlone, state, takeHello, takeSnapshot, takeUpdate } from "./state.js";
import { follow, setKey } from "./stream.js";
import { onSystemTheme } from "./theme.js";

const THEMES = ["auto", "light", "dark"];
const page = document.getElementById("page");

let theme = "auto";
let keyIsThere = null;
let pending = false;
/** Whether the field for the key has just come. */
let wantsFocus = false;
let marked = false;
/** The version whose files this page has: a gateway that was upgraded since may tell other things. */
let pageVersion = null;
/** Whether the page's own first words have made room. */
let cleared = false;
/** Goes up when something of the page itself changes: a filter, a turn of the chat. */
let own = 0;

function redraw() {
  own += 1;
  schedule();
}

function schedule() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; draw(); });
}

function draw() {
  render(headerView(), document.getElementById("top"));
  if (state.connection === "key") {
    show(keyView());
    if (wantsFocus) document.getElementById("admin-key").focus();
    wantsFocus = false;
    return;
  }
  if (state.summary === null) {
    if (state.connection === "lost") show(html`<p class="loading">${plain(state.trouble)} Trying again…</p>`);
    return;
  }
  const { versions, summary, waiting, problems } = state;
  pageVersion ??= summary.version;
  const isLost = state.connection === "lost";
  show(html`${isLost ? lostView() : nothing}
    ${isLost && problems.length === 0 ? nothing : guard([problems, own], () => problemsView(problems, openNode))}
    ${guard([versions.nodes, summary, state.role, own], () => nodesView(redraw, openNode))}
    ${guard([versions.nodes, summary, own], () => modelsView(openNode))}
    ${guard([summary], () => membersView(summary.cluster))}
    <div class="pair">${guard([summary, waiting], () => queueView(summary, waiting))}
    ${isOperator() ? requestsView(state.requests, summary.in_flight, state.at, redraw) : requestsHint()}</div>
    ${guard([1], chartsView)}
    ${guard([summary.models.join("\n"), state.role, own], () => playgroundView(redraw))}`);
  drawSlots();
  drawDetails();
  if (marked) drawCharts();
  else {
    marked = true;
    performance.mark("fleet drawn");
    requestAnimationFrame(() => setTimeout(drawCharts, 0));
  }
}

function show(view) {
  if (!cleared) page.replaceChildren();
  cleared = true;
  render(view, page);
  for (const link of document.querySelectorAll(".skip")) link.hidden = document.querySelector(link.hash) === null;
}

/** A page that has lost its gateway looks like a calm one. */
function lostView() {
  const since = new Date(state.at * 1000).toLocaleTimeString();
  return html`<section id="lost" class="problem critical" aria-labelledby="lost-title">
    <h2 id="lost-title"><span class="mark" aria-hidden="true">✕</span> No connection: what is shown is that of ${since}</h2>
    <p>${plain(state.trouble)} This page tries again by itself.</p>
  </section>`;
}

function requestsHint() {
  return html`<section id="requests" class="panel" tabindex="-1"><h2>Requests in flight <small>${count(state.summary.in_flight)}</small></h2>
    <p class="muted">The list of requests needs an operator's key.</p></section>`;
}

function headline() {
  const { summary } = state;
  if (summary === null) return "";
  const usable = ["ready", "degraded", "mute", "sleeping"].reduce((sum, one) => sum + (summary.states[one] ?? 0), 0);
  const waiting = Object.values(summary.queue).reduce((sum, depth) => sum + depth, 0);
  return `${count(usable)} of ${plural(nodesAlone().length, "node")} at work, ${count(summary.slots_busy)} of ${
    plural(summary.slots_total, "slot")} busy, ${waiting === 0 ? "nobody waits" : `${plural(waiting, "request")} wait`}`;
}

const CONNECTIONS = { live: ["●", "live"], connecting: ["◔", "connecting"], lost: ["✕", "no connection"], key: ["○", "key needed"] };

function headerView() {
  const [mark, word] = CONNECTIONS[state.connection];
  const { summary } = state;
  return html`<h1>llama-gateway</h1>
    <p class="headline">${headline()}</p>
    <p class="about">${summary === null ? nothing : html`<span class="muted">${plain(summary.version)}, up ${
      seconds(Math.max(0, state.at - summary.started_at))}</span>`}
      ${summary === null || pageVersion === null || summary.version === pageVersion ? nothing : html`<button class="small"
        @click=${() => location.reload()}>Reload for the new version</button>`}
      ${summary === null || state.connection === "key" ? nothing : html`<span class="muted">role ${state.role}</span>`}
      <span class="connection c-${state.connection}" role="status"><span aria-hidden="true">${mark}</span> ${word}</span>
      <button class="small" @click=${changeTheme} aria-label="Colours: ${theme}">${{ auto: "◐", light: "○", dark: "●" }[theme]} ${theme}</button></p>`;
}

function changeTheme() {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  redraw();
}

function keyView() {
  return html`<form class="panel key" @submit=${useKey}>
    <h2>An admin key is needed</h2>
    <p>It stays in this page's memory until you close or reload it; it is not stored.</p>
    <label for="admin-key">Admin key</label>
    <input id="admin-key" name="key" type="password" autocomplete="off" required maxlength="4096" aria-describedby="key-trouble">
    <p id="key-trouble" class="error" role="alert">${state.trouble}</p>
    <button type="submit" class="primary">Open</button>
  </form>`;
}

function useKey(event) {
  event.preventDefault();
  const { key } = event.target.elements;
  setKey(key.value);
  key.value = "";
  keyIsThere?.();
}

function take(name, data) {
  if (name === "hello") takeHello(data);
  else if (name === "snapshot") takeSnapshot(data);
  else if (name === "update") takeUpdate(data);
  schedule();
}

function tell(connection, trouble) {
  state.connection = connection;
  state.trouble = trouble;
  if (connection === "key") {
    for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
    wantsFocus = true;
    state.summary = null;
    state.requests = new Map();
    state.nodes = new Map();
  }
  schedule();
}

document.addEventListener("keydown", (event) => {
  // A key that is held down must not open a node and then drain it, nor drain and resume it.
  if (event.key === "Enter" && event.repeat && event.target.closest?.("button")) event.preventDefault();
  const typing = event.target.closest?.("input, textarea, select");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    const input = document.querySelector("#nodes input");
    if (input !== null) { event.preventDefault(); input.focus(); }
  }
});

for (const [name, isPrinted] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(name, () => {
    setPrinted(isPrinted);
    own += 1;
    draw();
  });
}

onSystemTheme(schedule);
draw();
follow(take, tell, () => new Promise((done) => { keyIsThere = done; }));

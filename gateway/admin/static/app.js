// The frame of all pages: it follows the live view, and draws what has changed, once a frame at most.

import { html, nothing, render } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { setKey } from "./ask.js";
import { count, plain, plural, seconds } from "./format.js";
import { focusKey, keyForm } from "./key.js";
import * as batches from "./batches.js";
import * as keys from "./keys.js";
import * as models from "./models.js";
import * as node from "./node.js";
import * as nodes from "./nodes.js";
import * as overview from "./overview.js";
import * as playground from "./playground.js";
import * as queue from "./queue.js";
import * as requests from "./requests.js";
import * as settings from "./settings.js";
import { href, onMove, route } from "./route.js";
import { nodesAlone, state, takeHello, takeSnapshot, takeUpdate } from "./state.js";
import { follow } from "./stream.js";
import { onSystemTheme } from "./theme.js";

/**
 * The pages by the first word of their address, in the rail's order: the lowest role that may see one, and its module.
 *
 * A module has `view(route, redraw)`, which returns what lit renders, and what it needs of these:
 * `depends(route)`: what the view is made of; without it the view is made anew with each update.
 * `drawn(route)`: called after the page was rendered, for what is drawn to a canvas.
 * `enter(route, redraw)` and `leave()`: called when the reader comes to the page, or to another of its things, and when
 * she leaves it.
 * `badge()`: a number for the rail, 0 for none.
 * A thing of the page has an address of its own, which the page gets as `route.id`; or the module `item`, which is like a
 * page.
 */
const PAGES = {
  __proto__: null,
  overview: { title: "Overview", role: "viewer", module: overview },
  nodes: { title: "Nodes", role: "viewer", module: nodes, item: node },
  requests: { title: "Requests", role: "operator", module: requests },
  queue: { title: "Queue", role: "viewer", module: queue },
  batches: { title: "Batches", role: "operator", module: batches },
  models: { title: "Models", role: "viewer", module: models },
  keys: { title: "Keys and usage", role: "operator", module: keys },
  playground: { title: "Playground", role: "operator", module: playground },
  settings: { title: "Settings", role: "admin", module: settings },
};

const ROLES = ["viewer", "operator", "admin"];
const THEMES = ["auto", "light", "dark"];
const main = document.getElementById("page");
const rail = document.getElementById("rail");

let theme = "auto";
let keyIsThere = null;
let pending = false;
/** Whether the field for the key has just come. */
let wantsFocus = false;
/** The version whose files this page has: a gateway that was upgraded since may tell other things. */
let pageVersion = null;
/** Whether the page's own first words have made room. */
let cleared = false;
/** The module and the thing that were entered. */
let entered = { module: null, id: "" };

function redraw() {
  state.versions.page += 1;
  schedule();
}

function maySee(page) {
  return ROLES.indexOf(state.role) >= ROLES.indexOf(page.role);
}

function schedule() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; draw(); });
}

function draw() {
  render(headerView(), document.getElementById("top"));
  if (state.connection === "key") {
    render(nothing, rail);
    show(keyForm("An admin key is needed", "Admin key", state.trouble, useKey));
    if (wantsFocus) focusKey();
    wantsFocus = false;
    return;
  }
  if (state.summary === null) {
    if (state.connection === "lost") show(html`<p class="loading">${plain(state.trouble)} Trying again…</p>`);
    return;
  }
  pageVersion ??= state.summary.version;
  const current = PAGES[route.page];
  const owner = route.id !== "" && current?.item ? current.item : current?.module;
  const module = current !== undefined && maySee(current) ? owner : null;
  if (entered.module !== module || entered.id !== route.id) {
    entered.module?.leave?.();
    entered = { module, id: route.id };
    module?.enter?.(route, redraw);
  }
  document.title = [plain(route.id), titleOf(current), "llama-gateway"].filter((name) => name !== "").join(" · ");
  render(railView(), rail);
  show(html`${state.connection === "lost" ? lostView() : nothing}
    ${current === undefined ? html`<p class="panel">There is no such page.</p>`
    : module !== null ? pageView(module)
    : html`<p class="panel">${current.title} needs the key of an ${current.role}; the role of this one is ${state.role}.</p>`}`);
  module?.drawn?.(route);
}

const titleOf = (page) => page?.title ?? "No such page";

function pageView(module) {
  const view = () => module.view(route, redraw);
  return module.depends === undefined ? html`${view()}` : guard([module, ...module.depends(route)], view);
}

function railView() {
  return html`<p class="brand" aria-hidden="true">llama-gateway</p>
    <ul>${Object.entries(PAGES).filter(([, page]) => maySee(page)).map(([name, page]) => {
      const number = page.module.badge?.() ?? 0;
      return html`<li><a href=${href(name)} aria-current=${name === route.page ? "page" : nothing}>${page.title}${
        number === 0 ? nothing : html` <b>${count(number)}</b>`}</a></li>`;
    })}</ul>`;
}

function show(view) {
  if (!cleared) main.replaceChildren();
  cleared = true;
  render(view, main);
}

/** A page that has lost its gateway looks like a calm one. */
function lostView() {
  const since = new Date(state.at * 1000).toLocaleTimeString();
  return html`<section id="lost" class="problem critical" aria-labelledby="lost-title">
    <h2 id="lost-title"><span class="mark" aria-hidden="true">✕</span> No connection: what is shown is that of ${since}</h2>
    <p>${plain(state.trouble)} This page tries again by itself.</p>
  </section>`;
}

function headline() {
  const { summary } = state;
  if (summary === null) return "";
  const usable = ["ready", "degraded", "mute", "sleeping"].reduce((sum, one) => sum + (summary.states[one] ?? 0), 0);
  const waiting = Object.values(summary.queue).reduce((sum, depth) => sum + depth, 0);
  return `${count(usable)} of ${plural(nodesAlone().length, "node")} at work, ${count(summary.slots_busy)} of ${
    plural(summary.slots_total, "slot")} busy, ${waiting === 0 ? "nobody waits" : waiting === 1 ? "1 request waits" : `${count(waiting)} requests wait`}`;
}

const CONNECTIONS = { live: ["●", "live"], connecting: ["◔", "connecting"], lost: ["✕", "no connection"], key: ["○", "key needed"] };

function headerView() {
  const [mark, word] = CONNECTIONS[state.connection];
  const { summary } = state;
  return html`<h1>${summary === null ? "llama-gateway" : titleOf(PAGES[route.page])}</h1>
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

function useKey(key) {
  setKey(key);
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
    document.getElementById("confirm").close();
    wantsFocus = true;
    state.summary = null;
    state.requests = new Map();
    state.nodes = new Map();
    // What the next key may see is asked for anew.
    entered.module?.leave?.();
    entered = { module: null, id: "" };
  }
  schedule();
}

document.addEventListener("keydown", (event) => {
  // A key that is held down must not open a node and then drain it, nor drain and resume it.
  if (event.key === "Enter" && event.repeat && event.target.closest?.("button, a")) event.preventDefault();
  const typing = event.target.closest?.("input, textarea, select");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    const input = main.querySelector("input[type=search]");
    if (input !== null) { event.preventDefault(); input.focus(); }
  }
});

for (const [name, isPrinted] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(name, () => {
    nodes.setPrinted(isPrinted);
    state.versions.page += 1;
    draw();
  });
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});

onMove((isNew) => {
  document.getElementById("confirm").close();
  draw();
  if (!isNew) return;
  scrollTo(0, 0);
  main.focus({ preventScroll: true });
});

onSystemTheme(schedule);
draw();
follow(take, tell, () => new Promise((done) => { keyIsThere = done; }));

// The fleet as a live picture: each node with its slots as cells that fill.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { drain, probe, resume } from "./actions.js";
import { cellsOf, OUT, sampleOf } from "./cells.js";
import { count, percent, plain, plural, rate } from "./format.js";
import { href, setQuery } from "./route.js";
import { isOperator, nodesAlone, state } from "./state.js";
import { drawWall } from "./wall.js";

const MOST_CARDS = 48;
const MOST_TILES = 240;
/** Slots of a node of the wall on paper. */
const MOST_PRINTED = 4;

export const MARKS = {
  ready: "●", mute: "◍", degraded: "▼", draining: "‖", down: "✕", ejected: "⊘", loading: "◔",
  sleeping: "☾", starting: "◔", standby: "○", unloaded: "○", unloading: "◌", failed: "✕",
};

const PHASES = { r: "reading", w: "writing", h: "held", o: "used by others", f: "free" };
const WORST = ["down", "ejected", "degraded", "loading", "starting", "draining", "mute", "ready", "sleeping", "standby"];

const ARROWS = "Nodes: the arrow keys go from one to the next";

/** What the address asks for, and whether the page is being printed. */
const look = { size: "auto", words: "", only: "", printed: false };

function cellView([letter, fill]) {
  return html`<i class="cell ${letter} p${fill}"></i>`;
}

function printedCellsView(node) {
  return html`<span class="cells" aria-hidden="true">${sampleOf(cellsOf(node.cells), MOST_PRINTED).map(cellView)}</span>`;
}

export function cellsView(node) {
  const cells = cellsOf(node.cells).map(cellView);
  const hidden = node.slots_total > 64 ? html`<span class="muted">+${node.slots_total - 64}</span>` : nothing;
  return html`<span class="cells" aria-hidden="true">${cells}${hidden}</span>`;
}

/** The slots in words, for those who do not see the cells. */
export function slotsInWords(node) {
  const counts = new Map();
  for (const [letter] of cellsOf(node.cells)) counts.set(letter, (counts.get(letter) ?? 0) + 1);
  const free = OUT.has(node.state) ? "out of service" : PHASES.f;
  const parts = [...counts].map(([letter, number]) => `${number} ${letter === "f" ? free : PHASES[letter]}`);
  return `${plural(node.slots_total, "slot")}: ${parts.join(", ") || "unknown"}`;
}

function speedInWords(node) {
  if (node.decode_tps === null) return "speed not measured yet";
  const share = node.decode_share;
  const past = share === null || Math.abs(share - 1) < 0.1 ? "" : `, ${percent(share)} of its usual`;
  return `${rate(node.decode_tps)} tokens/s${past}`;
}

function sizeOf(number) {
  if (look.size !== "auto") return look.size;
  return number <= MOST_CARDS ? "cards" : number <= MOST_TILES ? "tiles" : "dots";
}

function matches(node) {
  if (look.only && node.state !== look.only) return false;
  if (!look.words) return true;
  const labels = Object.entries(node.labels).map((pair) => pair.join("="));
  const text = [node.name, node.host, node.state, node.tier, ...node.models, ...labels].join(" ");
  return text.toLowerCase().includes(look.words.trim().toLowerCase());
}

/** The nodes that the view has, in its order. */
let shown = [];

/** What the view is made of. */
export function depends(route) {
  const { versions, summary, role } = state;
  return [route, versions.nodes, versions.page, summary, role];
}

export function view({ query }, redraw) {
  look.words = query.get("find") ?? "";
  look.only = WORST.find((word) => word === query.get("state")) ?? "";
  look.size = ["cards", "tiles", "dots"].find((size) => size === query.get("size")) ?? "auto";
  const all = nodesAlone();
  shown = look.words.trim() || look.only ? all.filter(matches) : all;
  const form = sizeOf(shown.length);
  const ask = (name, value) => { setQuery(name, value); redraw(); };
  return html`<section id="nodes" class="panel" tabindex="-1" aria-labelledby="nodes-title">
    <div class="bar">
      <h2 id="nodes-title">Nodes <small>${count(all.length)}</small></h2>
      ${statesView(ask)}
      <label class="filter"><span class="unseen">Find nodes</span><input type="search"
        placeholder="name, host, model, label" autocomplete="off" maxlength="200" .value=${look.words}
        @input=${(event) => ask("find", event.target.value)}></label>
      <label><span class="unseen">Size</span><select .value=${look.size}
        @change=${(event) => ask("size", event.target.value === "auto" ? "" : event.target.value)}>
        <option value="auto">size: auto</option><option value="cards">cards</option>
        <option value="tiles">tiles</option><option value="dots">wall</option></select></label>
    </div>
    ${legend()}
    ${shown.length === 0 ? html`<p class="muted">${state.nodes.size === 0
      ? "There is no node in the inventory." : "No node is like that."}</p>`
      : form === "cards" ? cardsView(shown) : form === "tiles" ? tilesView(shown, form)
      : wallView(shown)}
  </section>`;
}

function statesView(ask) {
  // The pressed one stays when the last node has left its state, or nothing could end the choice.
  const chosen = look.only === "" ? {} : { [look.only]: 0 };
  const counts = Object.entries({ ...chosen, ...state.summary.states })
    .sort((a, b) => WORST.indexOf(a[0]) - WORST.indexOf(b[0]));
  return html`<div class="states" role="group" aria-label="Only nodes in one state">${counts.map(
    ([word, number]) => html`<button class="chip s-${word}" aria-pressed=${look.only === word}
      @click=${() => ask("state", look.only === word ? "" : word)}><span class="mark"
      aria-hidden="true">${MARKS[word]}</span> ${word} <b>${count(number)}</b></button>`)}</div>`;
}

function legend() {
  return html`<p class="legend muted" aria-hidden="true"><span>Slots:</span>
    <span><i class="cell f p0"></i> free</span><span><i class="cell r p5"></i> reading a prompt</span>
    <span><i class="cell w p5"></i> writing</span><span><i class="cell h p8"></i> held until idle</span>
    <span><i class="cell o p8"></i> used by others</span></p>`;
}

/** The whole fleet at a glance, for the overview: tiles by host, and a wall of a large one. */
export function fleetView() {
  shown = nodesAlone();
  const counts = Object.entries(state.summary.states).sort((a, b) => WORST.indexOf(a[0]) - WORST.indexOf(b[0]));
  return html`<section id="nodes" class="panel" aria-labelledby="nodes-title">
    <div class="bar"><h2 id="nodes-title">Nodes <small>${count(shown.length)}</small></h2>
      <p class="states">${counts.map(([word, number]) => html`<a class="chip s-${word}" href=${href("nodes", "", { state: word })}><span
        class="mark" aria-hidden="true">${MARKS[word]}</span> ${word} <b>${count(number)}</b></a>`)}</p></div>
    ${shown.length > MOST_TILES ? wallView(shown) : html`<div class="hosts small roving" tabindex="0" role="group"
      aria-label=${ARROWS} @focusin=${enterTiles} @focusout=${leaveTiles} @keydown=${moveInTiles}>${hostsView(shown, "tiles",
        (node) => guard([node.version, "tiles"], () => tile(node, "tiles")))}</div>`}
  </section>`;
}

function hostsView(nodes, form, nodeView) {
  const hosts = new Map();
  for (const node of nodes) {
    if (!hosts.has(node.host)) hosts.set(node.host, []);
    hosts.get(node.host).push(node);
  }
  return repeat(hosts, ([host]) => host, ([host, members]) => html`
    <section class="host" aria-label="Host ${plain(host)}">
      <h3>${plain(host)} <small>${plural(members.length, "node")}</small></h3>
      <ul class=${form}>${repeat(members, (node) => node.name, nodeView)}</ul>
    </section>`);
}

function cardsView(nodes) {
  return html`<div class="hosts">${hostsView(nodes, "cards",
    (node) => guard([node.version, state.role], () => card(node)))}</div>`;
}

function wallView(nodes) {
  return html`<div class="wall">${tilesView(nodes, "dots")}<canvas aria-hidden="true"></canvas></div>`;
}

function card(node) {
  return html`<li class="node s-${node.state} ${node.tier}" data-node=${node.name}>
    <div class="head"><a class="name" href=${href("nodes", node.name)}>${plain(node.name)}</a>
      <span class="state"><span class="mark" aria-hidden="true">${MARKS[node.state]}</span> ${node.state}</span></div>
    <p class="tags">${node.tier === "gpu" ? html`<b class="tag">GPU</b>` : nothing}${node.labels.numa === undefined
      ? nothing : html`<span class="tag">NUMA ${plain(node.labels.numa)}</span>`}<span
      class="model">${node.loadable !== undefined ? html`<b class="tag">router</b> ${node.loadable} models loaded`
      : node.models.length === 0 ? "model unknown" : plain(node.models.join(", "))}</span></p>
    ${cellsView(node)}<span class="unseen">${slotsInWords(node)}</span>
    ${node.loadable === undefined ? speedView(node) : nothing}
    ${node.state === "ready" || !node.reason ? html`<p class="muted">${node.cached_prompts === 0 ? "nothing cached"
      : `${plural(node.cached_prompts, "prompt")} cached, ${count(node.cached_tokens)} tokens`}</p>`
      : html`<p class="reason" title=${plain(node.reason)}>${plain(node.reason)}</p>`}
    ${isOperator() ? html`<p class="actions">${actionsView(node)}</p>` : nothing}
  </li>`;
}

function speedView(node) {
  const share = node.decode_share;
  const past = share === null ? nothing : html`<meter min="0" max="1.2" low="0.6" high="0.8" optimum="1"
    value=${Math.min(1.2, share)} aria-label="Speed against its own past: ${percent(share)}"></meter>`;
  return html`<p class="speed">${node.decode_tps === null ? html`<span class="muted">not measured yet</span>`
    : html`<b>${rate(node.decode_tps)}</b> tokens/s ${past}`}${share !== null && share < 0.9
    ? html` <span class="slow">${percent(share)} of usual</span>` : nothing}</p>`;
}

export function actionsView(node) {
  const { name } = node;
  // One button for both, so that it keeps the focus.
  const [word, act] = node.draining ? ["Resume", resume] : ["Drain", drain];
  return html`<button class="small" @click=${(event) => act(event, name)} aria-label="${word} ${plain(name)}">${word}</button><button
    class="small" @click=${(event) => probe(event, name)} aria-label="Probe ${plain(name)}">Probe</button>`;
}

function tilesView(nodes, size) {
  return html`<ul class="${size} roving" tabindex="0" aria-label=${ARROWS}
    @focusin=${enterTiles} @focusout=${leaveTiles} @keydown=${moveInTiles}>${repeat(nodes, (node) => node.name,
      (node) => guard([node.version, size, look.printed], () => tile(node, size)))}</ul>`;
}

/** Paper has another width than the screen: there the wall's slots are elements, which follow it. */
export function setPrinted(isPrinted) {
  look.printed = isPrinted;
}

/** Draw what the view leaves to a canvas. */
export function drawn() {
  drawWall(shown);
  // A node that had the focus may be gone, without an event.
  const list = document.querySelector(".roving");
  if (list !== null) list.tabIndex = list.contains(document.activeElement) && document.activeElement !== list ? -1 : 0;
}

function tile(node, size) {
  const speed = size === "tiles" && node.decode_tps !== null ? `${rate(node.decode_tps)}/s` : "";
  // It begins with the words that are seen.
  const words = `${plain(node.name)} ${speed}, ${node.state}, ${slotsInWords(node)}, ${speedInWords(node)}`;
  return html`<li class="node s-${node.state} ${node.tier}" data-node=${node.name}><a
    tabindex="-1" href=${href("nodes", node.name)} aria-label=${words} @pointerenter=${showWords}><span class="mark"
    aria-hidden="true">${MARKS[node.state]}</span>${size === "tiles"
    ? html`<span class="name">${plain(node.name)}</span>${cellsView(node)} <span class="rate">${speed}</span>`
    : look.printed ? printedCellsView(node) : nothing}</a></li>`;
}

// A thousand nodes are one stop of the Tab key, which enters them at the one that had the focus last.

let latest = "";

function enterTiles(event) {
  const list = event.currentTarget;
  if (event.target !== list) {
    latest = event.target.closest("li").dataset.node;
    // Else Shift+Tab would lead to the list, and so back to the node.
    list.tabIndex = -1;
  } else if (list.matches(":focus-visible")) {
    const tiles = [...list.querySelectorAll("[data-node]")];
    (tiles.find((tile) => tile.dataset.node === latest) ?? tiles[0])?.querySelector("a").focus();
  }
}

function leaveTiles(event) {
  if (!event.currentTarget.contains(event.relatedTarget)) event.currentTarget.tabIndex = 0;
}

function moveInTiles(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const tiles = [...event.currentTarget.querySelectorAll("[data-node]")];
  const place = tiles.indexOf(event.target.closest("[data-node]"));
  const next = { ArrowLeft: () => tiles[place - 1], ArrowRight: () => tiles[place + 1], Home: () => tiles[0],
    End: () => tiles.at(-1), ArrowUp: () => inNextRow(tiles.slice(0, place).reverse(), tiles[place]),
    ArrowDown: () => inNextRow(tiles.slice(place + 1), tiles[place]) }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  next()?.querySelector("a").focus();
}

/** The first of these tiles, in their order, that stands above or below this one, not beside it. */
function inNextRow(tiles, own) {
  const { left, right, top, bottom } = own.getBoundingClientRect();
  return tiles.find((tile) => {
    const other = tile.getBoundingClientRect();
    return other.left < right && other.right > left && (other.top >= bottom || other.bottom <= top);
  });
}

/** The words of a tile as its tooltip: set when it is looked at, since a thousand change each second. */
function showWords(event) {
  event.currentTarget.title = event.currentTarget.getAttribute("aria-label");
}

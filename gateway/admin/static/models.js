// Models on demand: the memory of each host with routers, filled by what they have loaded.

import { html, nothing, svg } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { percent, plain, plural, size } from "./format.js";
import { MARKS } from "./nodes.js";
import { href } from "./route.js";
import { state } from "./state.js";

/** Hosts, and models of each, that are drawn; the others are counted. */
const [MOST_HOSTS, MOST_DRAWN] = [48, 48];
const WIDTH = 1000;
/** Of the bar: the least that a model takes, and what one of unknown size does. */
const LEAST = 6;
const UNKNOWN = 60;
/** States in which a model has its memory. */
const HELD = new Set(["ready", "degraded", "mute", "sleeping", "loading", "unloading", "draining", "ejected"]);

/** What the view is made of. */
export function depends() {
  return [state.versions.nodes, state.summary];
}

export function view() {
  const hosts = Object.entries(state.summary.hosts ?? {});
  if (hosts.length === 0) return html`<p class="panel muted">No node loads models on demand.</p>`;
  const byHost = new Map(hosts.map(([host]) => [host, []]));
  for (const node of state.nodes.values()) if (node.router !== undefined) byHost.get(node.host)?.push(node);
  return html`<section id="models" class="panel" aria-labelledby="models-title">
    <h2 id="models-title">Models in memory</h2>
    <ul class="memories">${repeat(hosts.slice(0, MOST_HOSTS), ([host]) => host,
      ([host, use]) => hostView(host, use, byHost.get(host)))}</ul>
    ${moreView(hosts.length - MOST_HOSTS, "more host")}
  </section>`;
}

function moreView(left, word) {
  return left > 0 ? html`<p class="muted">and ${plural(left, word)}</p>` : nothing;
}

function hostView(host, use, models) {
  const held = models.filter((node) => HELD.has(node.state)).sort((a, b) => (b.memory ?? 0) - (a.memory ?? 0));
  const listed = [...held, ...models.filter((node) => !HELD.has(node.state))];
  const told = use.memory === null ? `${size(use.used)} taken; how much it has is not known`
    : `${size(use.used)} of ${size(use.memory)} taken`;
  const unknown = use.unknown === 0 ? "" : `, and ${plural(use.unknown, "model")} of unknown size`;
  return html`<li class="memory"><h3>${plain(host)} <small>${told}${unknown}</small></h3>
    ${barOf(held.slice(0, MOST_DRAWN), use)}
    <ul class="held">${repeat(listed.slice(0, MOST_DRAWN), (node) => node.name, modelView)}</ul>
    ${moreView(listed.length - MOST_DRAWN, "more model")}
  </li>`;
}

/** The bar has no text: the list below it tells the same. */
function barOf(held, use) {
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
      <rect class="filled s-${node.state}" x=${x} y="0" width=${inner * done} height="22"></rect>`;
  });
  return html`<svg class="memory-bar" viewBox="0 0 ${WIDTH} 22" preserveAspectRatio="none" aria-hidden="true">${parts}</svg>`;
}

function modelView(node) {
  const words = node.state === "loading" && node.progress !== null ? `loading, ${percent(node.progress)}` : node.state;
  const pinned = node.pinned_by === null ? "" : ", pinned";
  const busy = node.slots_total === 0 ? "" : `, ${node.slots_busy} of ${plural(node.slots_total, "slot")} busy`;
  return html`<li class="s-${node.state}" data-model=${node.name}><span class="mark" aria-hidden="true">${MARKS[node.state]}</span>
    <a href=${href("nodes", node.name)}>${plain(node.name)}</a>
    <span class="muted">${words}, ${node.memory === null ? "size unknown" : size(node.memory)}${busy}${pinned}</span></li>`;
}

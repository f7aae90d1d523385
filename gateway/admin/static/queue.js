// The queue: a lane for each class, in the order in which they go.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { count, plain, plural, seconds } from "./format.js";
import { state } from "./state.js";

const MOST_PLACES = 12;

/** What the view is made of. */
export function depends() {
  return [state.summary, state.waiting];
}

/** How many wait. */
export function badge() {
  return Object.values(state.summary.queue).reduce((sum, depth) => sum + depth, 0);
}

export function view() {
  const { summary, waiting } = state;
  const total = badge();
  const places = waiting.map((row, index) => [index + 1, ...row]);
  return html`<section id="queue" class="panel" aria-labelledby="queue-title">
    <h2 id="queue-title">Queue <small>${total === 0 ? "nobody waits" : `${count(total)} of at most ${count(summary.queue_max)}`}</small></h2>
    <ul class="lanes">${Object.entries(summary.queue).map(([name, depth]) => lane(name, depth, places))}</ul>
  </section>`;
}

function lane(name, depth, places) {
  const own = places.filter((place) => place[1] === name);
  const shown = own.slice(0, MOST_PLACES);
  const more = depth - shown.length;
  return html`<li class="lane">
    <h3>${name} <b>${count(depth)}</b></h3>
    ${depth === 0 ? nothing : html`<ol class="places">${shown.map(
      ([position, , model, waited, expected]) => html`<li class="place">
        <b title="position">${position}</b><span class="model">${plain(model)}</span>
        <span class="muted">waits ${seconds(waited)}${expected === null ? nothing
          : html`, starts in ${expected < 1 ? "a moment" : `about ${seconds(expected)}`}`}</span>
      </li>`)}</ol>
      ${more > 0 ? html`<p class="muted">and ${plural(more, "more", "more")}</p>` : nothing}`}
  </li>`;
}

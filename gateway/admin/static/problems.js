// Problems first: what is wrong, why, and what to do. Each is a line that unfolds; notices lie folded together.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { copy } from "./actions.js";
import { callerName, plain, plural } from "./format.js";
import { href } from "./route.js";

const MARKS = { critical: "✕", warning: "▲", notice: "●" };
const DAY = 86_400_000;
const PLACE = "llama-gateway: hidden notices";
/** Notices that are hidden at most; the one that was hidden first comes back. */
const MOST_HIDDEN = 100;

/** Until when each notice is hidden, by the digest of its id. */
let hidden = new Map(stored());

/** Other people use this browser, too: what is stored names no caller and no node. */
function digest(id) {
  let sum = 5381;
  for (let place = 0; place < id.length; place += 1) sum = (sum * 33 + id.charCodeAt(place)) % 4_294_967_296;
  return sum;
}

function stored() {
  try {
    const read = JSON.parse(localStorage.getItem(PLACE) ?? "[]");
    return read.filter((one) => one.length === 2 && one[1] > Date.now() && one[1] < Date.now() + DAY).slice(-MOST_HIDDEN);
  } catch {
    // A browser that stores nothing, or something else stands there.
    return [];
  }
}

function hide(problems) {
  for (const { id } of problems) hidden.set(digest(id), Date.now() + DAY - 1);
  keep([...hidden].slice(-MOST_HIDDEN));
}

function keep(entries) {
  hidden = new Map(entries);
  try {
    if (entries.length === 0) localStorage.removeItem(PLACE);
    else localStorage.setItem(PLACE, JSON.stringify(entries));
  } catch {
    // They are hidden until the page is loaded anew.
  }
}

const isHidden = ({ id }) => (hidden.get(digest(id)) ?? 0) > Date.now();

export function problemsView(problems, redraw) {
  const serious = problems.filter((one) => one.severity !== "notice");
  const notices = problems.filter((one) => one.severity === "notice" && !isHidden(one));
  const left = problems.length - serious.length - notices.length;
  return html`<section id="problems" class=${serious.length === 0 ? "calm" : ""} aria-labelledby="problems-title">
    <h2 id="problems-title">${serious.length === 0 ? html`<span class="mark ok" aria-hidden="true">✓</span> Nothing needs attention`
      : plural(serious.length, "problem")}</h2>
    ${listView(serious)}
    ${notices.length === 0 ? nothing : html`<details class="notices"><summary>${plural(notices.length, "notice")}</summary>
      ${listView(notices)}
      <p><button class="small" @click=${() => { hide(notices); redraw(); }}>Hide for a day</button></p></details>`}
    ${left === 0 ? nothing : html`<p class="muted">${plural(left, "notice")} hidden for a day
      <button class="small" @click=${() => { keep([]); redraw(); }}>Show</button></p>`}
  </section>`;
}

function listView(problems) {
  return problems.length === 0 ? nothing
    : html`<ul class="problems">${repeat(problems, (one) => one.id, (one) => html`<li>${problemView(one)}</li>`)}</ul>`;
}

function problemView(problem) {
  return html`<details class="problem ${problem.severity}">
    <summary><span class="mark" aria-hidden="true">${MARKS[problem.severity] ?? "●"}</span>
      <span class="severity">${problem.severity}</span> <b>${plain(problem.title)}</b></summary>
    <p class="cause">${plain(problem.cause)}${problem.caller ? callerView(problem) : nothing}</p>
    <p class="remedy">${plain(problem.remedy)}</p>
    <p class="links">
      ${problem.nodes.map((name) => html`<a href=${href("nodes", name)}>${plain(name)}</a>`)}
      ${problem.commands.map((command) => html`<span class="command"><code>${plain(command)}</code><button
        class="copy" @click=${() => copy(command)} aria-label="Copy the command ${plain(command)}">Copy</button></span>`)}
    </p>
  </details>`;
}

/** Who it is about: a key, or a group of keys. */
function callerView(problem) {
  const [, group] = /^group (.*)$/s.exec(problem.caller) ?? [];
  const query = group === undefined ? { key: problem.caller } : { group };
  return html` Its ${group === undefined ? "caller" : "group"}: <a href=${href("requests", "", query)}><code>${callerName(problem)}</code></a>.`;
}

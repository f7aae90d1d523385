// Why a request went where it went: what was compared, chosen and predicted, and what came of it.

import { html, nothing, render } from "./vendor/lit-html/lit-html.js";
import { callerName, count, plain, plural } from "./format.js";
import { leaveItem } from "./route.js";
import { state } from "./state.js";
import { ApiError, ask } from "./stream.js";

const TERMS = ["queue", "reading", "writing", "neighbours", "doubt"];

const REASONS = {
  slower: "had room and were slower", full: "full", paused: "asked for less work", failed: "had failed it",
  excluded: "can't hold it or refused it", not_candidates: "no candidates",
};

/** Goes up with each question: an answer that comes late is not shown. */
let asked = 0;

export const dialog = "why";

/** Ask why, and show it; the page opens the dialog. */
export async function openItem(id) {
  const name = state.requests.get(id)?.request_id ?? id;
  asked += 1;
  const own = asked;
  const draw = (view) => {
    if (own === asked) render(frameView(id, name, view), document.querySelector(`#${dialog} .view`));
  };
  draw(html`<p class="muted" role="status">Asking…</p>`);
  try {
    const response = await ask("GET", `admin/requests/${encodeURIComponent(id)}/why`);
    draw((await response.json()).requests.map(requestView));
  } catch (error) {
    const words = error instanceof ApiError ? error.message : "The gateway does not answer.";
    draw(html`<p class="error" role="alert">${plain(words)}</p>`);
  }
}

/** An answer that comes later is not shown. */
export function closeItem() {
  asked += 1;
}

function frameView(id, name, view) {
  return html`<h2 id="why-name" tabindex="-1" autofocus>Why ${plain(name)}</h2>
    <div class="why">${view}</div>
    <p class="actions"><button class="small" @click=${() => openItem(id)}>Ask again</button>
      <button class="small primary" @click=${leaveItem}>Close</button></p>`;
}

function requestView(request) {
  const { outcome, decisions, waiting } = request;
  const end = outcome === null ? "" : `, ${outcome.status}${outcome.reason ? ` ${plain(outcome.reason)}` : ""}`;
  const facts = [["model", request.model], ["class", request.class], ["caller", request.caller === null ? null : callerName(request)]]
    .filter(([, value]) => value !== null).map(([word, value]) => `${word} ${plain(value)}`);
  return html`<p><b>${plain(request.state)}${end}</b>${request.seconds === null ? nothing
      : ` ${outcome === null ? "for" : "after"} ${time(request.seconds)}`}
      <span class="muted">${facts.join(", ")}</span></p>
    <p class="summary">${plain(request.summary)}</p>
    ${decisions.map((one) => decisionView(one, decisions.length === 1))}
    ${waiting === null || waiting.nodes.length === 0 ? nothing : waitingView(waiting)}
    ${request.parts.length === 0 ? nothing : html`<p>Its parts: ${plain(request.parts.join(", "))}</p>`}`;
}

/** One decision; one that stands alone has been told in the summary. */
function decisionView(one, alone) {
  const summary = alone ? nothing : html`<p>${plain(one.summary)}</p>`;
  const after = `${time(one.seconds)} after it came`;
  if (one.kind !== "granted") return html`<h3>${plain(one.kind)}, ${after}</h3>${summary}`;
  const left = Object.entries(one.not_listed)
    .map(([reason, number]) => `${count(number)} ${REASONS[reason] ?? plain(reason)}`);
  return html`<h3>Attempt ${one.attempt}, ${after}: ${plain(one.node ?? "–")}</h3>${summary}
    ${table("Nodes that were compared",
      ["Node", "Expected", ...TERMS.map((term) => term[0].toUpperCase() + term.slice(1)), "Cached", "Slots", "Note"],
      one.nodes.map((node) => [node.name, time(node.expected_seconds), ...TERMS.map((term) => time(node.terms[term])),
        `${count(node.cached_tokens)} of ${count(one.predicted.prompt_tokens)}`, `${node.slots_busy}/${node.slots_total}`,
        notesOf(node)]))}
    ${left.length === 0 ? nothing : html`<p class="muted">Not listed: ${left.join(", ")}.</p>`}
    ${table("What was predicted, and what came", ["", "Predicted", "Actual"], outcomeRows(one))}`;
}

function notesOf(node) {
  return [...(node.chosen ? ["chosen"] : []), ...node.doubts,
    ...(node.measured ? [] : ["a guess: its speed is not measured"])].join("; ");
}

function outcomeRows({ predicted, actual }) {
  return [
    ["First token", time(predicted.ttft), time(actual.ttft)],
    ["End", time(predicted.seconds), `${time(actual.seconds)}, ${actual.outcome ?? "runs"}`],
    ["Prompt tokens", count(predicted.prompt_tokens), count(actual.prompt_tokens)],
    ["of them cached", count(predicted.cached_tokens), count(actual.cached_tokens)],
    ["Answer tokens", count(predicted.completion_tokens), count(actual.completion_tokens)],
  ];
}

function waitingView(waiting) {
  return html`<h3>It waits for ${plural(waiting.nodes_alive, "node")}</h3>
    ${table("Nodes that it waits for", ["Node", "State", "Slots", "Free in", "Cached", "Expected"],
      waiting.nodes.map((node) => [node.name, node.state, `${node.slots_busy}/${node.slots_total}`, time(node.free_in),
        count(node.cached_tokens), time(node.expected_seconds)]))}`;
}

function table(label, columns, rows) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table>
    <thead><tr>${columns.map((column) => (column === "" ? html`<td></td>` : html`<th scope="col">${column}</th>`))}</tr></thead>
    <tbody>${rows.map(([first, ...rest]) => html`<tr><th scope="row">${plain(first)}</th>${rest.map(
      (cell) => html`<td>${plain(cell)}</td>`)}</tr>`)}</tbody></table></div>`;
}

function time(value) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) >= 0.1 || value === 0 ? `${value.toFixed(1)} s` : `${value.toFixed(3)} s`;
}

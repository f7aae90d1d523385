// One request at its own address: why it went where it went, what was compared, chosen and predicted, and
// what came of it. What only the ledger still has is told as far as it goes.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { cancel } from "./actions.js";
import { keepAsking } from "./ask.js";
import { count, moment, plain, plural } from "./format.js";
import { legendView, lifeOf, stripView, wordsOf } from "./life.js";
import { href } from "./route.js";
import { state } from "./state.js";
import { tableView } from "./table.js";

const TERMS = ["queue", "reading", "writing", "neighbours", "doubt"];
/** Seconds after which the page asks again of a request that has not ended. */
const ASK_AGAIN = 2;

const REASONS = {
  slower: "had room and were slower", full: "full", paused: "asked for less work", failed: "had failed it",
  excluded: "can't hold it or refused it", not_candidates: "no candidates",
};

let shown = null;
let stop = () => {};

export function enter(route, redraw) {
  if (shown?.id !== route.id) shown = { id: route.id, requests: null, trouble: "" };
  askFor(redraw);
}

export function leave() {
  stop();
  // The next key may not see what this one has shown.
  if (state.summary === null) shown = null;
}

function askFor(redraw) {
  stop();
  stop = keepAsking(async (get) => {
    const { requests } = await get(`admin/requests/${encodeURIComponent(shown.id)}/why`);
    shown = { ...shown, requests };
    return requests.some(isOpen) ? ASK_AGAIN : 0;
  }, (trouble) => {
    shown = { ...shown, trouble };
    redraw();
  });
}

function isOpen(request) {
  return request.state === "waiting" || request.state === "running";
}

export function view(route, redraw) {
  const { id, requests, trouble } = shown;
  return html`<section id="request" class="panel" tabindex="-1" aria-labelledby="request-title">
    <div class="bar"><h2 id="request-title">Request <code>${plain(requests?.[0]?.request_id ?? id)}</code></h2>
      <button class="small" @click=${() => askFor(redraw)}>Ask again</button></div>
    <p class="error" role="alert">${plain(trouble)}</p>
    ${requests === null ? html`<p class="muted" role="status">${trouble ? nothing : "Asking…"}</p>` : requests.map(requestView)}
  </section>`;
}

function requestView(request, place, all) {
  const { outcome, decisions, waiting } = request;
  const end = outcome === null ? "" : `, ${outcome.status}${outcome.reason ? ` ${plain(outcome.reason)}` : ""}`;
  const facts = [
    ["id", request.id === request.request_id ? null : html`<code>${plain(request.id)}</code>`],
    ["came", request.received_at === null ? null : moment(request.received_at, state.at)],
    ["path", request.path === null ? null : html`<code>${plain(request.path)}</code>`],
    ["model", linked(request.model, (name) => href("models", name))],
    ["class", request.class],
    ["caller", linked(request.caller, (key) => href("requests", "", { key }), request.caller_name ?? request.caller)],
  ].filter(([, value]) => value !== null);
  const life = request.row === null ? decisions.flatMap(partsOf) : lifeOf(request.row);
  const attempts = decisions.filter((one) => one.kind === "granted");
  const numbers = request.row ?? { attempts: attempts.length, resumptions: attempts.filter((one) => one.resumes).length };
  return html`${all.length > 1 ? html`<h3>${place + 1} of ${all.length} with this X-Request-ID</h3>` : nothing}
    <p><b>${plain(request.state)}${end}</b>${request.seconds === null ? nothing
      : ` ${outcome === null ? "for" : "after"} ${time(request.seconds)}`}
      ${isOpen(request) ? html`<button class="small" @click=${(event) => cancel(event, request.id, request.request_id)}
        aria-label="Cancel request ${plain(request.request_id)}">Cancel</button>` : nothing}</p>
    <p class="summary">${plain(request.summary)}</p>
    <p class="muted">${facts.map(([word, value], index) => html`${index ? ", " : ""}${word} ${value}`)}</p>
    ${life.length === 0 ? nothing : html`<div class="life">${stripView(life, request.seconds ?? 0)}
      <p>Its life: ${wordsOf(life, numbers)}</p>${legendView([...new Set(life.map(([name]) => name))])}</div>`}
    ${request.unknown.length === 0 ? nothing : html`<p class="muted">No longer known: ${plain(request.unknown.join("; "))}.</p>`}
    ${decisions.map((one) => decisionView(one, request.id, decisions.length === 1))}
    ${waiting === null || waiting.nodes.length === 0 ? nothing : waitingView(waiting)}
    ${request.parts.length === 0 ? nothing : html`<p>Its parts: ${request.parts.map((id) => html`<a
      href=${href("requests", id)}><code>${plain(id)}</code></a> `)}</p>`}`;
}

function linked(value, address, name = value) {
  return value === null ? null : html`<a href=${address(value)} title=${plain(value)}>${plain(name)}</a>`;
}

/** The parts of a request's life that a decision tells of, in seconds after it came. */
function partsOf(decision) {
  const { kind, seconds: at, waited, actual } = decision;
  if (kind === "queued") return [["queue", at, at + waited]];
  if (kind !== "granted") return [];
  const end = at + actual.seconds;
  const first = actual.ttft === null ? end : at + actual.ttft;
  const isCut = actual.outcome !== null && actual.outcome !== "ok";
  // An answer that came in one piece does not tell when it began.
  const before = actual.ttft === null && actual.outcome !== null ? "unknown" : "reading";
  return [[before, at, first], ...(end > first ? [["writing", first, end]] : []), ...(isCut ? [["break", end, end]] : [])];
}

/** One decision; one that stands alone has been told in the summary. */
function decisionView(one, id, alone) {
  const summary = alone ? nothing : html`<p>${plain(one.summary)}</p>`;
  const after = `${time(one.seconds)} after it came`;
  if (one.kind !== "granted") return html`<h3>${plain(one.kind)}, ${after}</h3>${summary}`;
  const which = `, attempt ${one.attempt} of ${plain(id)}`;
  const left = Object.entries(one.not_listed)
    .map(([reason, number]) => `${count(number)} ${REASONS[reason] ?? plain(reason)}`);
  const longest = Math.max(...one.nodes.map((node) => added(node.terms)));
  return html`<h3>Attempt ${one.attempt}, ${after}: ${linked(one.node, (name) => href("nodes", name)) ?? "–"}</h3>${summary}
    ${one.nodes.length === 0 ? nothing : html`${legendView([...TERMS, ...(one.nodes.some((node) => node.terms.doubt < 0) ? ["less"] : [])],
      { less: "doubt below 0" })}${tableView(`Nodes that were compared${which}`,
      ["Node", "What it was expected to cost", "Expected", ...TERMS.map((term) => term[0].toUpperCase() + term.slice(1)), "Cached", "Slots", "Note"],
      one.nodes, (node) => [node.name, stripView(stacked(node.terms), longest), time(node.expected_seconds),
        ...TERMS.map((term) => time(node.terms[term])),
        `${count(node.cached_tokens)} of ${count(one.predicted.prompt_tokens)}`, `${node.slots_busy}/${node.slots_total}`,
        notesOf(node)])}`}
    ${left.length === 0 ? nothing : html`<p class="muted">Not listed: ${left.join(", ")}.</p>`}
    ${tableView(`What was predicted, and what came${which}`, ["", "Predicted", "Actual"], outcomeRows(one), (row) => row, { key: ([name]) => name })}`;
}

function added(terms) {
  return TERMS.reduce((sum, term) => sum + Math.max(0, terms[term]), 0);
}

/** The terms one on the other; what is below 0 takes something of the others. */
function stacked(terms) {
  let at = 0;
  const parts = TERMS.filter((term) => terms[term] > 0).map((term) => [term, at, at += terms[term]]);
  return terms.doubt < 0 ? [...parts, ["less", Math.max(0, at + terms.doubt), at]] : parts;
}

function notesOf(node) {
  return [...(node.chosen ? ["chosen"] : []), ...node.doubts,
    ...(node.measured ? [] : ["a guess: its speed is not measured"])].join("; ");
}

function outcomeRows({ predicted, actual }) {
  const longest = Math.max(predicted.seconds ?? 0, actual.seconds);
  const course = ({ ttft, seconds, outcome }) => (seconds === null ? "–" : stripView(ttft === null
    ? [[outcome === null ? "reading" : "unknown", 0, seconds]] : [["reading", 0, ttft], ["writing", ttft, seconds]], longest));
  return [
    ["Course", course(predicted), course(actual)],
    ["First token", time(predicted.ttft), time(actual.ttft)],
    ["End", time(predicted.seconds), `${time(actual.seconds)}, ${actual.outcome ?? "runs"}`],
    ["Prompt tokens", count(predicted.prompt_tokens), count(actual.prompt_tokens)],
    ["of them cached", count(predicted.cached_tokens), count(actual.cached_tokens)],
    ["Answer tokens", count(predicted.completion_tokens), count(actual.completion_tokens)],
  ];
}

function waitingView(waiting) {
  return html`<h3>It waits for ${plural(waiting.nodes_alive, "node")}</h3>
    ${tableView("Nodes that it waits for", ["Node", "State", "Slots", "Free in", "Cached", "Expected"],
      waiting.nodes, (node) => [node.name, node.state, `${node.slots_busy}/${node.slots_total}`, time(node.free_in),
        count(node.cached_tokens), time(node.expected_seconds)])}`;
}

function time(value) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) >= 0.1 || value === 0 ? `${value.toFixed(1)} s` : `${value.toFixed(3)} s`;
}

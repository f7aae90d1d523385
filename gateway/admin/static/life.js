// The parts of a time as a strip, such as a request's life: its queue, its reading, its writing.

import { html, svg } from "./vendor/lit-html/lit-html.js";
import { plural, seconds } from "./format.js";

const WIDTH = 1000;
/** Of the strip: the least that a part takes. */
const LEAST = 3;
/** Seconds, and share of the whole, from which on a part is worth a word. */
const [LEAST_WORTH, LEAST_SHARE] = [0.05, 0.01];
const WORDS = { queue: "waiting", other: "between", unknown: "not known", break: "an attempt ends" };

/** Parts as a strip that is `whole` seconds long; each is [name, from, to], a break from = to. Words tell the same. */
export function stripView(parts, whole) {
  const scale = WIDTH / Math.max(whole, 1e-9);
  return html`<svg class="strip" viewBox="0 0 ${WIDTH} 14" preserveAspectRatio="none" aria-hidden="true">${parts.map(
    ([name, from, to]) => {
      const x = Math.min(from * scale, WIDTH - LEAST);
      return lineView(name, x, Math.min(Math.max(to * scale, x + LEAST), WIDTH));
    })}</svg>`;
}

function lineView(name, from, to) {
  return name === "break" ? svg`<line class="break" x1=${from} x2=${from} y1="0" y2="14"></line>`
    : svg`<line class=${name} x1=${from} x2=${to} y1="7" y2="7"></line>`;
}

export function legendView(names, words = WORDS) {
  return html`<p class="legend muted" aria-hidden="true">${names.map((name) => html`<span><svg class="strip"
    viewBox="0 0 20 14">${name === "break" ? lineView(name, 10) : lineView(name, 0, 20)}</svg> ${words[name] ?? name}</span>`)}</p>`;
}

/** The parts in words: how long each kind takes. */
export function wordsOf(parts, { attempts = 1, resumptions = 0 } = {}) {
  const sums = new Map(["queue", "reading", "writing", "other", "unknown"].map((name) => [name, 0]));
  for (const [name, from, to] of parts) if (sums.has(name)) sums.set(name, sums.get(name) + to - from);
  const whole = [...sums.values()].reduce((sum, one) => sum + one, 0);
  const words = [...sums].filter(([, sum]) => sum >= Math.max(LEAST_WORTH, LEAST_SHARE * whole))
    .map(([name, sum]) => `${seconds(sum)} ${WORDS[name] ?? name}`);
  if (attempts > 1) words.push(plural(attempts, "attempt"));
  if (resumptions > 0) words.push(`resumed ${resumptions === 1 ? "once" : `${resumptions} times`}`);
  return words.join(", ");
}

/** The life of a row of the ledger: what it waited, when its first token came, what reading and writing took. */
export function lifeOf(row) {
  const { seconds: whole, wait_seconds: waited, ttft_seconds: first } = row;
  const { prefill_seconds: reading = null, decode_seconds: writing = null } = row;
  const wrote = writing ?? (first === null ? null : whole - first);
  const read = reading ?? (first === null || waited === null ? null : first - waited);
  const isKnown = waited !== null || read !== null || wrote !== null;
  const parts = [];
  let at = 0;
  const add = (name, until) => {
    const end = Math.min(until, whole);
    if (end > at) parts.push([name, at, end]);
    at = Math.max(at, end);
  };
  add("queue", waited ?? 0);
  if (first !== null) {
    add(waited === null ? "unknown" : "other", first - (read ?? 0));
    add("reading", first);
  } else add("reading", at + (read ?? 0));
  add("writing", at + (wrote ?? 0));
  add(isKnown ? "other" : "unknown", whole);
  return parts;
}

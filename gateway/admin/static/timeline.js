// The timeline of slots: a lane for each slot over the last ten minutes, drawn by a canvas. A slot that reads a
// prompt is striped, one that writes is solid, in the colour of the caller; who waits is drawn below.

import { html, nothing, render } from "./vendor/lit-html/lit-html.js";
import { keepAsking } from "./ask.js";
import { callerName, count, plain, seconds } from "./format.js";
import { go, href } from "./route.js";
import { isOperator, state } from "./state.js";
import { colour, theme } from "./theme.js";

const SPAN_SECONDS = 600;
/** Seconds that are drawn at least, of a gateway that has just started. */
const LEAST_SPAN = 60;
const POLL_SECONDS = 2;
const [LABEL, LABEL_NARROW, RIGHT] = [118, 72, 8];
const [MOST_LANE, LEAST_LANE, ALL_LANES] = [15, 4, 420];
const [NODE_GAP, WAIT_HEIGHT, AXIS] = [4, 34, 18];
/** Callers with a colour of their own; all further ones share the last. */
const COLOURS = 7;
const OTHERS = "other callers";
/** Ends of an attempt that cut nothing short. */
const WHOLE = new Set(["ok", "client_closed", "cancelled", "unknown"]);
/** Seconds for which a slot that was given anew may seem taken: its end is told a little later. */
const SLACK = 0.5;

/** Attempts by request and lease. */
let spans = new Map();
/** The newest answer without its spans. */
let told = null;
/** By node: who has each lane, and since when its lanes are drawn. */
let lanes = new Map();
/** By caller: her colour's number; and her name. */
const colours = new Map();
let names = new Map();
/** The caller whose spans alone are in colour; null: all. */
let chosen = null;
let stop = () => {};
let layout = null;
/** What lies under the pointer. */
let pointed = null;
/** The role for which the spans were told: a viewer is told of no callers. */
let role = "";

/** Begin to ask; `leave` ends it. What is missed in between comes with the next answer. */
export function enter() {
  stop = keepAsking(async (get) => {
    if (state.connection === "live") {
      if (role !== state.role) [role, told, spans] = [state.role, null, new Map()];
      take(await get(told === null ? "admin/timeline" : `admin/timeline?after=${told.at}`));
    }
    return POLL_SECONDS;
  }, () => {}, POLL_SECONDS);
}

export function leave() {
  stop();
  layout = null;
}

function take(answer) {
  const isOther = JSON.stringify(told?.nodes) !== JSON.stringify(answer.nodes);
  const columns = answer.columns;
  const running = new Set();
  for (const values of answer.spans) {
    const span = Object.fromEntries(columns.map((name, place) => [name, values[place]]));
    const key = `${span.request}/${span.lease}`;
    if (span.end === null) running.add(key);
    spans.set(key, Object.assign(spans.get(key) ?? { lanes: null }, span));
  }
  for (const [key, span] of spans) {
    // It ran, and is told of no more: the gateway has begun anew.
    if (span.end === null && !running.has(key)) span.end = told.at;
    if (span.end !== null && span.end < answer.at - SPAN_SECONDS) spans.delete(key);
  }
  delete answer.spans;
  told = answer;
  if (isOther) placeAnew();
  place();
  paint();
}

function placeAnew() {
  lanes = new Map(Object.entries(told.nodes).map(([name, slots]) => [name, Array(slots).fill(null)]));
  for (const span of spans.values()) span.lanes = null;
  layout = null;
}

/** Give each new attempt the first lanes of its node that are free when it begins. */
function place() {
  const fresh = [...spans.values()].filter((span) => span.lanes === null).sort((a, b) => a.begin - b.begin);
  for (const span of fresh) {
    const own = lanes.get(span.node);
    if (own === undefined) { spans.delete(`${span.request}/${span.lease}`); continue; }
    const until = (holder) => (holder === null ? 0 : holder.end ?? Infinity);
    const free = own.map((_, lane) => lane).filter((lane) => until(own[lane]) <= span.begin + SLACK);
    span.lanes = free.slice(0, span.slots);
    for (const lane of span.lanes) own[lane] = span;
  }
}

/** Colours are given once, the busiest callers first. */
function paint() {
  const busy = new Map();
  names = new Map();
  for (const span of spans.values()) {
    names.set(span.caller, callerName(span));
    if (span.caller !== null) busy.set(span.caller, (busy.get(span.caller) ?? 0) + (span.end ?? told.at) - span.begin);
  }
  for (const caller of colours.keys()) if (!busy.has(caller)) colours.delete(caller);
  const taken = new Set(colours.values());
  const free = [...Array(COLOURS).keys()].filter((number) => !taken.has(number));
  for (const [caller] of [...busy].sort((a, b) => b[1] - a[1])) {
    if (!colours.has(caller) && free.length > 0) colours.set(caller, free.shift());
  }
}

const colourOf = (span) => (span.caller === null ? 0 : colours.get(span.caller) ?? COLOURS);

export function timelineView(redraw) {
  if (told === null) return nothing;
  const shown = Object.values(told.nodes).reduce((sum, slots) => sum + slots, 0);
  return html`<section id="timeline" class="panel" aria-labelledby="timeline-title">
    <div class="bar"><h2 id="timeline-title">Slots, the last ten minutes <small>${shown < told.slots_total
      ? `${count(shown)} of ${count(told.slots_total)}, a sample of the nodes` : ""}</small></h2>
      ${legendView(redraw)}</div>
    <canvas role="img" aria-label="A lane for each slot over the last ten minutes; the table below tells the same"
      @pointermove=${point} @pointerleave=${point} @click=${open}></canvas>
    <p class="tip muted" aria-hidden="true"></p>
    <div class="unseen" id="timeline-words"></div>
  </section>`;
}

function legendView(redraw) {
  const callers = [...colours].sort((a, b) => a[1] - b[1]);
  const hasOthers = [...spans.values()].some((span) => colourOf(span) === COLOURS);
  return html`<p class="legend"><span class="muted"><i class="sample reading"></i> reads the prompt</span>
    <span class="muted"><i class="sample"></i> writes</span><span class="muted"><i class="sample cut"></i> cut short</span>
    <span class="muted"><i class="sample resumed"></i> goes on elsewhere</span>
    ${callers.map(([caller, number]) => html`<button class="chip caller" title=${names.get(caller)} aria-pressed=${chosen === caller}
      @click=${() => { chosen = chosen === caller ? null : caller; redraw(); }}><i class="k${number}"
      aria-hidden="true"></i>${names.get(caller)}</button>`)}
    ${hasOthers ? html`<span class="caller"><i class="k${COLOURS}" aria-hidden="true"></i>${OTHERS}</span>` : nothing}</p>`;
}

// The picture.

/** Draw the timeline as of now. */
export function drawTimeline() {
  const canvas = document.querySelector("#timeline canvas");
  if (canvas === null || told === null || state.summary === null) return;
  const wanted = `${canvas.clientWidth} ${devicePixelRatio} ${theme()}`;
  if (layout === null || layout.canvas !== canvas || layout.wanted !== wanted) layout = laidOut(canvas, wanted);
  const { context, left, right, tops, lane, bottom } = layout;
  const now = Math.max(state.at, told.at);
  const first = firstOf(now);
  // At whole dots: what stands between them takes a browser three times as long.
  const across = (right - left) / (now - first);
  const x = (at) => Math.round((left + Math.max(0, at - first) * across) * devicePixelRatio) / devicePixelRatio;
  context.clearRect(0, 0, layout.width, layout.height);
  drawFrame(first, now, x);
  const moved = new Map();
  for (const span of spans.values()) {
    const faded = chosen !== null && span.caller !== chosen;
    const [begin, end] = [x(span.begin), x(span.end ?? now)];
    const writes = span.writes === null ? end : Math.min(end, Math.max(begin, x(span.writes)));
    const number = faded ? COLOURS + 1 : colourOf(span);
    for (const own of span.lanes) {
      const y = tops.get(span.node) + own * (lane + 1);
      context.fillStyle = layout.stripes[number];
      if (writes > begin) context.fillRect(begin, y, Math.max(1, writes - begin), lane);
      context.fillStyle = layout.solid[number];
      if (end > writes) context.fillRect(writes, y, Math.max(1, end - writes), lane);
    }
    if (span.resumes || isCut(span)) {
      const attempts = moved.get(span.request) ?? [];
      attempts.push(span);
      moved.set(span.request, attempts);
    }
  }
  for (const attempts of moved.values()) drawMoves(attempts.sort((a, b) => a.begin - b.begin), x);
  drawWaiting(now, x, bottom);
  drawWords();
}

/** The time at the left side of the picture. */
const firstOf = (now) => Math.max(now - SPAN_SECONDS, Math.min(told.since, now - LEAST_SPAN));

const isCut = (span) => span.outcome !== null && !WHOLE.has(span.outcome);

/** Where a response was cut, and from where to where it went. */
function drawMoves(attempts, x) {
  const { context, tops, lane, left } = layout;
  const middle = (span) => tops.get(span.node) + (span.lanes[0] ?? 0) * (lane + 1) + lane / 2;
  let before = null;
  for (const span of attempts) {
    if (span.lanes.length === 0) continue;
    if (span.resumes && before !== null) {
      const [from, to] = [x(before.end ?? before.begin), x(span.begin)];
      if (to > left) {
        for (const [ink, width] of [[layout.panel, 4], [layout.ink, 1.5]]) {
          context.strokeStyle = ink;
          context.lineWidth = width;
          context.beginPath();
          context.moveTo(from, middle(before));
          context.bezierCurveTo(from + 14, middle(before), to - 14, middle(span), to, middle(span));
          context.stroke();
        }
      }
    }
    if (isCut(span) && x(span.end) > left) {
      context.fillStyle = layout.bad;
      context.fillRect(x(span.end) - 1.5, middle(span) - lane / 2 - 1, 3, lane + 2);
    }
    if (span.resumes && x(span.begin) > left) {
      context.fillStyle = layout.ink;
      context.beginPath();
      context.arc(x(span.begin), middle(span), Math.min(3.5, lane / 2), 0, 2 * Math.PI);
      context.fill();
    }
    before = span;
  }
}

function drawFrame(first, now, x) {
  const { context, tops, lane, left, right, bottom, width } = layout;
  context.fillStyle = layout.track;
  for (const [name, slots] of Object.entries(told.nodes)) {
    for (let own = 0; own < slots; own += 1) context.fillRect(left, tops.get(name) + own * (lane + 1), right - left, lane);
  }
  context.fillStyle = layout.muted;
  context.font = layout.font;
  context.textAlign = "right";
  context.textBaseline = "middle";
  let free = 0;
  for (const [name, slots] of Object.entries(told.nodes)) {
    const y = tops.get(name) + (slots * (lane + 1)) / 2;
    if (y < free) continue;
    context.fillText(layout.labels.get(name), left - 6, y);
    free = y + layout.row;
  }
  context.textBaseline = "alphabetic";
  for (let minute = Math.ceil(first / 60); minute * 60 <= now; minute += 1) {
    if (minute % (width < 600 ? 3 : 1) !== 0) continue;
    const at = x(minute * 60);
    context.fillStyle = layout.line;
    context.fillRect(at, 0, 1, bottom + layout.wait + 4);
    context.fillStyle = layout.muted;
    context.textAlign = at > right - 18 ? "right" : at < left + 18 ? "left" : "center";
    context.fillText(clock(minute * 60), at, layout.height - 4);
  }
}

/** How many wait, from the steps of the last hour. */
function drawWaiting(now, x, top) {
  const { context, left, right } = layout;
  const { columns, points } = state.history;
  const [at, queued] = [columns.indexOf("at"), columns.indexOf("queued")];
  const recent = points.filter((point) => point[at] > now - SPAN_SECONDS - state.history.step);
  const present = Object.values(state.summary.queue).reduce((sum, depth) => sum + depth, 0);
  const most = Math.max(1, present, ...recent.map((point) => point[queued]));
  const { wait } = layout;
  const base = top + wait;
  context.fillStyle = layout.muted;
  context.globalAlpha = 0.45;
  const steps = [...recent.map((point) => [point[at], point[queued]]), [now, present]];
  for (const [place, [end, depth]] of steps.entries()) {
    const from = x(place === 0 ? end - state.history.step : steps[place - 1][0]);
    const height = (depth / most) * (wait - 4);
    if (depth > 0) context.fillRect(from, base - height, Math.max(1, x(end) - from), height);
  }
  context.globalAlpha = 1;
  context.fillStyle = layout.line;
  context.fillRect(left, base, right - left, 1);
  context.fillStyle = layout.muted;
  context.textAlign = "right";
  context.fillText("waiting", left - 6, base - wait / 2 + 1);
  context.fillText(`most ${count(steps.every(([, depth]) => depth === 0) ? 0 : most)}`, left - 6, base);
}

function laidOut(canvas, wanted) {
  const width = canvas.clientWidth;
  const nodes = Object.entries(told.nodes);
  const number = nodes.reduce((sum, [, slots]) => sum + slots, 0);
  const lane = Math.max(LEAST_LANE, Math.min(MOST_LANE, Math.floor(ALL_LANES / Math.max(1, number)) - 1));
  const tops = new Map();
  let y = 2;
  for (const [name, slots] of nodes) {
    tops.set(name, y);
    y += slots * (lane + 1) + NODE_GAP;
  }
  // In units of the letters that the style sheet has them in.
  const letters = parseFloat(getComputedStyle(document.documentElement).fontSize) / 14;
  const [wait, row] = [WAIT_HEIGHT * letters, 13 * letters];
  const height = y + wait + AXIS * letters;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
  const context = canvas.getContext("2d");
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  const inks = [...Array(COLOURS).keys()].map((one) => colour(`--caller-${one}`, true));
  inks.push(colour("--others", true), colour("--line", true));
  const left = Math.min(width / 3, letters * (width < 600 ? LABEL_NARROW : LABEL));
  const font = `${Math.round(11 * letters)}px system-ui, sans-serif`;
  context.font = font;
  return {
    canvas, wanted, context, width, height, wait, row, tops, lane, bottom: y, left, right: width - RIGHT, font,
    labels: new Map(nodes.map(([name]) => [name, shortened(context, plain(name), left - 10)])),
    solid: inks, stripes: inks.map((ink) => striped(context, ink)),
    track: colour("--back"), line: colour("--line"), muted: colour("--muted"), ink: colour("--text"),
    panel: colour("--panel"), bad: colour("--bad", true),
  };
}

function striped(context, ink) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const own = tile.getContext("2d");
  own.fillStyle = ink;
  own.globalAlpha = 0.22;
  own.fillRect(0, 0, 6, 6);
  own.globalAlpha = 1;
  own.strokeStyle = ink;
  own.lineWidth = 2;
  own.beginPath();
  for (const shift of [-6, 0, 6]) {
    own.moveTo(shift - 1, 7);
    own.lineTo(shift + 7, -1);
  }
  own.stroke();
  return context.createPattern(tile, "repeat");
}

function shortened(context, words, most) {
  if (context.measureText(words).width <= most) return words;
  let kept = words.slice(-40);
  while (kept.length > 1 && context.measureText(`…${kept}`).width > most) kept = kept.slice(1);
  return `…${kept}`;
}

const clock = (at) => new Date(at * 1000).toTimeString().slice(0, 5);

// What the pointer looks at.

function spanAt(event) {
  if (layout === null) return null;
  const { left, right, tops, lane } = layout;
  const now = Math.max(state.at, told.at);
  const first = firstOf(now);
  const at = first + ((event.offsetX - left) / (right - left)) * (now - first);
  return [...spans.values()].findLast((span) => at >= span.begin - 1 && at <= (span.end ?? now) + 1
    && span.lanes.some((own) => Math.floor((event.offsetY - tops.get(span.node)) / (lane + 1)) === own)) ?? null;
}

function point(event) {
  pointed = event.type === "pointerleave" ? null : spanAt(event);
  event.currentTarget.classList.toggle("can-open", pointed !== null && isOperator());
  const tip = document.querySelector("#timeline .tip");
  render(pointed === null ? nothing : html`${wordsOf(pointed)}`, tip);
}

function wordsOf(span) {
  const end = span.end ?? told.at;
  const reading = (span.writes ?? end) - span.begin;
  const ends = span.end === null ? "runs" : isCut(span) ? `cut short: ${plain(span.outcome)}` : plain(span.outcome);
  return [span.caller === null ? "a request" : callerName(span), plain(span.model), plain(span.node), `read ${seconds(reading)}`,
    span.writes === null ? "" : `wrote ${seconds(end - span.writes)}`, span.resumes ? "went on from another node" : "", ends]
    .filter((words) => words !== "").join(" · ");
}

function open() {
  if (pointed !== null && isOperator()) go(href("requests", pointed.request));
}

/** The same for those who do not see the picture: a row for each node, made once of each answer. */
function drawWords() {
  const home = document.getElementById("timeline-words");
  if (home.told === told) return;
  home.told = told;
  const rows = new Map(Object.keys(told.nodes).map((name) => [name, { running: 0, attempts: 0, reading: 0, writing: 0, cut: 0, resumed: 0 }]));
  for (const span of spans.values()) {
    const row = rows.get(span.node);
    const end = span.end ?? told.at;
    const writes = span.writes ?? end;
    row.attempts += 1;
    row.running += span.end === null;
    row.reading += writes - span.begin;
    row.writing += end - writes;
    row.cut += isCut(span);
    row.resumed += span.resumes;
  }
  render(html`<table><caption>What the slots did in the last ten minutes</caption><thead><tr><th scope="col">Node</th>
    <th scope="col">Slots</th><th scope="col">Running</th><th scope="col">Attempts</th><th scope="col">Reading</th>
    <th scope="col">Writing</th><th scope="col">Cut short</th><th scope="col">From another node</th></tr></thead>
    <tbody>${[...rows].map(([name, row]) => html`<tr><th scope="row">${plain(name)}</th><td>${told.nodes[name]}</td>
      <td>${row.running}</td><td>${row.attempts}</td><td>${seconds(row.reading)}</td><td>${seconds(row.writing)}</td>
      <td>${row.cut}</td><td>${row.resumed}</td></tr>`)}</tbody></table>`, home);
}

// The playground: a chat through the gateway, and how each answer came about.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { ask } from "./ask.js";
import { count, money, percent, plain, rate, seconds } from "./format.js";
import { eventsOf } from "./stream.js";
import { state } from "./state.js";

const MOST_TURNS = 40;
const MOST_ANSWER = 400_000;

/** Each turn: role, text, and of an answer what is known of its way. */
let turns = [];
let running = null;

/** What the view is made of. */
export function depends() {
  return [state.summary.models.join("\n"), state.versions.page];
}

export function view(_, redraw) {
  return html`<section id="playground" class="panel" aria-labelledby="playground-title">
    <h2 id="playground-title">Playground <small>a chat by the gateway's own way, in the ledger as its own caller</small></h2>
    <div class="chat" tabindex="0" role="log" aria-label="Chat">${turns.map(turnView)}</div>
    <form @submit=${(event) => { event.preventDefault(); send(event.target, redraw); }}>
      <label class="wide"><span class="unseen">Message</span><textarea name="message" rows="3" maxlength="100000"
        placeholder="Say something to a model" @keydown=${submitOnEnter}></textarea></label>
      <label>Model <select name="model"><option value="">default</option>${repeat(state.summary.models, (name) => name,
        (name) => html`<option value=${name}>${plain(name)}</option>`)}</select></label>
      <label>Class <select name="class"><option>normal</option><option>urgent</option><option>premium</option><option>batch</option></select></label>
      <label>Most tokens <input name="tokens" type="number" min="1" max="100000" .defaultValue=${"256"}></label>
      <span class="actions">
        <button type="submit" class="primary" ?disabled=${running !== null}>Send</button>
        ${running === null ? nothing : html`<button type="button" @click=${() => running.abort()}>Stop</button>`}
        ${turns.length === 0 || running !== null ? nothing : html`<button type="button" @click=${() => { turns = []; redraw(); }}>Clear</button>`}
      </span>
    </form>
  </section>`;
}

function submitOnEnter(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    event.target.form.requestSubmit();
  }
}

function turnView(turn) {
  return html`<div class="turn ${turn.role}">
    <p class="who">${turn.role === "user" ? "You" : "Answer"}</p>
    ${turn.thoughts ? html`<details><summary>Reasoning</summary><p class="text">${turn.thoughts}</p></details>` : nothing}
    <p class="text">${turn.text}</p>
    ${turn.error ? html`<p class="error"><span aria-hidden="true">✕</span> ${plain(turn.error)}</p>` : nothing}
    ${turn.way ? html`<p class="way muted">${turn.way}</p>` : nothing}
  </div>`;
}

async function send(form, redraw) {
  const text = form.elements.message.value.trim();
  if (!text || running !== null) return;
  const messages = turns.filter((turn) => turn.text).map(({ role, text: content }) => ({ role, content }));
  messages.push({ role: "user", content: text });
  const body = { messages, priority: form.elements.class.value };
  if (form.elements.model.value) body.model = form.elements.model.value;
  if (form.elements.tokens.value) body.max_tokens = Number(form.elements.tokens.value);
  const answer = { role: "assistant", text: "", thoughts: "", error: "", way: "Sent…" };
  turns = [...turns, { role: "user", text }, answer].slice(-MOST_TURNS);
  form.elements.message.value = "";
  running = new AbortController();
  redraw();
  try {
    const response = await ask("POST", "admin/chat", { body, signal: running.signal });
    for await (const [name, data] of eventsOf(response)) {
      if (data !== "[DONE]") takeEvent(answer, name, JSON.parse(data));
      redraw();
      scrollDown();
    }
  } catch (error) {
    if (error.name === "AbortError") answer.way = `${answer.way} Stopped.`;
    else { answer.error = error.message; answer.way = ""; }
  } finally {
    running = null;
    redraw();
    scrollDown();
  }
}

function takeEvent(answer, name, value) {
  if (name === "waiting") {
    const start = value.expected_start === null ? "" : `, expected to start in ${seconds(value.expected_start)}`;
    answer.way = `Place ${value.position} in the queue, waited ${seconds(value.seconds)}${start}.`;
  } else if (name === "reading") {
    const part = value.percent === null ? "" : `, ${value.percent} %`;
    answer.way = value.node === null ? "On its way…" : `${plain(value.node)} reads the prompt${part}.`;
  } else if (name === "node") {
    answer.way = wayOf(value);
  } else if (name === "done") {
    answer.way = wayOf(value, true);
  } else if (value.error) {
    answer.error = value.error.message;
  } else {
    const delta = value.choices?.[0]?.delta ?? {};
    if (answer.text.length + answer.thoughts.length < MOST_ANSWER) {
      answer.text += delta.content ?? "";
      answer.thoughts += delta.reasoning_content ?? "";
    }
  }
}

function wayOf(value, ended = false) {
  if (value.node === null) return "";
  const parts = [`${plain(value.node)} (${value.tier}) answered`, `waited ${seconds(value.queue_seconds)}`,
    `first token after ${seconds(value.ttft)}`];
  if (value.attempts > 1) parts.push(`${value.attempts} attempts`);
  if (ended) {
    const cached = value.prompt_tokens ? ` (${percent(value.cached_tokens / value.prompt_tokens)})` : "";
    parts.push(`${count(value.cached_tokens)} of ${count(value.prompt_tokens)} prompt tokens cached${cached}`,
      `${count(value.completion_tokens)} tokens at ${rate(value.tokens_per_second)}/s`);
    if (value.cost) parts.push(`cost ${money(value.cost)}`);
  }
  return `${parts.join(" · ")}.`;
}

function scrollDown() {
  const chat = document.querySelector("#playground .chat");
  if (chat !== null) chat.scrollTop = chat.scrollHeight;
}

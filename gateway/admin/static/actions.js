// What an operator does by a click, and what came of it.

import { html, render } from "./vendor/lit-html/lit-html.js";
import { ask } from "./ask.js";
import { plain } from "./format.js";

const SHOWN_SECONDS = 8;
const MOST_TOASTS = 4;

/** What an element loses the focus to. */
const isNowhere = (element) => element === null || element === document.body;

const toasts = [];
let number = 0;

export function toast(text, isError = false) {
  number += 1;
  const shown = { number, text, isError };
  toasts.push(shown);
  if (toasts.length > MOST_TOASTS) toasts.shift();
  draw();
  setTimeout(() => remove(shown), SHOWN_SECONDS * 1000);
}

function remove(shown) {
  const place = toasts.indexOf(shown);
  if (place >= 0) toasts.splice(place, 1);
  draw();
}

function draw() {
  const list = toasts.map(
    (one) => html`<p class=${one.isError ? "toast error" : "toast"}>
      <span aria-hidden="true">${one.isError ? "✕" : "✓"}</span> ${plain(one.text)}
    </p>`,
  );
  render(list, document.getElementById("toasts"));
}

/** Ask before something is done that others feel: whether the answer is yes. `verb` is the word on the button. */
export function confirmed(question, verb) {
  const dialog = document.getElementById("confirm");
  const button = (word, answer) => html`<button class=${answer ? "primary" : ""}
    @click=${() => dialog.close(answer)}>${word}</button>`;
  render(html`<h2 id="confirm-question" tabindex="-1" autofocus>${plain(question)}</h2>
    <p class="actions">${button("Leave it", "")}${button(verb, "yes")}</p>`, dialog.querySelector(".view"));
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => {
    dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true });
  });
}

/** Ask for a change; `done` gets the answer, and says in words what came of it. */
export async function act(button, method, path, done, body) {
  // A disabled button loses it.
  const hadFocus = document.activeElement === button;
  button.disabled = true;
  try {
    const response = await ask(method, path, { body });
    toast(done(await response.json()));
  } catch (error) {
    toast(error.message, true);
  } finally {
    button.disabled = false;
    if (hadFocus && isNowhere(document.activeElement)) button.focus();
  }
}

function nodePath(name, action) {
  return `admin/nodes/${encodeURIComponent(name)}/${action}`;
}

export async function drain(event, name) {
  const button = event.currentTarget;
  if (!await confirmed(`Drain ${name}? It gets no new work; what it does now goes on to its end.`, "Drain")) return;
  act(button, "POST", nodePath(name, "drain"),
    (node) => `${name} gets no new work; ${node.in_flight} of its requests end by themselves.`);
}

export function resume(event, name) {
  act(event.currentTarget, "POST", nodePath(name, "resume"), () => `${name} is back at work.`);
}

export function probe(event, name) {
  act(event.currentTarget, "POST", nodePath(name, "probe"), (node) => {
    const { answer, detail, seconds } = node.probe;
    return `${name}: ${detail || answer} (${seconds.toFixed(2)} s)`;
  });
}

export async function cancel(event, id, name) {
  const button = event.currentTarget;
  if (!await confirmed(`Cancel request ${name}? Its client gets an error.`, "Cancel it")) return;
  const path = `admin/requests/${encodeURIComponent(id)}`;
  act(button, "DELETE", path, () => `Request ${name} is cancelled.`);
}

/** Take no new requests for a model, or take them again; `then` is called once that is so. */
export async function pauseModel(event, { name, paused }, then) {
  const button = event.currentTarget;
  if (!paused && !await confirmed(`Pause ${name}? New requests for it get 503; those that run end by themselves.`, "Pause it")) return;
  act(button, "POST", `admin/models/${encodeURIComponent(name)}/${paused ? "resume" : "pause"}`, () => {
    then();
    return paused ? `${name} takes requests again.` : `${name} takes no new requests.`;
  });
}

/** Order a router to load or unload a model, or to keep it loaded or not: load, unload, pin or unpin. */
export async function order(event, verb, { model, node }, then) {
  const button = event.currentTarget;
  if (verb === "unload" && !await confirmed(`Unload ${model} from ${node}?`, "Unload it")) return;
  act(button, "POST", "admin/placements", () => {
    then();
    return `${verb} ${model} on ${node}: ordered.`;
  }, { order: verb, model, node });
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied.");
  } catch {
    toast("The browser does not let this page copy.", true);
  }
}

/** Save what the gateway has sent, or what the page has made, as a file. */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** Save what the gateway answers at this path. */
export async function download(event, path, name) {
  const button = event.currentTarget;
  button.disabled = true;
  try {
    save(await (await ask("GET", path)).blob(), name);
  } catch (error) {
    toast(error.message, true);
  }
  button.disabled = false;
}

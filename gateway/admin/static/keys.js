// Keys and usage: who may use the gateway, what is left of each limit, and what was used and paid.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { act, confirmed, copy, toast } from "./actions.js";
import { ask, fetchJson } from "./ask.js";
import { count, plain, plural } from "./format.js";
import { go, href, setQuery } from "./route.js";
import { isOperator, state } from "./state.js";
import { daysView, inWords, limitsView, selectView, shareOf, sumsView, timeOf } from "./usage.js";

const REFRESH_SECONDS = 30;
/** Keys that are drawn at once; the filter finds the others. */
const MOST_KEYS = 200;
const CLASSES = ["urgent", "premium", "normal", "batch"];
const DIMENSIONS = { key: "Key", group: "Group", user: "User", model: "Model" };
/** Fields of limits, with what each is a number of. */
const LIMITS = [["rpm", "Requests a minute"], ["tpm", "Tokens a minute"], ["tokens_per_day", "Tokens a day"],
  ["concurrency", "Requests at one time"], ["budget", "Money, such as 20/month or 0.5/day"]];

/** What the gateway told last; null: it was not asked yet. */
const told = { keys: null, groups: null, key: null, sums: null, days: null, trouble: "", reportTrouble: "", report: "" };
/** A new secret, `{name, key}`: it is here until it was read, and comes never again. */
let secret = null;
/** The form that is open: "new key", "new group", "key", "rotate", or "group NAME". */
let open = "";
/** Whether it has just come or gone, and what had the focus before. */
let moved = false;
let opener = null;
let timer = 0;
/** The route of this page, also while a dialog has another one, and what draws it. */
let here = null;
let redraw = () => {};
/** They go up with each page and with each question to the ledger, so that what was asked before is dropped. */
let [turn, question] = [0, 0];

const isAdmin = () => state.role === "admin";

export function depends({ query }) {
  return [state.role, state.versions.page, String(query)];
}

export function enter(route, draw) {
  [here, redraw] = [route, draw];
  Object.assign(told, { key: null, sums: null, days: null, trouble: "", reportTrouble: "", report: "" });
  load();
  timer = setInterval(() => { if (!document.hidden && open === "") loadKeys(); }, REFRESH_SECONDS * 1000);
}

export function leave() {
  clearInterval(timer);
  [turn, question] = [turn + 1, question + 1];
  secret = null;
  open = "";
}

/** A form that has just come gets the focus, and gives it back when it goes. Another question of the address is asked. */
export function drawn() {
  if (told.report !== "" && told.report !== reportPath(dimension())) loadUsage();
  if (moved) (open === "" ? opener : document.querySelector("form.sheet [data-first]"))?.focus();
  moved = false;
}

async function load() {
  const asked = turn;
  await loadKeys();
  if (asked === turn) await loadUsage();
}

async function loadKeys() {
  if (!isAdmin()) return;
  const asked = turn;
  try {
    const found = here.id === "" ? await Promise.all([fetchJson("admin/keys"), fetchJson("admin/groups")])
      : await fetchJson(keyPath(here.id));
    if (asked !== turn) return;
    if (here.id === "") Object.assign(told, { keys: found[0], groups: found[1].groups, trouble: "" });
    else Object.assign(told, { key: found, trouble: "" });
  } catch (error) {
    if (asked !== turn) return;
    told.trouble = error.message;
  }
  redraw();
}

/** Of one key, its days and its models; of all, what the address says. */
async function loadUsage() {
  const asked = question += 1;
  const [report, days] = [reportPath(dimension()), reportPath("day")];
  Object.assign(told, { sums: null, days: null, reportTrouble: "", report });
  redraw();
  try {
    const found = { sums: await fetchJson(report), days: await fetchJson(days) };
    if (asked !== question) return;
    Object.assign(told, found);
  } catch (error) {
    if (asked !== question) return;
    told.reportTrouble = error.message;
  }
  redraw();
}

const keyPath = (name, action = "") => `admin/keys/${encodeURIComponent(name)}${action}`;

/** What the rows are summed by. */
function dimension() {
  if (here.id !== "") return "model";
  return Object.hasOwn(DIMENSIONS, here.query.get("by")) ? here.query.get("by") : "key";
}

function reportPath(by, format = "json") {
  const { id, query } = here;
  const words = new URLSearchParams({ by, format, ...timeOfPeriod(query.get("period") ?? "30d") });
  // The ledger knows a key by its id alone.
  if (id !== "") words.set("key", told.key?.id ?? id);
  return `admin/usage?${words}`;
}

/** The parameters of "7d", or of a month such as "2026-10". */
function timeOfPeriod(period) {
  if (!/^\d{4}-\d\d$/.test(period)) return { since: /^\d{1,3}d$/.test(period) ? period : "30d" };
  const last = new Date(Date.UTC(Number(period.slice(0, 4)), Number(period.slice(5)), 0)).toISOString().slice(0, 10);
  return { since: `${period}-01`, until: last };
}

function periods() {
  const now = new Date();
  const months = Array.from({ length: 12 }, (_, back) => new Date(Date.UTC(now.getUTCFullYear(), now.getUTCMonth() - back, 1)));
  return [["0d", "Today"], ["7d", "7 days"], ["30d", "30 days"], ["90d", "90 days"], ...months.map((month) => [month.toISOString().slice(0, 7),
    month.toLocaleDateString("en", { month: "long", year: "numeric", timeZone: "UTC" })])];
}

// The pages.

export function view(route) {
  here = route;
  const trouble = told.trouble === "" ? nothing : html`<p class="error" role="alert">${plain(told.trouble)}</p>`;
  if (route.id !== "") return html`${isAdmin() ? keyView(route.id, trouble) : nothing}${usageView(route)}`;
  return html`${isAdmin() ? html`${keysView(route, trouble)}${groupsView()}`
    : html`<p class="panel muted">Keys and groups need the key of an admin.</p>`}${usageView(route)}`;
}

function keysView({ query }, trouble) {
  const find = query.get("find") ?? "";
  const words = find.toLowerCase();
  const every = told.keys?.keys ?? [];
  const found = every.filter((key) => [key.name, key.id, key.group ?? "", key.state].some((text) => text.toLowerCase().includes(words)));
  return html`<section id="keys" class="panel" aria-labelledby="keys-title">
    <h2 id="keys-title">Keys ${told.keys === null ? nothing : html`<small>${count(every.length)}</small>`}</h2>${trouble}
    <div class="bar"><label>Find <input type="search" .value=${find} @input=${(event) => { setQuery("find", event.target.value); redraw(); }}></label>
      <button class="primary" @click=${() => show("new key")}>Make a key</button></div>
    ${secretView()}${open === "new key" ? keyForm(null) : nothing}
    ${(told.keys?.warnings ?? []).map((text) => html`<p class="error">${plain(text)}</p>`)}
    ${found.length === 0 ? html`<p class="muted">${told.keys === null ? "Asking the gateway…" : every.length === 0 ? "There is no key yet."
      : "No key is like that."}</p>` : html`
    <div class="scroll" tabindex="0" role="region" aria-label="Keys"><table>
      <thead><tr><th scope="col">Key</th><th scope="col">State</th><th scope="col">Class</th><th scope="col">Group</th>
        <th scope="col">Fullest limit</th><th scope="col">Last use</th><th scope="col">Old secret</th></tr></thead>
      <tbody>${repeat(found.slice(0, MOST_KEYS), (key) => `${key.source} ${key.id}`, keyRow)}</tbody></table></div>
    ${found.length > MOST_KEYS ? html`<p class="muted">and ${plural(found.length - MOST_KEYS, "more key")}: find them by a word</p>` : nothing}`}
  </section>`;
}

function keyRow(key) {
  const fullest = [...key.standing ?? []].sort((a, b) => shareOf(b) - shareOf(a))[0];
  return html`<tr><th scope="row" class="cut"><a href=${href("keys", key.name)}>${plain(key.name)}</a></th>
    <td>${key.state}</td><td>${key.class ?? "normal"}${key.max_class === (key.class ?? "normal") ? "" : ` to ${key.max_class}`}</td>
    <td class="cut">${key.group === null ? "–" : plain(key.group)}</td>
    <td>${fullest === undefined ? "–" : html`<meter min="0" max="1" low="0.8" high="0.999" optimum="0" .value=${Math.min(1, shareOf(fullest))}
      aria-label="Fullest limit of ${plain(key.name)}"></meter> ${Math.round(100 * shareOf(fullest))} % of ${fullest.limit}`}</td>
    <td>${timeOf(key.last_used_at)}</td><td>${key.previous_until === null ? "–" : `until ${timeOf(key.previous_until)}`}</td></tr>`;
}

function keyView(id, trouble) {
  const { key } = told;
  if (key === null) return html`<section class="panel">${told.trouble === "" ? html`<p class="muted">Asking the gateway…</p>` : trouble}</section>`;
  const isStored = key.source === "store" && key.state !== "revoked";
  return html`<section id="key" class="panel" aria-labelledby="key-title">
    <p><a href=${href("keys")}>All keys</a></p>
    <h2 id="key-title">${plain(key.name)} <small>${key.state}</small></h2>${trouble}${secretView()}
    <dl><dt>Id</dt><dd><code>${plain(key.id)}</code></dd>
      <dt>Class</dt><dd>${key.class ?? "normal"}, at most ${key.max_class}</dd>
      <dt>Group</dt><dd>${key.group === null ? "none" : plain(key.group)}</dd>
      <dt>Models</dt><dd>${key.models === null ? "all" : plain(key.models.join(", "))}</dd>
      <dt>Last use</dt><dd>${timeOf(key.last_used_at)}</dd>
      <dt>Ends</dt><dd>${key.revoked_at === null ? timeOf(key.expires) : `revoked ${timeOf(key.revoked_at)}`}</dd>
      ${key.previous_until === null ? nothing : html`<dt>Old secret</dt><dd>works until ${timeOf(key.previous_until)}</dd>`}</dl>
    ${isStored ? html`<p class="actions"><button @click=${() => show("key")}>Change</button>
      <button @click=${() => show("rotate")}>Rotate</button><button @click=${(event) => revoke(event.currentTarget, key)}>Revoke</button></p>`
      : key.source === "settings" ? html`<p class="muted">It stands in the settings: change or remove it there.</p>` : nothing}
    ${open === "key" ? keyForm(key) : open === "rotate" ? rotateForm(key) : nothing}
    <h3>Limits</h3>${limitsView(key.standing ?? [])}
    ${(key.users ?? []).map((one) => html`<h3>User ${plain(one.user)}</h3>${limitsView(one.standing)}`)}
  </section>`;
}

/** The one time that a secret is shown. */
function secretView() {
  if (secret === null) return nothing;
  return html`<div class="secret" role="status"><p><b>The key of ${plain(secret.name)}</b>: it is shown only now.</p>
    <p class="command"><code>${secret.key}</code><button class="copy" @click=${() => copy(secret.key)}>Copy</button></p>
    <p><button @click=${() => { secret = null; redraw(); }}>I have it</button></p></div>`;
}

function groupsView() {
  return html`<section id="groups" class="panel" aria-labelledby="groups-title"><h2 id="groups-title">Groups</h2>
    <p><button @click=${() => show("new group")}>Make a group</button></p>
    ${open === "new group" ? groupForm(null) : nothing}
    ${told.groups === null ? nothing : told.groups.length === 0 ? html`<p class="muted">There is no group.</p>` : html`
    <ul class="groups">${repeat(told.groups, (group) => group.name, (group) => groupView(group))}</ul>`}</section>`;
}

function groupView(group) {
  const form = `group ${group.name}`;
  return html`<li class="group"><h3>${plain(group.name)} <small>${plural(group.keys, "key")}${
    group.origin === "settings" ? ", of the settings" : ""}</small></h3>
    ${group.origin === "undefined" ? html`<p class="slow">Nobody has defined this group: it has no limit.</p>` : limitsView(group.standing)}
    ${group.origin === "settings" ? nothing : html`<p class="actions"><button class="small" @click=${() => show(form)}
      aria-label="Limits of ${plain(group.name)}">Limits</button>${group.origin === "undefined" ? nothing : html`<button class="small"
      aria-label="Remove ${plain(group.name)}" @click=${(event) => remove(event.currentTarget, group)}>Remove</button>`}</p>`}
    ${open === form ? groupForm(group) : nothing}</li>`;
}

function usageView({ id, query }) {
  if (!isOperator()) return nothing;
  const choose = (name, value) => { setQuery(name, value); redraw(); };
  const [by, { sums, days }] = [dimension(), told];
  return html`<section id="usage" class="panel" aria-labelledby="usage-title"><h2 id="usage-title">Usage ${
    sums === null ? nothing : html`<small>${plain(sums.since.slice(0, 10))} to ${plain(sums.until.slice(0, 10))}, UTC</small>`}</h2>
    <div class="bar">${selectView("Time", periods(), query.get("period") ?? "30d", (value) => choose("period", value))}
    ${id === "" ? selectView("By", Object.entries(DIMENSIONS), by, (value) => choose("by", value)) : nothing}
    <button @click=${() => download(by)}>Download CSV</button></div>
    ${told.reportTrouble !== "" ? html`<p class="error" role="alert">${plain(told.reportTrouble)}</p>`
      : sums === null ? html`<p class="muted" role="status">Reading the ledger…</p>` : html`<p>${inWords(sums.total)}</p>${daysView(days.rows, "")}
      ${sums.rows.length === 0 ? nothing : sumsView(sums.rows, DIMENSIONS[by], (row) => nameOf(row, by), `Usage by ${by}`)}
      ${sums.notes.map((note) => html`<p class="muted">${plain(note)}</p>`)}`}</section>`;
}

function nameOf(row, by) {
  const name = row[by] ?? "none";
  if (by !== "key" || row.key === null) return plain(name);
  const shown = plain(row.key_name ?? name);
  return isAdmin() ? html`<a href=${href("keys", row.key)}>${shown}</a>` : shown;
}

async function download(by) {
  try {
    const file = await (await ask("GET", reportPath(by, "csv"))).blob();
    const link = document.createElement("a");
    link.href = URL.createObjectURL(file);
    link.download = `usage-by-${by}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  } catch (error) {
    toast(error.message, true);
  }
}

// The forms.

function show(form) {
  if (form !== "") opener = document.activeElement;
  [open, moved] = [form, true];
  redraw();
}

/** A form within the page: `send` gets its fields, and returns what to say when all went well. */
function sheet(title, word, fields, send) {
  const submit = async (event) => {
    event.preventDefault();
    const form = event.target;
    const button = form.querySelector(".primary");
    button.disabled = true;
    try {
      toast(await send(Object.fromEntries(new FormData(form))));
      show("");
    } catch (error) {
      toast(error.message, true);
    }
    button.disabled = false;
    await loadKeys();
  };
  return html`<form class="sheet" @submit=${submit} aria-label=${title}><h3>${title}</h3>${fields}
    <p class="actions"><button type="submit" class="primary">${word}</button>
      <button type="button" @click=${() => show("")}>Cancel</button></p></form>`;
}

const field = (name, label, value, more = {}) => html`<label>${label} <input name=${name} .defaultValue=${value ?? ""} autocomplete="off"
  ?required=${more.required} ?data-first=${more.first} placeholder=${more.placeholder ?? ""} type=${more.type ?? "text"} min="1"></label>`;
const choice = (name, label, values, value) => html`<label>${label} <select name=${name}>${values.map(([one, word]) => html`
  <option value=${one} ?selected=${one === value}>${word}</option>`)}</select></label>`;
const limitFields = (limits) => html`<fieldset><legend>Limits; empty: none</legend>${LIMITS.map(([name, label]) =>
  field(name, label, limits?.[name], { type: name === "budget" ? "text" : "number" }))}</fieldset>`;

function limitsOf(fields) {
  return Object.fromEntries(LIMITS.map(([name]) => [name, fields[name] === "" ? null : name === "budget" ? fields[name] : Number(fields[name])]));
}

/** Without `key`: of a new one. */
function keyForm(key) {
  const classes = [["", "normal (not said)"], ...CLASSES.map((name) => [name, name])];
  const most = [["", "its class"], ...CLASSES.map((name) => [name, name])];
  const groups = (told.groups ?? []).map((group) => group.name);
  const fields = html`${field("name", "Name", key?.name, { required: true, first: true })}
    ${choice("class", "Class of requests that name none", classes, key?.class ?? "")}
    ${choice("max_class", "Highest class", most, key === null || key.max_class === (key.class ?? "normal") ? "" : key.max_class)}
    ${field("group", "Group", key?.group, { placeholder: groups.slice(0, 3).join(", ") })}
    ${field("models", "Models, with commas; empty: all", key?.models?.join(", "))}
    ${field("expires", "Ends, such as 90d or 2027-01-31", "", { placeholder: timeOf(key?.expires) })}${limitFields(key?.limits)}`;
  return sheet(key === null ? "A new key" : `Change ${plain(key.name)}`, key === null ? "Make it" : "Change it", fields, async (given) => {
    const models = given.models.split(",").map((name) => name.trim()).filter((name) => name !== "");
    const body = { name: given.name, class: given.class || null, max_class: given.max_class || null, group: given.group.trim() || null,
      models: models.length === 0 ? null : models, limits: limitsOf(given) };
    if (given.expires) body.expires = given.expires;
    const path = key === null ? "admin/keys" : keyPath(key.id);
    const made = await (await ask(key === null ? "POST" : "PATCH", path, { body })).json();
    if (made.key) secret = { name: made.name, key: made.key };
    if (key !== null && made.name !== key.name) go(href("keys", made.name));
    return [key === null ? `${made.name} has a key.` : `${made.name} is changed.`, ...made.warnings ?? []].join(" ");
  });
}

function rotateForm(key) {
  const graces = [["24h", "a day"], ["0", "no longer"], ["1h", "an hour"], ["7d", "a week"], ["30d", "30 days"]];
  const fields = html`<p>It gets a new secret, which is shown once.</p>${choice("grace", "The old one works for", graces, "24h")}`;
  return sheet(`Rotate ${plain(key.name)}`, "Rotate it", fields, async ({ grace }) => {
    const made = await (await ask("POST", keyPath(key.id, "/rotate"), { body: { grace } })).json();
    secret = { name: made.name, key: made.key };
    return `${made.name} has a new secret.`;
  });
}

async function revoke(button, key) {
  if (!await confirmed(`Revoke ${key.name} for good? Within a second its requests get 401; that can't be undone.`, "Revoke it")) return;
  await act(button, "DELETE", keyPath(key.id), () => `${key.name} is revoked.`);
  await loadKeys();
}

function groupForm(group) {
  const fields = html`${group === null ? field("group", "Name", "", { required: true, first: true }) : nothing}${limitFields(group?.limits)}`;
  return sheet(group === null ? "A new group" : `Limits of ${plain(group.name)}`, group === null ? "Make it" : "Set them", fields, async (given) => {
    const name = group?.name ?? given.group.trim();
    const body = { limits: { ...group?.limits, ...limitsOf(given) }, user_limits: group?.user_limits ?? null };
    await ask("PUT", groupPath(name), { body });
    return `${name} has these limits.`;
  });
}

async function remove(button, group) {
  if (!await confirmed(`Remove the group ${group.name}? Its limits go; ${plural(group.keys, "key")} may still name it.`, "Remove it")) return;
  await act(button, "DELETE", groupPath(group.name), () => `${group.name} is removed.`);
  await loadKeys();
}

const groupPath = (name) => `admin/groups/${encodeURIComponent(name)}`;

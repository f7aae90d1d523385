// Keys and usage: who may use the gateway, what is left of each limit, and what was used and paid.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { act, confirmed, copy, download, toast } from "./actions.js";
import { ask, keepAsking } from "./ask.js";
import { count, plain, plural } from "./format.js";
import { go, href, setQuery } from "./route.js";
import { isOperator, state } from "./state.js";
import { cutView, moreView, tableView } from "./table.js";
import { daysView, inWords, LIMITS, limitsView, selectView, shareOf, sumsView, timeOf } from "./usage.js";

const REFRESH_SECONDS = 30;
/** Keys that are asked for and drawn at once; the filter finds the others. */
const MOST_KEYS = 200;
/** Milliseconds from a letter of the filter to the question. */
const TYPING = 250;
const CLASSES = ["urgent", "premium", "normal", "batch"];
const DIMENSIONS = { key: "Key", group: "Group", user: "User", model: "Model" };
/** Fields of limits in forms, with what each is a number of. */
const FIELDS = Object.entries({ ...LIMITS, budget: "Money, such as 20/month or 0.5/day" });

/** What the gateway told last; null: it was not asked yet. */
const told = { keys: null, groups: null, key: null, sums: null, days: null, trouble: "", reportTrouble: "", list: "", report: "" };
/** A new secret, `{name, key}`: it is here until it was read, and comes never again. */
let secret = null;
/** The form that is open: "new key", "new group", "key", "rotate", or "group NAME". */
let open = "";
/** Whether it has just come or gone, and what had the focus before. */
let moved = false;
let opener = null;
/** The route of this page, also while a dialog has another one, and what draws it. */
let here = null;
let redraw = () => {};
/** What ends the questions for keys and for use; and the time until the filter asks. */
let [stopKeys, stopUsage] = [() => {}, () => {}];
let timer = 0;

const isAdmin = () => state.role === "admin";

export function depends({ query }) {
  return [state.role, state.versions.page, String(query)];
}

export function enter(route, draw) {
  [here, redraw] = [route, draw];
  Object.assign(told, { key: null, sums: null, days: null, trouble: "", reportTrouble: "", report: "" });
  if (isAdmin()) askForKeys();
  else askForUsage();
}

export function leave() {
  clearTimeout(timer);
  stopKeys();
  stopUsage();
  secret = null;
  open = "";
}

/** A form that has just come gets the focus, and gives it back when it goes. Another question of the address is asked. */
export function drawn() {
  if (told.report !== "" && told.report !== reportPath(dimension())) askForUsage();
  if (isAdmin() && here.id === "" && told.list !== listPath()) {
    clearTimeout(timer);
    timer = setTimeout(askForKeys, TYPING);
  }
  if (moved) (open === "" ? opener : document.querySelector("form.sheet [data-first]"))?.focus();
  moved = false;
}

/** Ask for the key of the address, or for the first ones that are looked for; what is used needs a key's id. */
function askForKeys() {
  stopKeys();
  told.list = listPath();
  stopKeys = keepAsking(async (get) => {
    if (open !== "") return REFRESH_SECONDS;
    if (here.id !== "") told.key = await get(keyPath(here.id));
    else {
      const [keys, { groups }] = await Promise.all([get(told.list), get("admin/groups")]);
      Object.assign(told, { keys, groups });
    }
    return REFRESH_SECONDS;
  }, (trouble) => {
    told.trouble = trouble;
    if (told.report === "") askForUsage();
    redraw();
  });
}

/** Of one key, its days and its models; of all, what the address says. */
function askForUsage() {
  stopUsage();
  const [report, days] = [reportPath(dimension()), reportPath("day")];
  Object.assign(told, { sums: null, days: null, reportTrouble: "", report });
  stopUsage = keepAsking(async (get) => {
    const sums = await get(report);
    Object.assign(told, { sums, days: await get(days) });
  }, (trouble) => {
    told.reportTrouble = trouble;
    redraw();
  }, 0);
  redraw();
}

function listPath() {
  const find = here.query.get("find");
  return `admin/keys?${new URLSearchParams({ limit: MOST_KEYS, ...find && { find } })}`;
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

/** The day of a time in milliseconds, of UTC, as the ledger's days are. */
const dayOf = (at) => new Date(at).toISOString().slice(0, 10);

/** The parameters of "7d", or of a month such as "2026-10". */
function timeOfPeriod(period) {
  if (!/^\d{4}-\d\d$/.test(period)) return { since: /^\d{1,3}d$/.test(period) ? period : "30d" };
  const last = dayOf(Date.UTC(Number(period.slice(0, 4)), Number(period.slice(5)), 0));
  return { since: `${period}-01`, until: last };
}

function periods() {
  const now = new Date();
  const months = Array.from({ length: 12 }, (_, back) => new Date(Date.UTC(now.getUTCFullYear(), now.getUTCMonth() - back, 1)));
  return [["0d", "Today"], ["7d", "7 days"], ["30d", "30 days"], ["90d", "90 days"], ...months.map((month) => [dayOf(month).slice(0, 7),
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
  const { keys, found, warnings } = told.keys ?? { keys: [], found: 0, warnings: [] };
  return html`<section id="keys" class="panel" aria-labelledby="keys-title">
    <h2 id="keys-title">Keys ${told.keys === null ? nothing : html`<small>${count(found)}</small>`}</h2>${trouble}
    <div class="bar"><label>Find <input type="search" maxlength="200" .value=${find} @input=${(event) => { setQuery("find", event.target.value); redraw(); }}></label>
      <button class="primary" @click=${() => show("new key")}>Make a key</button></div>
    ${secretView()}${open === "new key" ? keyForm(null) : nothing}
    ${warnings.map((text) => html`<p class="error">${plain(text)}</p>`)}
    ${keys.length === 0 ? html`<p class="muted">${told.keys === null ? "Asking the gateway…" : find === "" ? "There is no key yet."
      : "No key is like that."}</p>` : tableView("Keys", ["Key", "State", "Class", "Group", "Fullest limit", "Last use", "Old secret"],
      keys, keyCells, { key: ({ source, id }) => `${source} ${id}` })}
    ${moreView(found - keys.length, "more key")}
  </section>`;
}

function keyCells(key) {
  const fullest = [...key.standing ?? []].sort((a, b) => shareOf(b) - shareOf(a))[0];
  const least = key.class ?? "normal";
  return [
    html`<a href=${href("keys", key.name)}>${cutView(key.name)}</a>`, key.state, key.max_class === least ? least : `${least} to ${key.max_class}`,
    cutView(key.group),
    fullest === undefined ? "–" : html`<meter min="0" max="1" low="0.8" high="0.999" optimum="0" .value=${Math.min(1, shareOf(fullest))}
      aria-label="Fullest limit of ${plain(key.name)}"></meter> ${Math.round(100 * shareOf(fullest))} % of ${fullest.limit}`,
    timeOf(key.last_used_at), key.previous_until === null ? "–" : `until ${timeOf(key.previous_until)}`,
  ];
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
  const last = sums && dayOf(Math.min(Date.parse(sums.until) - 1, 1000 * state.at));
  return html`<section id="usage" class="panel" aria-labelledby="usage-title"><h2 id="usage-title">Usage ${
    sums === null ? nothing : html`<small>${sums.since.slice(0, 10)} to ${last}, UTC</small>`}</h2>
    <div class="bar">${selectView("Time", periods(), query.get("period") ?? "30d", (value) => choose("period", value))}
    ${id === "" ? selectView("By", Object.entries(DIMENSIONS), by, (value) => choose("by", value)) : nothing}
    <button @click=${(event) => download(event, reportPath(by, "csv"), `usage-by-${by}.csv`)}>Download CSV</button></div>
    ${told.reportTrouble !== "" ? html`<p class="error" role="alert">${plain(told.reportTrouble)}</p>`
      : sums === null ? html`<p class="muted" role="status">Reading the ledger…</p>` : html`<p>${inWords(sums.total)}</p>${daysView(days.rows, "", sums.since.slice(0, 10), last)}
      ${sums.rows.length === 0 ? nothing : sumsView(sums.rows, DIMENSIONS[by], by, (row) => nameOf(row, by), `Usage by ${by}`)}
      ${sums.notes.map((note) => html`<p class="muted">${plain(note)}</p>`)}`}</section>`;
}

function nameOf(row, by) {
  const name = row[by] ?? "none";
  if (by !== "key" || row.key === null) return cutView(name);
  const shown = cutView(row.key_name ?? name, name);
  return isAdmin() ? html`<a href=${href("keys", row.key)}>${shown}</a>` : shown;
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
    askForKeys();
  };
  return html`<form class="sheet" @submit=${submit} aria-label=${title}><h3>${title}</h3>${fields}
    <p class="actions"><button type="submit" class="primary">${word}</button>
      <button type="button" @click=${() => show("")}>Cancel</button></p></form>`;
}

const field = (name, label, value, more = {}) => html`<label>${label} <input name=${name} .defaultValue=${value ?? ""} autocomplete="off"
  ?required=${more.required} ?data-first=${more.first} list=${more.list ?? nothing} placeholder=${more.placeholder ?? ""} type=${more.type ?? "text"} min="1"></label>`;
const choice = (name, label, values, value) => html`<label>${label} <select name=${name}>${values.map(([one, word]) => html`
  <option value=${one} ?selected=${one === value}>${word}</option>`)}</select></label>`;
const limitFields = (limits) => html`<fieldset><legend>Limits; empty: none</legend>${FIELDS.map(([name, label]) =>
  field(name, label, limits?.[name], { type: name === "budget" ? "text" : "number" }))}</fieldset>`;

function limitsOf(fields) {
  return Object.fromEntries(FIELDS.map(([name]) => [name, fields[name] === "" ? null : name === "budget" ? fields[name] : Number(fields[name])]));
}

/** Without `key`: of a new one. */
function keyForm(key) {
  const classes = [["", "normal (not said)"], ...CLASSES.map((name) => [name, name])];
  const most = [["", "its class"], ...CLASSES.map((name) => [name, name])];
  const fields = html`${field("name", "Name", key?.name, { required: true, first: true })}
    ${choice("class", "Class of requests that name none", classes, key?.class ?? "")}
    ${choice("max_class", "Highest class", most, key === null || key.max_class === (key.class ?? "normal") ? "" : key.max_class)}
    ${field("group", "Group", key?.group, { list: "key-groups" })}
    <datalist id="key-groups">${(told.groups ?? []).map(({ name }) => html`<option value=${name}></option>`)}</datalist>
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
  askForKeys();
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
  askForKeys();
}

const groupPath = (name) => `admin/groups/${encodeURIComponent(name)}`;

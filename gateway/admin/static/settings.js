// The settings in force and where each comes from, earlier versions of both files, and the way back.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { confirmed, toast } from "./actions.js";
import { ask, keepAsking } from "./ask.js";
import { count, plain, plural, size } from "./format.js";
import { href, setQuery } from "./route.js";
import { state } from "./state.js";
import { tableView } from "./table.js";

const MOST_LISTED = 400;
const FILES = { gateway: "Settings", nodes: "Inventory" };

/** What was asked of the gateway; `compared` is the difference that the address asks for. */
let known = fresh();
let stop = () => {};
/** What came of the last reload: null, what has changed, or the problems. */
let reloaded = null;
let isBusy = false;

function fresh() {
  return { origins: null, files: null, compared: null, trouble: "" };
}

export function enter(route, redraw) {
  known = fresh();
  load(route.id, redraw);
}

export function leave() {
  stop();
  known = fresh();
  reloaded = null;
}

function load(version, redraw) {
  stop();
  stop = keepAsking(async (get) => {
    const [origins, history, compared] = await Promise.all([get("admin/config/origins"), get("admin/config/history"),
      version === "" ? null : get(`admin/config/diff?from=${encodeURIComponent(version)}`)]);
    Object.assign(known, { origins, files: history.files, compared });
  }, (trouble) => {
    known.trouble = trouble;
    redraw();
  });
}

/** What the view is made of. */
export function depends() {
  return [state.versions.page];
}

export function view(route, redraw) {
  return html`${known.trouble ? html`<p class="panel error" role="alert">${plain(known.trouble)}</p>` : nothing}
    ${reloadView(route.id, redraw)}
    ${known.compared === null ? nothing : comparedView(known.compared, redraw)}
    ${known.files === null ? nothing : known.files.map((file) => fileView(file, route.id))}
    ${known.origins === null ? html`<p class="panel muted">Asking…</p>` : valuesView(known.origins, route.query, redraw)}`;
}

// Both files are read again.

function reloadView(version, redraw) {
  const standing = [known.origins?.settings_error, known.origins?.inventory_error].filter(Boolean).join("\n");
  return html`<section id="reload" class="panel" aria-labelledby="reload-title">
    <div class="bar"><h2 id="reload-title">Files on the disk</h2>
      <button ?disabled=${isBusy} @click=${() => reload(version, redraw)}>Read both again</button></div>
    <div role="status">${reloaded === null ? nothing : reloaded.problems ? problemsView(reloaded) : changesView(reloaded)}</div>
    ${reloaded === null && standing ? html`<p class="error">Older texts are in force, since these can't be:</p>
      <ul class="faults">${standing.split("\n").map((line) => html`<li class="problem critical">${plain(line)}</li>`)}</ul>` : nothing}
    ${reloaded === null && !standing ? html`<p class="muted">The gateway reads both by itself when they change; here it says what
      came of it.</p>` : nothing}
  </section>`;
}

async function reload(version, redraw) {
  isBusy = true;
  redraw();
  try {
    reloaded = await (await ask("POST", "admin/reload")).json();
  } catch (error) {
    reloaded = { message: error.message, problems: error.problems ?? [] };
  }
  isBusy = false;
  redraw();
  load(version, redraw);
}

function problemsView({ message, problems }) {
  if (problems.length === 0) return html`<p class="error">${plain(message)}</p>`;
  return html`<p class="error">${plural(problems.length, "problem")}: a file with one has changed nothing.</p>
    <ol class="faults">${problems.map((one) => html`<li class="problem critical">
      <p><code>${plain(one.file)}${one.line ? `:${one.line}` : ""}</code> ${one.key ? html`<b>${plain(one.key)}</b>` : nothing}</p>
      <p>${plain(one.message)}</p>${one.remedy ? html`<p class="remedy">${plain(one.remedy)}</p>` : nothing}</li>`)}</ol>`;
}

function changesView({ nodes, settings }) {
  const parts = [["nodes added", nodes.added], ["nodes changed", nodes.changed], ["nodes removed", nodes.removed],
    ["settings changed", settings.changed], ["in force after a restart only", settings.needs_restart]]
    .filter(([, names]) => names.length > 0);
  return parts.length === 0 ? html`<p>Both are valid, and nothing has changed.</p>`
    : html`<p>Both are valid. ${parts.map(([word, names]) => html`<span class="change">${word}: ${plain(names.join(", "))}</span> `)}</p>`;
}

// The versions of a file.

function fileView(file, shown) {
  const { versions } = file;
  const isEdited = versions.length > 0 && !versions.some((one) => one.on_disk);
  return html`<section class="panel" aria-labelledby="file-${file.kind}">
    <h2 id="file-${file.kind}">${FILES[file.kind]} <small><code>${plain(file.file)}</code></small></h2>
    ${file.managed ? html`<p class="muted">${plain(file.managed)}.</p>` : nothing}
    ${isEdited ? html`<p class="error">${file.on_disk ? "What is on the disk is none of these." : "The file is gone."}
      <a href=${href("settings", versions[0].name)}>Compare</a></p>` : nothing}
    ${versions.length === 0 ? html`<p class="muted">No version was kept yet.</p>` : html`
    <p class="muted">Kept in <code>${plain(file.folder)}</code>, with secrets, for the gateway's user alone.</p>
    <div class="scroll" tabindex="0" role="region" aria-label="Versions of ${plain(file.file)}"><table>
      <thead><tr><th scope="col">Version</th><th scope="col">In force since</th><th scope="col" class="n">Lines</th>
        <th scope="col" class="n">Size</th><th scope="col">Against the one before</th><th scope="col">Now</th><td></td></tr></thead>
      <tbody>${versions.map((one) => html`<tr aria-current=${one.name === shown ? "true" : nothing}><th scope="row"><code>${plain(one.name)}</code></th>
        <td>${new Date(one.at).toLocaleString()}</td><td class="n">${count(one.lines)}</td><td class="n">${bytes(one.bytes)}</td>
        <td><span class="plus">+${count(one.added)}</span> <span class="minus">−${count(one.removed)}</span></td>
        <td>${[one.in_force ? "in force" : "", one.on_disk ? "on the disk" : ""].filter(Boolean).join(", ")}</td>
        <td><a class="button small" href=${href("settings", one.name)} aria-label="Compare ${plain(one.name)}">Compare</a></td></tr>`)}</tbody>
    </table></div>`}
  </section>`;
}

function bytes(value) {
  return value < 2 ** 20 ? `${(value / 1024).toFixed(1)} KiB` : size(value);
}

// One version against the file, and the way back.

function comparedView(one, redraw) {
  const isSame = one.lines.length === 0;
  const managed = known.files?.find((file) => file.file === one.file)?.managed;
  return html`<section id="compared" class="panel" aria-labelledby="compared-title">
    <div class="bar"><h2 id="compared-title">Since <code>${plain(one.from)}</code></h2>
      <small>${isSame ? "the file is that version" : html`<span class="plus">+${count(one.added)}</span>
        <span class="minus">−${count(one.removed)}</span> in <code>${plain(one.file)}</code>, secrets masked`}</small>
      <a href=${href("settings")}>Close</a></div>
    ${isSame ? nothing : html`<div class="scroll diff" tabindex="0" role="region" aria-label="What has changed since"><pre>${one.lines.map(
      (line) => html`<span class=${{ "+": "plus", "-": "minus", "@": "muted" }[line[0]] ?? ""}>${plain(line)}\n</span>`)}</pre></div>
    ${one.cut ? html`<p class="muted">There is more; <code>llama-gateway settings diff</code> shows as much.</p>` : nothing}
    ${managed ? html`<p class="muted">It can't be rolled back here: ${plain(managed)}.</p>`
    : html`<p class="actions"><button ?disabled=${isBusy} @click=${() => rollBack(one.from, redraw)}>Roll back…</button></p>`}`}
  </section>`;
}

async function rollBack(version, redraw) {
  const question = `Roll back to ${version}? The lines with − come back, those with + go; what is there now is kept as a version.`;
  if (!await confirmed(question, "Roll back")) return;
  isBusy = true;
  redraw();
  try {
    const done = await (await ask("POST", "admin/config/rollback", { body: { version } })).json();
    toast(`${done.file} is that of ${done.version} again.`);
  } catch (error) {
    isBusy = false;
    reloaded = { message: error.message, problems: error.problems ?? [] };
    redraw();
    return;
  }
  reload(version, redraw);
}

// Every value.

function valuesView(origins, query, redraw) {
  const [words, set] = [query.get("find") ?? "", query.get("set") === "1"];
  const choose = (name, value) => { setQuery(name, value); redraw(); };
  const wanted = words.trim().toLowerCase();
  const found = origins.values.filter((one) => (!set || one.line !== null || one.by !== null) && (!wanted || one.key.toLowerCase().includes(wanted)));
  return html`<section id="values" class="panel" aria-labelledby="values-title">
    <div class="bar"><h2 id="values-title">In force <small>secrets masked</small></h2>
      <label class="filter"><span class="unseen">Find settings</span><input type="search" placeholder="queue, keys[0], tls"
        autocomplete="off" .value=${words} @input=${(event) => choose("find", event.target.value)}></label>
      <label><input type="checkbox" .checked=${set} @change=${(event) => choose("set", event.target.checked ? "1" : "")}> only what is set</label></div>
    ${origins.file === null ? html`<p class="muted">There is no settings file: all is by default, but for options and variables.</p>` : nothing}
    ${found.length === 0 ? html`<p class="muted">No setting is like that.</p>` : html`
    ${tableView("Settings in force", ["Setting", "Value", "From"], found, (one) => [html`<code>${plain(one.key)}</code>`,
      html`<span class="value">${plain(typeof one.value === "string" ? one.value : JSON.stringify(one.value))}</span>`,
      originOf(one, origins.file)], { key: (one) => one.key, most: MOST_LISTED })}`}
    ${origins.complete ? nothing : html`<p class="muted">Only the first ${count(origins.values.length)} are told.</p>`}
  </section>`;
}

function originOf({ line, by }, file) {
  if (line === null && by === null) return html`<span class="muted">default</span>`;
  const place = line === null ? nothing : html`<code>${plain((file ?? "").split("/").at(-1))}:${line}</code>`;
  return html`${place}${line !== null && by !== null ? ", " : nothing}${by === null ? nothing : html`<code>${plain(by)}</code>`}`;
}

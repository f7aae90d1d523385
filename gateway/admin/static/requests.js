// Requests in flight, without their text.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { cancel } from "./actions.js";
import { callerName, count, plain, rate, seconds } from "./format.js";
import { href } from "./route.js";
import { state } from "./state.js";

export { closeItem, dialog, openItem } from "./why.js";

const FEW = 14;
const ORDER = { writing: 0, reading: 1, waiting: 2 };

let showsAll = false;

export function view(_, redraw) {
  const { requests, at } = state;
  const inFlight = state.summary.in_flight;
  const rows = [...requests.values()].sort(
    (a, b) => (ORDER[a.state] - ORDER[b.state]) || (a.position ?? 0) - (b.position ?? 0)
      || a.received_at - b.received_at,
  );
  const shown = showsAll ? rows : rows.slice(0, FEW);
  return html`<section id="requests" class="panel" tabindex="-1" aria-labelledby="requests-title">
    <h2 id="requests-title">Requests in flight <small>${count(inFlight)}</small></h2>
    ${rows.length === 0 ? html`<p class="muted">Nothing waits and nothing runs.</p>` : html`
    <div class="scroll" tabindex="0" role="region" aria-label="Requests in flight">
      <table>
        <thead><tr><th scope="col">Request</th><th scope="col">State</th><th scope="col">Class</th>
          <th scope="col">Model</th><th scope="col">Caller</th><th scope="col">Node</th>
          <th scope="col" class="n">Age</th><th scope="col" class="n">TTFT</th>
          <th scope="col" class="n">Tokens</th><th scope="col" class="n">Tokens/s</th>
          <th scope="col"><span class="unseen">Actions</span></th></tr></thead>
        <tbody>${repeat(shown, (row) => row.id, (row) => requestRow(row, at))}</tbody>
      </table>
    </div>
    ${rows.length > FEW || inFlight > rows.length ? html`<p class="muted">
      ${rows.length > FEW ? html`<button @click=${() => { showsAll = !showsAll; redraw(); }}>
        ${showsAll ? "Show fewer" : `Show ${rows.length}`}</button>` : nothing}
      ${inFlight > rows.length ? `${count(inFlight - rows.length)} more are not listed.` : nothing}</p>` : nothing}`}
  </section>`;
}

function requestRow(row, at) {
  const age = Math.max(0, Math.round(at - row.received_at));
  return guard([row.version, age], () => html`<tr class=${row.state}>
    <th scope="row"><code title=${plain(row.request_id)}>${plain(shortened(row.request_id))}</code></th>
    <td><span class="phase ${row.state}">${row.state}</span>${row.state === "waiting" ? html` <span
      class="muted">place ${row.position}${row.expected_start === null ? nothing
      : `, in ${seconds(row.expected_start)}`}</span>` : nothing}</td>
    <td>${row.class}</td><td class="cut" title=${plain(row.model)}>${plain(row.model)}</td><td class="cut" title=${callerName(row)}>${callerName(row)}</td>
    <td class="cut" title=${plain(row.node ?? "")}>${row.node === null ? "–" : plain(row.node)}${row.attempts > 1
      ? html` <span class="muted">attempt ${row.attempts}</span>` : nothing}</td>
    <td class="n">${seconds(age)}</td><td class="n">${seconds(row.ttft)}</td>
    <td class="n">${count(row.prompt_tokens)} + ${count(row.tokens)}</td>
    <td class="n">${rate(row.tokens_per_second)}</td>
    <td class="actions"><a class="button small" href=${href("requests", row.id)}
      aria-label="Why request ${plain(row.request_id)}">Why</a><button class="small" @click=${(event) => cancel(event, row.id, row.request_id)}
      aria-label="Cancel request ${plain(row.request_id)}">Cancel</button></td>
  </tr>`);
}

function shortened(id) {
  return id.length <= 14 ? id : `…${id.slice(-10)}`;
}

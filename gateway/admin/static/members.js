// The machines of a cluster, with what their edges do.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { count, percent, plain, seconds } from "./format.js";

export function membersView(cluster) {
  if (cluster === null || cluster === undefined) return nothing;
  return html`<section id="members" class="panel" aria-labelledby="members-title">
    <h2 id="members-title">Cluster ${plain(cluster.name)} <small>${
      cluster.leader === null ? "nobody leads" : html`${plain(cluster.leader)} leads`}</small></h2>
    <table><thead><tr><th>Member</th><th>Role</th><th>Address</th><th>Heard</th><th>Edges</th><th>Streams</th><th>CPU</th></tr></thead>
    <tbody>${cluster.members.map(memberView)}</tbody></table>
  </section>`;
}

function memberView(member) {
  const ready = member.edges.filter((edge) => edge.ready).length;
  const sum = (name) => member.edges.reduce((total, edge) => total + edge[name], 0);
  return html`<tr><td>${plain(member.name)}</td><td>${member.role}</td><td>${plain(member.address)}</td>
    <td>${member.heard_seconds === null ? "never" : `${seconds(member.heard_seconds)} ago`}</td>
    <td>${count(ready)} of ${count(member.edges.length)}</td><td>${count(sum("streams"))}</td>
    <td>${percent(sum("cpu_share"))}</td></tr>`;
}

// The machines of a cluster, with what their edges do.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { count, percent, plain, seconds } from "./format.js";
import { tableView } from "./table.js";

export function membersView(cluster) {
  if (cluster === null || cluster === undefined) return nothing;
  return html`<section id="members" class="panel" aria-labelledby="members-title">
    <h2 id="members-title">Cluster ${plain(cluster.name)} <small>${
      cluster.leader === null ? "nobody leads" : html`${plain(cluster.leader)} leads`}</small></h2>
    ${tableView("Members", ["Member", "Role", "Address", "Heard", "Edges", "#Streams", "#CPU"], cluster.members, cellsOf)}
  </section>`;
}

function cellsOf(member) {
  const ready = member.edges.filter((edge) => edge.ready).length;
  const sum = (name) => member.edges.reduce((total, edge) => total + edge[name], 0);
  return [
    member.name, member.role, member.address, member.heard_seconds === null ? "never" : `${seconds(member.heard_seconds)} ago`,
    `${count(ready)} of ${count(member.edges.length)}`, count(sum("streams")), percent(sum("cpu_share")),
  ];
}

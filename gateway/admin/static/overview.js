// The first page: what is wrong, the fleet, and the last hour.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { chartsView, drawCharts } from "./charts.js";
import { membersView } from "./members.js";
import * as nodes from "./nodes.js";
import { problemsView } from "./problems.js";
import { state } from "./state.js";

let isMarked = false;

export function view(route, redraw) {
  const { connection, problems, summary, versions } = state;
  return html`${connection === "lost" && problems.length === 0 ? nothing
      : guard([problems, versions.page], () => problemsView(problems))}
    ${guard(nodes.depends(route), () => nodes.view(route, redraw))}
    ${guard([summary], () => membersView(summary.cluster))}
    ${guard([1], chartsView)}`;
}

export function drawn() {
  nodes.drawn();
  if (isMarked) drawCharts();
  else {
    isMarked = true;
    performance.mark("fleet drawn");
    requestAnimationFrame(() => setTimeout(drawCharts, 0));
  }
}

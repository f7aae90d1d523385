// Problems first: what is wrong, why, and what to do.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { copy } from "./actions.js";
import { plain } from "./format.js";
import { href } from "./route.js";

const MARKS = { critical: "✕", warning: "▲", notice: "●" };

export function problemsView(problems) {
  if (problems.length === 0) {
    return html`<section id="problems" class="calm" aria-label="Problems">
      <h2><span class="mark ok" aria-hidden="true">✓</span> Nothing needs attention</h2>
    </section>`;
  }
  return html`<section id="problems" aria-labelledby="problems-title">
    <h2 id="problems-title">${problems.length === 1 ? "One problem" : `${problems.length} problems`}</h2>
    <ol class="problems">${problems.map((one) => problemView(one))}</ol>
  </section>`;
}

function problemView(problem) {
  return html`<li class="problem ${problem.severity}">
    <h3><span class="mark" aria-hidden="true">${MARKS[problem.severity] ?? "●"}</span>
      <span class="severity">${problem.severity}</span> ${plain(problem.title)}</h3>
    <p class="cause">${plain(problem.cause)}${problem.caller
      ? html` Its caller: <code>${plain(problem.caller)}</code>.` : nothing}</p>
    <p class="remedy">${plain(problem.remedy)}</p>
    <p class="links">
      ${problem.nodes.map((name) => html`<a href=${href("nodes", name)}>${plain(name)}</a>`)}
      ${problem.commands.map((command) => html`<span class="command"><code>${plain(command)}</code><button
        class="copy" @click=${() => copy(command)} aria-label="Copy the command ${plain(command)}">Copy</button></span>`)}
    </p>
  </li>`;
}

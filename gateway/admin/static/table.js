// Tables that scroll by themselves where the screen is narrower, and what stands in their cells.

import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { plain, plural } from "./format.js";

/**
 * A table. A column that begins with "#" has numbers, and `nothing` is no column. `cellsOf` a row returns foreign text, or
 * what lit renders; the first names the row. A row keeps its elements by its `key`. Of rows beyond `most` it tells how many
 * there are.
 */
export function tableView(label, columns, rows, cellsOf, { key = (row) => row.id ?? row.name, most = 200, word = "more row" } = {}) {
  const classes = columns.map((column) => (column !== nothing && column.startsWith("#") ? "n" : ""));
  const cell = (given, place) => {
    const shown = typeof given === "string" ? plain(given) : given;
    return columns[place] === nothing ? nothing : place === 0 ? html`<th scope="row">${shown}</th>` : html`<td class=${classes[place]}>${shown}</td>`;
  };
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table>
    <thead><tr>${columns.map((column, place) => (column === nothing ? nothing : column === "" ? html`<td></td>` : html`<th scope="col"
      class=${classes[place]}>${column === "Actions" ? html`<span class="unseen">Actions</span>` : column.replace("#", "")}</th>`))}</tr></thead>
    <tbody>${repeat(rows.slice(0, most), key, (row) => html`<tr>${cellsOf(row).map(cell)}</tr>`)}</tbody></table></div>
    ${moreView(rows.length - most, word)}`;
}

export function moreView(left, word) {
  return left > 0 ? html`<p class="muted">and ${plural(left, word)}</p>` : nothing;
}

/** Foreign text that is cut where it is long; `title` tells all of it. */
export function cutView(text, title = text) {
  return html`<span class="cut" title=${plain(title)}>${text === null ? "–" : plain(text)}</span>`;
}
